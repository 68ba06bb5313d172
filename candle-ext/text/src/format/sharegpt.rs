//! ShareGPT's form: a list of `{from, value}` with its own names for the roles.

use serde_json::{Map, Value};

use super::Document;
use super::chat::{calls_in_text, conversation, list, message, object};
use super::error::{Fault, type_name};
use crate::conversation::Message;
use crate::source::Row;

/// A column with a list of `{from, value}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareGpt {
    /// The list's column.
    pub column: String,
}

/// The names in `from` and the roles they mean.
const ROLES: [(&str, &[&str]); 4] = [
    ("system", &["system"]),
    ("user", &["human", "user"]),
    ("assistant", &["gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"]),
    ("tool", &["tool", "observation", "tool_response", "function_response", "function-response"]),
];
const CALLS: [&str; 4] = ["function_call", "function-call", "tool_call", "tool_calls"];

impl ShareGpt {
    pub(crate) fn parse(&self, row: &Row) -> Result<Document, Fault> {
        let items = list(row, &self.column)?.into_iter().enumerate();
        let messages =
            items.map(|(idx, item)| self.turn(idx, object(&self.column, idx, item)?)).collect::<Result<_, _>>()?;
        Ok(Document::Conversation(conversation(row, messages)?))
    }

    fn turn(&self, idx: usize, mut fields: Map<String, Value>) -> Result<Message, Fault> {
        let from = self.take_text(idx, &mut fields, "from")?;
        let value = self.take_text(idx, &mut fields, "value")?;
        let mut turn = Map::new();
        if CALLS.contains(&from.as_str()) {
            let calls = calls_in_text(&value).ok_or_else(|| {
                let column = &self.column;
                let problem = format!("column `{column}`, item {idx}: `value` of a {from} is not a call");
                Fault::new(problem, "write it as {\"name\": ..., \"arguments\": {...}}")
            })?;
            turn.insert("role".into(), "assistant".into());
            turn.insert("content".into(), "".into());
            turn.insert("tool_calls".into(), calls);
        } else {
            turn.insert("role".into(), self.role(idx, &from)?.into());
            turn.insert("content".into(), value.into());
        }
        turn.extend(fields);
        message(&self.column, idx, turn)
    }

    fn role(&self, idx: usize, from: &str) -> Result<&'static str, Fault> {
        let wanted = from.to_ascii_lowercase();
        let found = ROLES.iter().find(|(_, names)| names.contains(&wanted.as_str()));
        found.map(|(role, _)| *role).ok_or_else(|| {
            let known: Vec<_> = ROLES.iter().flat_map(|(_, names)| *names).copied().collect();
            let problem = format!(
                "column `{}`, item {idx}: `from` is {from:?}, expected one of {}, function_call",
                self.column,
                known.join(", ")
            );
            let fix = format!("correct the row, or map it: role_mapping: {{user: {}.from.{from}}}", self.column);
            Fault::new(problem, fix)
        })
    }

    fn take_text(&self, idx: usize, fields: &mut Map<String, Value>, key: &str) -> Result<String, Fault> {
        match fields.shift_remove(key) {
            Some(Value::String(text)) => Ok(text),
            other => {
                let found = other.as_ref().map_or("missing".into(), type_name);
                let problem = format!("column `{}`, item {idx}: key `{key}` is {found}", self.column);
                Err(Fault::new(problem, "write each turn as {\"from\": \"human\", \"value\": \"...\"}"))
            }
        }
    }
}
