//! The plain text format: one column, every token with loss.

use super::Document;
use super::error::{RowProblem, text};
use crate::source::Row;

/// Column of plain text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextColumn {
    /// Name of the column.
    pub column: String,
}

impl TextColumn {
    pub(crate) fn parse(&self, row: &Row) -> Result<Document, RowProblem> {
        Ok(Document::Text(text(row, &self.column)?.to_owned()))
    }
}
