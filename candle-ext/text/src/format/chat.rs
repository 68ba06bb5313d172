//! Parts shared by all chat formats: JSON stored as a string, tool definitions, tool calls, content parts.

use serde_json::{Map, Value, json};

use super::error::{RowProblem, optional_text, type_name};
use crate::conversation::{Conversation, Message};
use crate::long_integer;
use crate::source::Row;

/// Columns that hold the tool definitions.
const TOOL_COLUMNS: [&str; 2] = ["tools", "functions"];
/// Columns that hold images, video or audio.
const MEDIA_COLUMNS: [&str; 6] = ["images", "image", "videos", "video", "audios", "audio"];

/// Speaker names and the chat roles that they stand for.
const ALIASES: [(&str, &[&str]); 4] = [
    ("system", &["system"]),
    ("user", &["human", "user"]),
    ("assistant", &["gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"]),
    ("tool", &["tool", "observation", "tool_response", "function_response", "function-response"]),
];

/// Returns the chat role that a speaker name stands for, whatever its case.
pub(crate) fn role_of_alias(name: &str) -> Option<&'static str> {
    let wanted = name.to_ascii_lowercase();
    ALIASES.iter().find(|(_, names)| names.contains(&wanted.as_str())).map(|(role, _)| *role)
}

/// Lists every known speaker name.
pub(crate) fn known_names() -> String {
    let names: Vec<_> = ALIASES.iter().flat_map(|(_, names)| *names).copied().collect();
    names.join(", ")
}

/// Builds a conversation from messages, the row's `system` column and its tool definitions.
pub(crate) fn conversation(row: &Row, mut messages: Vec<Message>) -> Result<Conversation, RowProblem> {
    check_media(row)?;
    let system = optional_text(row, "system").unwrap_or_default();
    let has_system = messages.iter().any(|message| message.role() == "system");
    if !system.is_empty() && !has_system {
        messages.insert(0, Message::new("system", system));
    }
    if messages.is_empty() {
        return Err(RowProblem::new("the conversation has no messages", "correct or delete the row"));
    }
    let tools = tools(row)?;
    Ok(Conversation { messages, tools })
}

/// Returns the list in `column`, which may be stored as JSON text.
pub(crate) fn list(row: &Row, column: &str) -> Result<Vec<Value>, RowProblem> {
    let expected = || RowProblem::type_of(column, row.get(column), "a list of messages");
    match row.get(column) {
        Some(Value::Array(items)) => Ok(items.clone()),
        Some(Value::String(text)) => match long_integer::parse(text) {
            Ok(Value::Array(items)) => Ok(items),
            _ => Err(expected()),
        },
        _ => Err(expected()),
    }
}

/// Reads item `message_idx` of a list of messages. The error names column and item.
pub(crate) fn message(column: &str, message_idx: usize, fields: Map<String, Value>) -> Result<Message, RowProblem> {
    regular(fields).map_err(|fault| fault.within(column, message_idx))
}

/// Reads the fields of a message as those of a data set row. The error states the problem and the remedy.
pub fn message_from_fields(fields: Map<String, Value>) -> Result<Message, String> {
    regular(fields).map_err(|fault| format!("{}; {}", fault.problem, fault.fix))
}

/// Normalizes the fields of one message.
///
/// Maps speaker names to `user` and `assistant`, drops null fields, joins text parts into one string, and renames
/// the loss weight to `weight`. Converts `function_call` to `tool_calls`. A null assistant content becomes an empty
/// string.
fn regular(mut fields: Map<String, Value>) -> Result<Message, RowProblem> {
    let role = fields.get("role").and_then(Value::as_str).and_then(role_of_alias);
    if let Some(role) = role.filter(|role| ["user", "assistant"].contains(role)) {
        fields.insert("role".into(), role.into());
    }
    let is_assistant = role == Some("assistant");
    if is_assistant {
        function_call_as_tool_call(&mut fields);
    }
    let has_calls = fields.get("tool_calls").is_some_and(|calls| !is_nothing(calls));
    let mut clean = Map::new();
    for (key, value) in fields {
        match key.as_str() {
            "content" if value.is_null() && is_assistant && !has_calls => {
                clean.insert(key, "".into());
            }
            "content" => {
                clean.insert(key, join_parts(value)?);
            }
            "train" | "training" | "loss_weight" | "weight" => {
                let is_trained_on = match is_trained_on(&value) {
                    None if is_assistant => return Err(no_weight(&key, &value)),
                    weight => weight.unwrap_or(true),
                };
                if !is_trained_on {
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
        let fix = "correct the row, or name the roles with role_mapping and the key of the text with content_key";
        let reason = error.to_string();
        RowProblem::new(reason.strip_prefix("read a message: ").unwrap_or(&reason), fix)
    })
}

/// Converts OpenAI's deprecated `function_call` to a list of one tool call.
fn function_call_as_tool_call(fields: &mut Map<String, Value>) {
    let has_calls = fields.get("tool_calls").is_some_and(|calls| !is_nothing(calls));
    let is_call = fields.get("function_call").is_some_and(|call| call.get("name").is_some());
    if is_call
        && !has_calls
        && let Some(call) = fields.shift_remove("function_call")
    {
        fields.insert("tool_calls".into(), json!([{"type": "function", "function": call}]));
    }
}

/// Rejects a row with images, video or audio in a column of their own.
fn check_media(row: &Row) -> Result<(), RowProblem> {
    let has_media = |column: &&&str| row.get(**column).is_some_and(|value| !is_empty_media(value));
    let Some(column) = MEDIA_COLUMNS.iter().find(has_media) else { return Ok(()) };
    let media = match column.trim_end_matches('s') {
        "audio" => "audio is".to_owned(),
        media => format!("{media}s are"),
    };
    Err(RowProblem::new(
        format!("column `{column}` is not empty; {media} not supported"),
        "delete the row or the column",
    ))
}

fn is_empty_media(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.iter().all(is_empty_media),
        _ => false,
    }
}

/// Returns item `item_idx` of a list as an object.
pub(crate) fn object(column: &str, item_idx: usize, item: Value) -> Result<Map<String, Value>, RowProblem> {
    match item {
        Value::Object(fields) => Ok(fields),
        other => Err(RowProblem::new(
            format!("column `{column}`, item {item_idx} is {}, expected an object", type_name(&other)),
            "correct the row",
        )),
    }
}

/// Parses JSON text that holds one call or a list of calls: `{"name": ..., "arguments": ...}`.
pub(crate) fn calls_in_text(text: &str) -> Option<Value> {
    let calls = match long_integer::parse(text).ok()? {
        Value::Array(calls) => calls,
        call @ Value::Object(_) => vec![call],
        _ => return None,
    };
    calls.iter().all(|call| call.get("name").is_some()).then(|| {
        let wrap = |call| json!({"type": "function", "function": call});
        calls.iter().cloned().map(wrap).collect()
    })
}

fn tools(row: &Row) -> Result<Option<Value>, RowProblem> {
    let Some((column, value)) = TOOL_COLUMNS.iter().find_map(|c| Some((*c, row.get(*c)?))) else {
        return Ok(None);
    };
    let parsed = match value {
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => long_integer::parse(text).map_err(|error| {
            let problem = format!("column `{column}` is not JSON: {error}");
            RowProblem::new(problem, "write the tools as a list of JSON schemas")
        })?,
        other => other.clone(),
    };
    match parsed {
        Value::Null => Ok(None),
        Value::Array(items) if items.is_empty() => Ok(None),
        Value::Array(items) => Ok(Some(items.into_iter().map(definition).collect())),
        tool @ Value::Object(_) => Ok(Some(json!([definition(tool)]))),
        other => Err(RowProblem::type_of(column, Some(&other), "a list of tool definitions")),
    }
}

/// Wraps `{"name", "parameters"}` in `{"type": "function", "function": ...}`, as templates expect.
fn definition(tool: Value) -> Value {
    match tool.get("function").is_none() && tool.get("name").is_some_and(Value::is_string) {
        true => json!({"type": "function", "function": tool}),
        false => tool,
    }
}

/// Joins a list of text parts to one string and returns other content unchanged. Rejects image, audio and video
/// parts.
fn join_parts(content: Value) -> Result<Value, RowProblem> {
    let Value::Array(parts) = &content else { return Ok(content) };
    let texts = parts.iter().enumerate().map(|(idx, part)| text_of_part(part).ok_or_else(|| no_text(idx, part)));
    Ok(Value::String(texts.collect::<Result<Vec<_>, _>>()?.concat()))
}

fn text_of_part(part: &Value) -> Option<&str> {
    let is_text = part.get("type").is_none_or(|kind| kind == "text");
    let text = part.get("text").or_else(|| part.get("value")).and_then(Value::as_str);
    part.as_str().or(text.filter(|_| is_text))
}

/// Returns the error for a content part that is not text. The part's type or its keys identify images.
fn no_text(part_idx: usize, part: &Value) -> RowProblem {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or("unknown");
    let has = |word: &str| kind.contains(word) || part.get(word).is_some() || part.get(format!("{word}_url")).is_some();
    let media = ["image", "audio", "video"].into_iter().find(|word| has(word));
    let problem = match media {
        Some("audio") => format!("part {part_idx} of `content` is audio ({kind}); audio is not supported"),
        Some(media) => format!("part {part_idx} of `content` is {media} ({kind}); {media}s are not supported"),
        None => format!("part {part_idx} of `content` is of type {kind:?}; only text is supported"),
    };
    RowProblem::new(problem, "keep only the parts of type text, or delete the row")
}

fn is_nothing(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

/// Converts a loss weight to a flag: false for 0, true for 1 or null. `None` for any other value.
fn is_trained_on(weight: &Value) -> Option<bool> {
    match weight {
        Value::Null => Some(true),
        Value::Bool(is_trained_on) => Some(*is_trained_on),
        _ if weight.as_f64() == Some(0.0) => Some(false),
        _ if weight.as_f64() == Some(1.0) => Some(true),
        _ => None,
    }
}

fn no_weight(key: &str, value: &Value) -> RowProblem {
    let problem = format!("key `{key}` is {}, expected 0 or 1", type_name(value));
    RowProblem::new(problem, "write 1 where the answer is to be learned and 0 where it is only context")
}
