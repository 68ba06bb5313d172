//! The OpenAI format: a list of `{role, content}`, with tool calls and tool definitions.

use serde_json::{Map, Value};

use super::Document;
use super::chat::{conversation, list, message, object};
use super::error::RowProblem;
use crate::source::Row;

/// Column with a list of `{role, content, ...}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Messages {
    /// Name of the column.
    pub column: String,
    /// Key of the message text, if it is not `content`.
    pub content_key: Option<String>,
}

impl Messages {
    pub(crate) fn parse(&self, row: &Row) -> Result<Document, RowProblem> {
        let items = list(row, &self.column)?.into_iter().enumerate();
        let messages = items
            .map(|(idx, item)| message(&self.column, idx, self.renamed(idx, object(&self.column, idx, item)?)?))
            .collect::<Result<_, _>>()?;
        Ok(Document::Conversation(conversation(row, messages)?))
    }
    /// Renames the text's key to `content`.
    fn renamed(&self, idx: usize, mut fields: Map<String, Value>) -> Result<Map<String, Value>, RowProblem> {
        let Some(key) = &self.content_key else { return Ok(fields) };
        match fields.shift_remove(key) {
            Some(text) => {
                fields.insert("content".into(), text);
                Ok(fields)
            }
            None if fields.contains_key("tool_calls") => Ok(fields),
            None => {
                let problem = format!("column `{}`, item {idx}: there is no key `{key}`", self.column);
                Err(RowProblem::new(problem, "correct the row, or name the key of the text in content_key"))
            }
        }
    }
}
