//! OpenAI's form: a list of `{role, content}`, with tool calls and tools.

use super::Document;
use super::chat::{conversation, list, message, object};
use super::error::Fault;
use crate::source::Row;

/// A column with a list of `{role, content, ...}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Messages {
    /// The list's column.
    pub column: String,
}

impl Messages {
    pub(crate) fn parse(&self, row: &Row) -> Result<Document, Fault> {
        let items = list(row, &self.column)?.into_iter().enumerate();
        let messages = items
            .map(|(idx, item)| message(&self.column, idx, object(&self.column, idx, item)?))
            .collect::<Result<_, _>>()?;
        Ok(Document::Conversation(conversation(row, messages)?))
    }
}
