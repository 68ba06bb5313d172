//! What all chat formats share: JSON kept as text, tool definitions, tool calls, content parts.

use serde_json::{Map, Value, json};

use super::error::{Fault, optional_text, type_name};
use crate::conversation::{Conversation, Message};
use crate::source::Row;

/// Columns that hold the tools a conversation was offered.
const TOOL_COLUMNS: [&str; 2] = ["tools", "functions"];

/// Puts a conversation together with the row's `system` text and tool definitions.
pub(crate) fn conversation(row: &Row, mut messages: Vec<Message>) -> Result<Conversation, Fault> {
    let system = optional_text(row, "system").unwrap_or_default();
    let has_system = messages.iter().any(|message| message.role() == "system");
    if !system.is_empty() && !has_system {
        messages.insert(0, Message::new("system", system));
    }
    if messages.is_empty() {
        return Err(Fault::new("the conversation has no messages", "correct or delete the row"));
    }
    let tools = tools(row)?;
    Ok(Conversation { messages, tools })
}

/// The list in `column`, which may also be kept as JSON text.
pub(crate) fn list(row: &Row, column: &str) -> Result<Vec<Value>, Fault> {
    let expected = || Fault::type_of(column, row.get(column), "a list of messages");
    match row.get(column) {
        Some(Value::Array(items)) => Ok(items.clone()),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Array(items)) => Ok(items),
            _ => Err(expected()),
        },
        _ => Err(expected()),
    }
}

/// One message's fields, made regular: no null fields, text parts joined into one text, one name
/// for the weight.
pub(crate) fn message(column: &str, message_idx: usize, fields: Map<String, Value>) -> Result<Message, Fault> {
    let is_assistant = fields.get("role").is_some_and(|role| role == "assistant");
    let mut clean = Map::new();
    for (key, value) in fields {
        match key.as_str() {
            "content" => {
                clean.insert(key, join_parts(value));
            }
            "train" | "training" | "loss_weight" | "weight" => {
                if is_assistant && !is_learned(&value).ok_or_else(|| no_weight(column, message_idx, &key, &value))? {
                    clean.insert("weight".into(), json!(0));
                }
            }
            _ if is_nothing(&value) => {}
            _ => {
                clean.insert(key, value);
            }
        }
    }
    Message::from_fields(clean).map_err(|error| {
        let fix = "correct the row, or say with role_mapping and content_key where roles and texts are";
        let reason = error.to_string();
        let reason = reason.strip_prefix("read a message: ").unwrap_or(&reason);
        Fault::new(format!("column `{column}`, item {message_idx}: {reason}"), fix)
    })
}

/// The object in item `item_idx` of a list.
pub(crate) fn object(column: &str, item_idx: usize, item: Value) -> Result<Map<String, Value>, Fault> {
    match item {
        Value::Object(fields) => Ok(fields),
        other => Err(Fault::new(
            format!("column `{column}`, item {item_idx} is {}, expected an object", type_name(&other)),
            "correct the row",
        )),
    }
}

/// A call, or a list of calls, `{"name": ..., "arguments": ...}` as JSON text.
pub(crate) fn calls_in_text(text: &str) -> Option<Value> {
    let calls = match serde_json::from_str(text).ok()? {
        Value::Array(calls) => calls,
        call @ Value::Object(_) => vec![call],
        _ => return None,
    };
    calls.iter().all(|call| call.get("name").is_some()).then(|| {
        let wrap = |call| json!({"type": "function", "function": call});
        calls.iter().cloned().map(wrap).collect()
    })
}

fn tools(row: &Row) -> Result<Option<Value>, Fault> {
    let Some((column, value)) = TOOL_COLUMNS.iter().find_map(|c| Some((*c, row.get(*c)?))) else {
        return Ok(None);
    };
    let parsed = match value {
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => serde_json::from_str(text).map_err(|error| {
            let problem = format!("column `{column}` is not JSON: {error}");
            Fault::new(problem, "write the tools as a list of JSON schemas")
        })?,
        other => other.clone(),
    };
    match parsed {
        Value::Null => Ok(None),
        Value::Array(items) if items.is_empty() => Ok(None),
        Value::Array(items) => Ok(Some(items.into_iter().map(definition).collect())),
        tool @ Value::Object(_) => Ok(Some(json!([definition(tool)]))),
        other => Err(Fault::type_of(column, Some(&other), "a list of tool definitions")),
    }
}

/// `{"name", "parameters"}` as the `{"type": "function", "function": ...}` that templates expect.
fn definition(tool: Value) -> Value {
    match tool.get("function").is_none() && tool.get("name").is_some_and(Value::is_string) {
        true => json!({"type": "function", "function": tool}),
        false => tool,
    }
}

/// A list of text parts as one text; anything else as it is.
fn join_parts(content: Value) -> Value {
    let Value::Array(parts) = &content else { return content };
    let text_of = |part: &Value| {
        let is_text = part.get("type").is_none_or(|kind| kind == "text");
        let text = part.get("text").or_else(|| part.get("value")).and_then(Value::as_str);
        text.filter(|_| is_text).map(str::to_owned)
    };
    match parts.iter().map(text_of).collect::<Option<Vec<_>>>() {
        Some(texts) if !texts.is_empty() => Value::String(texts.concat()),
        _ => content,
    }
}

fn is_nothing(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

/// Whether a turn is learned by its weight: it has one or it has none.
fn is_learned(weight: &Value) -> Option<bool> {
    match weight {
        Value::Null => Some(true),
        Value::Bool(is_learned) => Some(*is_learned),
        _ if weight.as_f64() == Some(0.0) => Some(false),
        _ if weight.as_f64() == Some(1.0) => Some(true),
        _ => None,
    }
}

fn no_weight(column: &str, message_idx: usize, key: &str, value: &Value) -> Fault {
    let found = type_name(value);
    let problem = format!("column `{column}`, item {message_idx}: key `{key}` is {found}, expected 0 or 1");
    Fault::new(problem, "write 1 where the answer is to be learned and 0 where it is only context")
}
