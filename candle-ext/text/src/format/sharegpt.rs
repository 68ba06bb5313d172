//! The ShareGPT format: a list of `{from, value}` with role names of its own.

use serde_json::{Map, Value};

use super::Document;
use super::chat::{calls_in_text, conversation, known_names, list, message, object, role_of_alias};
use super::error::{RowProblem, type_name};
use super::hints;
use crate::conversation::Message;
use crate::source::Row;

/// Column with a list of `{from, value}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareGpt {
    /// Name of the column.
    pub column: String,
}

const MAP_IT: &str = "correct the row, or name the roles in the recipe with role_mapping";
/// Speaker names whose text is a tool call.
pub(super) const CALLS: [&str; 4] = ["function_call", "function-call", "tool_call", "tool_calls"];

impl ShareGpt {
    pub(crate) fn parse(&self, row: &Row) -> Result<Document, RowProblem> {
        let items = list(row, &self.column)?;
        let turn = |(idx, item): (usize, &Value)| self.turn(idx, object(&self.column, idx, item.clone())?);
        let messages: Result<_, RowProblem> = items.iter().enumerate().map(turn).collect();
        let messages = messages.map_err(|fault| match hints::mapping(&self.column, &items) {
            Some(mapping) if fault.fix == MAP_IT => {
                RowProblem { fix: format!("correct the row, or write {mapping}"), ..fault }
            }
            _ => fault,
        })?;
        Ok(Document::Conversation(conversation(row, messages)?))
    }

    fn turn(&self, idx: usize, mut fields: Map<String, Value>) -> Result<Message, RowProblem> {
        let from = self.take_text(idx, &mut fields, "from")?;
        let value = self.take_text(idx, &mut fields, "value")?;
        let mut turn = Map::new();
        if CALLS.contains(&from.as_str()) {
            let calls = calls_in_text(&value).ok_or_else(|| {
                let column = &self.column;
                let problem = format!("column `{column}`, item {idx}: `value` of a {from} is not a call");
                RowProblem::new(problem, "write it as {\"name\": ..., \"arguments\": {...}}")
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

    fn role(&self, idx: usize, from: &str) -> Result<&'static str, RowProblem> {
        role_of_alias(from).ok_or_else(|| {
            let problem = format!(
                "column `{}`, item {idx}: `from` is {from:?}, expected one of {}, function_call",
                self.column,
                known_names()
            );
            RowProblem::new(problem, MAP_IT)
        })
    }

    fn take_text(&self, idx: usize, fields: &mut Map<String, Value>, key: &str) -> Result<String, RowProblem> {
        match fields.shift_remove(key) {
            Some(Value::String(text)) => Ok(text),
            other => {
                let found = other.as_ref().map_or("missing".into(), type_name);
                let problem = format!("column `{}`, item {idx}: key `{key}` is {found}", self.column);
                Err(RowProblem::new(problem, "write each turn as {\"from\": \"human\", \"value\": \"...\"}"))
            }
        }
    }
}
