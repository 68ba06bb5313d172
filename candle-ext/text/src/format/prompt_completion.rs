//! The prompt/completion format: two strings, or two lists of messages as in TRL.

use serde_json::{Value, json};

use super::Document;
use super::chat::{conversation, message, object};
use super::error::RowProblem;
use crate::conversation::Message;
use crate::source::Row;

/// Column names of a prompt/completion data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptCompletionColumns {
    /// Column of the prompt, without loss.
    pub prompt: String,
    /// Column of the completion, with loss.
    pub completion: String,
}

impl PromptCompletionColumns {
    pub(crate) fn parse(&self, row: &Row) -> Result<Document, RowProblem> {
        match (row.get(&self.prompt), row.get(&self.completion)) {
            (Some(Value::String(prompt)), Some(Value::String(completion))) => {
                Ok(Document::PromptCompletion { prompt: prompt.clone(), completion: completion.clone() })
            }
            (Some(Value::Array(prompt)), Some(Value::Array(completion))) => {
                let context = turns(&self.prompt, prompt)?.into_iter().map(as_context);
                let learned = turns(&self.completion, completion)?;
                let messages = context.chain(learned).collect();
                Ok(Document::Conversation(conversation(row, messages)?))
            }
            (Some(Value::Array(_)), other) => {
                Err(RowProblem::type_of(&self.completion, other, "a list of messages, as the prompt is"))
            }
            (Some(Value::String(_)), other) => {
                Err(RowProblem::type_of(&self.completion, other, "a string, as the prompt is"))
            }
            (other, _) => Err(RowProblem::type_of(&self.prompt, other, "a string or a list of messages")),
        }
    }
}

fn turns(column: &str, items: &[Value]) -> Result<Vec<Message>, RowProblem> {
    let items = items.iter().cloned().enumerate();
    items.map(|(idx, item)| message(column, idx, object(column, idx, item)?)).collect()
}

/// Masks a message of the prompt from the loss.
fn as_context(message: Message) -> Message {
    message.with("weight", json!(0))
}
