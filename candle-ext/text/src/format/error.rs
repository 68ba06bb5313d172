//! Errors of row formats.

use serde_json::Value;

use crate::long_integer;
use crate::source::{Row, SourceError};

/// Error of a data set with unknown columns, or of a row that violates its format.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The row cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The row violates the format.
    #[error("read {place} as {format}: {problem}; {fix}")]
    InvalidRow {
        /// File and line of the row.
        place: String,
        /// The format's name.
        format: &'static str,
        /// The column and its problem.
        problem: String,
        /// The remedy.
        fix: String,
    },
    /// The columns match no known format, or several.
    #[error("detect the format of {place}: {problem}\n  columns: {columns}\n  {help}")]
    UnknownFormat {
        /// File and line of the first row.
        place: String,
        /// Reason why no format was chosen.
        problem: String,
        /// Columns of the first rows.
        columns: String,
        /// Known formats, and the options that name columns.
        help: String,
    },
    /// The recipe's option cannot be used.
    #[error("use {key}: {problem}")]
    InvalidOption {
        /// The option's key.
        key: &'static str,
        /// The problem.
        problem: String,
    },
}

/// Problem of a row and its remedy, without the row's location.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RowProblem {
    pub(crate) problem: String,
    pub(crate) fix: String,
}

impl RowProblem {
    pub(crate) fn new(problem: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { problem: problem.into(), fix: fix.into() }
    }

    /// Adds the list's column and the item index to the problem.
    pub(crate) fn within(self, column: &str, item_idx: usize) -> Self {
        Self { problem: format!("column `{column}`, item {item_idx}: {}", self.problem), ..self }
    }

    /// Returns the problem of a column whose type is not `expected`.
    pub(crate) fn type_of(column: &str, found: Option<&Value>, expected: &str) -> Self {
        let found = found.map_or("missing".to_owned(), type_name);
        let fix = "correct the row, or name the right column in the recipe";
        Self::new(format!("column `{column}` is {found}, expected {expected}"), fix)
    }
}

/// Returns the string in `column`. A missing column and any other type are errors.
pub(crate) fn text<'a>(row: &'a Row, column: &str) -> Result<&'a str, RowProblem> {
    match row.get(column) {
        Some(Value::String(text)) => Ok(text),
        other => Err(RowProblem::type_of(column, other, "a string")),
    }
}

/// Returns the string in `column`, or an empty string if the column is missing or null.
pub(crate) fn optional_text<'a>(row: &'a Row, column: &str) -> Result<&'a str, RowProblem> {
    match row.get(column) {
        None | Some(Value::Null) => Ok(""),
        Some(_) => text(row, column),
    }
}

/// Names a JSON value's type for messages.
pub(crate) fn type_name(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "a boolean".into(),
        Value::Number(number) => format!("the number {number}"),
        Value::String(_) => "a string".into(),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => match long_integer::digits(value) {
            Some(digits) => format!("the number {digits}"),
            None => "an object".into(),
        },
    }
}
