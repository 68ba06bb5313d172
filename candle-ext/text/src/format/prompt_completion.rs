//! A prompt and its completion: two texts, or two lists of messages as TRL has them.

use serde_json::{Value, json};

use super::Document;
use super::chat::{conversation, message, object};
use super::error::RowProblem;
use crate::conversation::Message;
use crate::source::Row;

/// The columns of a data set of prompts and completions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptCompletionColumns {
    /// What is given.
    pub prompt: String,
    /// What is to be learned.
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
                Err(RowProblem::type_of(&self.completion, other, "a text, as the prompt is"))
            }
            (other, _) => Err(RowProblem::type_of(&self.prompt, other, "a text or a list of messages")),
        }
    }
}

fn turns(column: &str, items: &[Value]) -> Result<Vec<Message>, RowProblem> {
    let items = items.iter().cloned().enumerate();
    items.map(|(idx, item)| message(column, idx, object(column, idx, item)?)).collect()
}

/// The prompt's own answers are given, not learned.
fn as_context(message: Message) -> Message {
    if message.is_assistant() { message.with("weight", json!(0)) } else { message }
}
