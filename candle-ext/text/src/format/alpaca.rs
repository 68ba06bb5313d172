//! The Alpaca format: an instruction, an optional input, the output; earlier turns in `history`.
//!
//! In the chat, the user message is the instruction and, on the next line, the input.

use serde_json::Value;

use super::Document;
use super::chat::conversation;
use super::error::{RowProblem, optional_text, text};
use crate::conversation::Message;
use crate::source::Row;

/// Column names of an Alpaca data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alpaca {
    /// Column of the instruction.
    pub instruction: String,
    /// Column of the input, if there is one.
    pub input: Option<String>,
    /// Column of the response.
    pub output: String,
    /// Column of earlier turns: a list of `[user, assistant]` strings.
    pub history: Option<String>,
}

impl Alpaca {
    pub(crate) fn columns(&self) -> Vec<String> {
        let all = [Some(&self.instruction), self.input.as_ref(), Some(&self.output), self.history.as_ref()];
        all.into_iter().flatten().cloned().collect()
    }

    pub(crate) fn parse(&self, row: &Row) -> Result<Document, RowProblem> {
        let mut messages = match &self.history {
            Some(column) => history(row, column)?,
            None => Vec::new(),
        };
        let instruction = text(row, &self.instruction)?;
        let input = match &self.input {
            Some(column) => optional_text(row, column)?,
            None => "",
        };
        let asked = match (instruction.is_empty(), input.is_empty()) {
            (_, true) => instruction.to_owned(),
            (true, false) => input.to_owned(),
            (false, false) => format!("{instruction}\n{input}"),
        };
        messages.push(Message::new("user", asked));
        messages.push(Message::new("assistant", text(row, &self.output)?));
        Ok(Document::Conversation(conversation(row, messages)?))
    }
}

fn history(row: &Row, column: &str) -> Result<Vec<Message>, RowProblem> {
    let turns = match row.get(column) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(turns)) => turns,
        other => return Err(RowProblem::type_of(column, other, "a list of [user, assistant] texts")),
    };
    let mut messages = Vec::new();
    for (idx, turn) in turns.iter().enumerate() {
        let texts: Option<Vec<&str>> = turn.as_array().and_then(|texts| texts.iter().map(Value::as_str).collect());
        let Some(&[user, assistant]) = texts.as_deref() else {
            let problem = format!("column `{column}`, item {idx} is not a pair of strings");
            return Err(RowProblem::new(problem, "write earlier turns as [[\"user\", \"assistant\"], ...]"));
        };
        messages.push(Message::new("user", user));
        messages.push(Message::new("assistant", assistant));
    }
    Ok(messages)
}
