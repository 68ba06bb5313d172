//! Messages stored as a struct of lists, `{"role": [...], "content": [...]}`, as by `Sequence` of datasets.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::error::RowProblem;
use crate::source::Row;

/// Keys of a speaker, one of which such a struct has.
const SPEAKERS: [&str; 2] = ["role", "from"];

/// Converts the columns of a row that are messages as a struct of lists to lists of messages.
pub(super) fn with_lists_of_messages(row: &Row) -> Result<Cow<'_, Row>, RowProblem> {
    if !row.values().any(|value| speakers(value).is_some()) {
        return Ok(Cow::Borrowed(row));
    }
    let columns = row.iter().map(|(column, value)| match (value, speakers(value)) {
        (Value::Object(fields), Some((speaker, speakers))) => {
            Ok((column.clone(), messages(column, fields, speaker, speakers.len())?))
        }
        _ => Ok((column.clone(), value.clone())),
    });
    columns.collect::<Result<Row, RowProblem>>().map(Cow::Owned)
}

/// Returns the key of the speakers and their list, if the value is a struct of lists.
fn speakers(value: &Value) -> Option<(&'static str, &Vec<Value>)> {
    SPEAKERS.iter().find_map(|key| Some((*key, value.as_object()?.get(*key)?.as_array()?)))
}

fn messages(column: &str, fields: &Map<String, Value>, speaker: &str, n_messages: usize) -> Result<Value, RowProblem> {
    let mut messages = vec![Map::new(); n_messages];
    for (key, values) in fields.iter().filter(|(_, values)| !values.is_null()) {
        let values = values.as_array().filter(|values| values.len() == n_messages).ok_or_else(|| {
            let found = RowProblem::type_of(&format!("{column}.{key}"), Some(values), "a list").problem;
            let problem = format!("{found} of {n_messages}, as `{column}.{speaker}` is");
            RowProblem::new(problem, "correct or delete the row")
        })?;
        for (message, value) in messages.iter_mut().zip(values) {
            message.insert(key.clone(), value.clone());
        }
    }
    Ok(messages.into_iter().map(Value::Object).collect())
}
