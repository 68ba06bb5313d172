//! Equivalent conversations for templates that fail on the original.

use serde_json::{Map, Value as Json};

use crate::conversation::{Conversation, Message};
use crate::long_integer;

/// Returns the alternatives to try: parsed tool call arguments, empty strings for missing contents, and both.
pub(super) fn forms(chat: &Conversation) -> impl Iterator<Item = Conversation> {
    let objects = as_objects(chat);
    let contents = with_contents(chat);
    let both = objects.as_ref().and_then(with_contents);
    [objects, contents, both].into_iter().flatten()
}

/// Returns the conversation with tool call arguments parsed from JSON text, if there are any.
pub(super) fn as_objects(chat: &Conversation) -> Option<Conversation> {
    with_arguments(chat, object)
}

/// Returns what [`as_objects`] does, with an empty object for each text that is not JSON of an object.
pub(super) fn as_complete_objects(chat: &Conversation) -> Option<Conversation> {
    let read = |arguments: &Json| object(arguments).unwrap_or_else(|| Json::Object(Map::new()));
    with_arguments(chat, |arguments| arguments.is_string().then(|| read(arguments)))
}

/// Returns the conversation with the tool call arguments that `read` returns, if there are any.
fn with_arguments(chat: &Conversation, read: impl Fn(&Json) -> Option<Json>) -> Option<Conversation> {
    let messages: Vec<Option<Message>> = chat.messages.iter().map(|message| with_objects(message, &read)).collect();
    if messages.iter().all(Option::is_none) {
        return None;
    }
    let pairs = messages.into_iter().zip(&chat.messages);
    let messages = pairs.map(|(changed, own)| changed.unwrap_or_else(|| own.clone())).collect();
    Some(Conversation { messages, tools: chat.tools.clone() })
}

fn with_objects(message: &Message, read: impl Fn(&Json) -> Option<Json>) -> Option<Message> {
    let mut calls = message.fields().get("tool_calls")?.clone();
    let mut has_changed = false;
    for call in calls.as_array_mut()? {
        let call = if call.get("function").is_some() { &mut call["function"] } else { call };
        if let Some(object) = call.get("arguments").and_then(&read) {
            call["arguments"] = object;
            has_changed = true;
        }
    }
    has_changed.then(|| message.clone().with("tool_calls", calls))
}

/// Parses arguments that are JSON text of an object.
pub(super) fn object(arguments: &Json) -> Option<Json> {
    long_integer::parse(arguments.as_str()?).ok().filter(Json::is_object)
}

/// Replaces missing contents by empty strings. Data sets write `content: null` with tool calls, and templates
/// concatenate it.
fn with_contents(chat: &Conversation) -> Option<Conversation> {
    let lacks = |message: &Message| message.fields().get("content").is_none_or(Json::is_null);
    if !chat.messages.iter().any(lacks) {
        return None;
    }
    let fill = |message: &Message| match lacks(message) {
        true => message.clone().with("content", Json::String(String::new())),
        false => message.clone(),
    };
    Some(Conversation { messages: chat.messages.iter().map(fill).collect(), tools: chat.tools.clone() })
}

/// Describes the first message whose content is not a string, for errors of templates that expect one.
pub(super) fn odd_content(chat: &Conversation) -> Option<String> {
    let is_odd = |message: &Message| message.text().is_none();
    let (idx, message) = chat.messages.iter().enumerate().find(|(_, message)| is_odd(message))?;
    let found = if message.fields().get("content").is_some_and(Json::is_array) { "a list" } else { "missing" };
    Some(format!("message {idx} ({}): `content` is {found}, and the template expects a text", message.role()))
}
