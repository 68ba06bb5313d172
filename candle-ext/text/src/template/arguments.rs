//! The arguments of tool calls, which data sets keep as objects or as JSON text.

use serde_json::Value as Json;

use crate::conversation::{Conversation, Message};

/// The conversation with objects where arguments were JSON text, if there are any such.
pub(super) fn as_objects(chat: &Conversation) -> Option<Conversation> {
    let messages: Vec<Option<Message>> = chat.messages.iter().map(message).collect();
    if messages.iter().all(Option::is_none) {
        return None;
    }
    let pairs = messages.into_iter().zip(&chat.messages);
    let messages = pairs.map(|(changed, own)| changed.unwrap_or_else(|| own.clone())).collect();
    Some(Conversation { messages, tools: chat.tools.clone() })
}

fn message(message: &Message) -> Option<Message> {
    let mut calls = message.fields().get("tool_calls")?.clone();
    let mut has_changed = false;
    for call in calls.as_array_mut()? {
        let call = if call.get("function").is_some() { &mut call["function"] } else { call };
        if let Some(object) = call.get("arguments").and_then(object) {
            call["arguments"] = object;
            has_changed = true;
        }
    }
    has_changed.then(|| message.clone().with("tool_calls", calls))
}

fn object(arguments: &Json) -> Option<Json> {
    serde_json::from_str(arguments.as_str()?).ok().filter(Json::is_object)
}
