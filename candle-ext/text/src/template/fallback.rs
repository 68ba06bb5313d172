//! Conversations that mean the same and that stricter templates can render.

use serde_json::Value as Json;

use super::arguments;
use crate::conversation::{Conversation, Message};

/// The forms to try in turn: arguments of tool calls as objects, missing contents as empty texts, and both.
pub(super) fn forms(chat: &Conversation) -> impl Iterator<Item = Conversation> {
    let objects = arguments::as_objects(chat);
    let contents = with_contents(chat);
    let both = objects.as_ref().and_then(with_contents);
    [objects, contents, both].into_iter().flatten()
}

/// Data sets write `content: null` beside tool calls, and templates add texts to it.
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

/// The first message whose content is no text, for errors of templates that expect one.
pub(super) fn odd_content(chat: &Conversation) -> Option<String> {
    let is_odd = |message: &Message| message.text().is_none();
    let (idx, message) = chat.messages.iter().enumerate().find(|(_, message)| is_odd(message))?;
    let found = if message.fields().get("content").is_some_and(Json::is_array) { "a list" } else { "missing" };
    Some(format!("message {idx} ({}): `content` is {found}, and the template expects a text", message.role()))
}
