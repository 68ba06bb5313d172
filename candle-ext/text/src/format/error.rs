//! Rows that do not say what their format promises.

use serde_json::Value;

use crate::source::{Row, SourceError};

/// A data set whose columns cannot be understood, or a row that breaks its format.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The row could not be read at all.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// One row is not as the format wants it.
    #[error("read {place} as {format}: {problem}; {fix}")]
    InvalidRow {
        /// File and line.
        place: String,
        /// The format's name.
        format: &'static str,
        /// The column and what is wrong with it.
        problem: String,
        /// What to do about it.
        fix: String,
    },
    /// The columns are of no known format, or of several.
    #[error("tell the format of {place}: {problem}\n  columns: {columns}\n  {help}")]
    UnknownFormat {
        /// The first row's place.
        place: String,
        /// Why no format was chosen.
        problem: String,
        /// The columns that are there.
        columns: String,
        /// The formats there are and how to name the columns.
        help: String,
    },
    /// What the recipe says about the format cannot be used.
    #[error("use {key}: {problem}")]
    InvalidOption {
        /// The recipe's key.
        key: &'static str,
        /// What is wrong with it.
        problem: String,
    },
}

/// What is wrong with a row, before it is known where the row stands.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RowProblem {
    pub(crate) problem: String,
    pub(crate) fix: String,
}

impl RowProblem {
    pub(crate) fn new(problem: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { problem: problem.into(), fix: fix.into() }
    }

    /// Adds the list's column and the item.
    pub(crate) fn within(self, column: &str, item_idx: usize) -> Self {
        Self { problem: format!("column `{column}`, item {item_idx}: {}", self.problem), ..self }
    }

    /// `column` holds something else than `expected`.
    pub(crate) fn type_of(column: &str, found: Option<&Value>, expected: &str) -> Self {
        let found = found.map_or("missing".to_owned(), type_name);
        let fix = "correct the row, or name the right column in the recipe";
        Self::new(format!("column `{column}` is {found}, expected {expected}"), fix)
    }
}

/// The text in `column`; missing is a fault, and so is any other type.
pub(crate) fn text<'a>(row: &'a Row, column: &str) -> Result<&'a str, RowProblem> {
    match row.get(column) {
        Some(Value::String(text)) => Ok(text),
        other => Err(RowProblem::type_of(column, other, "a text")),
    }
}

/// The text in `column`, empty when the column is missing or null.
pub(crate) fn optional_text<'a>(row: &'a Row, column: &str) -> Result<&'a str, RowProblem> {
    match row.get(column) {
        None | Some(Value::Null) => Ok(""),
        Some(_) => text(row, column),
    }
}

/// Names a value's type the way a person would.
pub(crate) fn type_name(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "a truth value".into(),
        Value::Number(number) => format!("the number {number}"),
        Value::String(_) => "a text".into(),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".into(),
    }
}
