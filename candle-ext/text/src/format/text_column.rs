//! Plain text: one column, all of it to be learned.

use super::Document;
use super::error::{RowProblem, text};
use crate::source::Row;

/// A column of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextColumn {
    /// Its name.
    pub column: String,
}

impl TextColumn {
    pub(crate) fn parse(&self, row: &Row) -> Result<Document, RowProblem> {
        Ok(Document::Text(text(row, &self.column)?.to_owned()))
    }
}
