//! Removal of the null fields that a file format adds to nested structs.
//!
//! All structs of a Parquet column have the same fields. So a tool schema has the properties of all other schemas, as nulls,
//! and a chat template would print them. A null of the original data looks the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use super::{Row, RowSource, SourceError, SourceFiles};

/// Rows whose nested null fields are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NullFieldRemoval {
    /// Rows of formats that add null fields: Parquet.
    OfFormat,
    /// Every row.
    Always,
    /// No row.
    Never,
}

/// Row source without null fields in nested structs. Columns and keys of messages may be null.
pub struct WithoutNullFields {
    inner: Arc<dyn RowSource>,
    removal: NullFieldRemoval,
    /// Least index of a row read that had null fields. `usize::MAX` without one.
    first: AtomicUsize,
}

impl NullFieldRemoval {
    /// Returns the meaning of the key `remove_none_values`.
    pub fn of(remove_none_values: Option<bool>) -> Self {
        match remove_none_values {
            None => Self::OfFormat,
            Some(true) => Self::Always,
            Some(false) => Self::Never,
        }
    }
}

impl WithoutNullFields {
    /// Removes null fields from the rows of `inner` that `removal` selects.
    pub fn new(inner: Arc<dyn RowSource>, removal: NullFieldRemoval) -> Self {
        Self { inner, removal, first: AtomicUsize::new(usize::MAX) }
    }

    fn is_changed(&self, row_idx: usize) -> bool {
        match self.removal {
            NullFieldRemoval::OfFormat => self.inner.adds_null_fields(row_idx),
            NullFieldRemoval::Always => true,
            NullFieldRemoval::Never => false,
        }
    }
}

impl RowSource for WithoutNullFields {
    fn len(&self) -> usize {
        self.inner.len()
    }
    fn row(&self, row_idx: usize) -> Result<Row, SourceError> {
        let mut row = self.inner.row(row_idx)?;
        if self.is_changed(row_idx) && row.values_mut().map(remove_null_fields).sum::<usize>() > 0 {
            self.first.fetch_min(row_idx, Ordering::Relaxed);
        }
        Ok(row)
    }
    fn locate(&self, row_idx: usize) -> String {
        self.inner.locate(row_idx)
    }
    fn files(&self) -> SourceFiles {
        self.inner.files()
    }
    fn first_row_with_removed_nulls(&self) -> Option<String> {
        let first = self.first.load(Ordering::Relaxed);
        (first != usize::MAX).then(|| self.locate(first))
    }
}

/// Removes the null fields of all objects in a column, except for those of its messages. Returns their number.
fn remove_null_fields(column: &mut Value) -> usize {
    let items = match column {
        Value::Array(items) => items.as_mut_slice(),
        item => std::slice::from_mut(item),
    };
    let of_item = |item: &mut Value| match item {
        // A null content is an empty answer.
        Value::Object(fields) if is_message(fields) => fields.values_mut().map(remove_nested).sum(),
        item => remove_nested(item),
    };
    items.iter_mut().map(of_item).sum()
}

fn is_message(fields: &Row) -> bool {
    ["role", "from"].iter().any(|key| fields.get(*key).is_some_and(Value::is_string))
}

fn remove_nested(value: &mut Value) -> usize {
    match value {
        Value::Array(items) => items.iter_mut().map(remove_nested).sum(),
        Value::Object(fields) => {
            let n_before = fields.len();
            fields.retain(|_, value| !value.is_null());
            n_before - fields.len() + fields.values_mut().map(remove_nested).sum::<usize>()
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn null_fields_of_nested_structs_are_removed() {
        for (mut value, want, n_removed) in [
            (json!(null), json!(null), 0),
            (json!([null, 1]), json!([null, 1]), 0),
            (json!({"a": null, "b": {"c": null, "d": [{"e": null, "f": 0}]}}), json!({"b": {"d": [{"f": 0}]}}), 3),
            (json!({"role": "tool", "content": null}), json!({"role": "tool", "content": null}), 0),
            (
                json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": {"x": null}}}]}]),
                json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}]),
                1,
            ),
            // Arguments of a tool call are no message.
            (
                json!([{"role": "assistant", "tool_calls": [{"arguments": {"from": "Oslo", "to": "Rome", "date": null}}]}]),
                json!([{"role": "assistant", "tool_calls": [{"arguments": {"from": "Oslo", "to": "Rome"}}]}]),
                1,
            ),
            (
                json!({"properties": {"role": {"type": "string"}, "x": null}}),
                json!({"properties": {"role": {"type": "string"}}}),
                1,
            ),
        ] {
            assert_eq!(remove_null_fields(&mut value), n_removed, "{want}");
            assert_eq!(value, want);
        }
    }
}
