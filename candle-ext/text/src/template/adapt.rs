//! Adaptation of a conversation to its template: role names, and arguments of tool calls.

use std::borrow::Cow;

use serde_json::Value as Json;

use super::fallback::{as_complete_objects, as_objects, object};
use super::unrendered::{content_marker, with_marked_contents};
use super::{AddGenerationPrompt, ChatTemplate};
use crate::conversation::{ChatRole, Conversation, Message};

impl ChatTemplate {
    /// Returns the conversation in the form that this template renders: with its role names, and with tool call
    /// arguments as text or as objects.
    pub fn adapt<'a>(&self, chat: &'a Conversation) -> Cow<'a, Conversation> {
        match self.with_rendered_roles(chat) {
            Cow::Borrowed(chat) => self.with_parsed_tool_arguments(chat),
            Cow::Owned(chat) => Cow::Owned(self.with_parsed_tool_arguments(&chat).into_owned()),
        }
    }

    /// Renames roles that this template omits or rejects, if it renders their usual names: `developer` to `system`,
    /// `function` and others to `tool`. Unchanged if the template renders the role as it is.
    fn with_rendered_roles<'a>(&self, chat: &'a Conversation) -> Cow<'a, Conversation> {
        let renamed: Vec<usize> =
            (0..chat.messages.len()).filter(|idx| usual_name(&chat.messages[*idx]).is_some()).collect();
        if renamed.is_empty() {
            return Cow::Borrowed(chat);
        }
        let omitted = |form: &Conversation| -> Vec<usize> {
            let marked = with_marked_contents(form, |idx| renamed.contains(&idx));
            match self.render(&marked, AddGenerationPrompt::No) {
                Ok(text) => renamed.iter().copied().filter(|idx| !text.contains(&content_marker(*idx))).collect(),
                Err(_) => renamed.clone(),
            }
        };
        let unrendered = omitted(chat);
        let is_unrendered =
            |message: &Message| unrendered.iter().any(|idx| chat.messages[*idx].role() == message.role());
        let rename = |message: &Message| match usual_name(message).filter(|_| is_unrendered(message)) {
            Some(name) => message.clone().with("role", name.into()),
            None => message.clone(),
        };
        let form = Conversation { messages: chat.messages.iter().map(rename).collect(), tools: chat.tools.clone() };
        match omitted(&form).len() < unrendered.len() {
            true => Cow::Owned(form),
            false => Cow::Borrowed(chat),
        }
    }

    /// Parses tool call arguments from JSON text to objects, if this template would encode the text twice.
    ///
    /// OpenAI writes `"arguments": "{\"x\": 1}"`, and `arguments | tojson` prints that with escaped quotes. For a
    /// template that prints strings unchanged, the conversation stays as it is.
    fn with_parsed_tool_arguments<'a>(&self, chat: &'a Conversation) -> Cow<'a, Conversation> {
        let Some(objects) = as_objects(chat) else { return Cow::Borrowed(chat) };
        let texts: Vec<String> = chat.messages.iter().flat_map(encoded).collect();
        let n_encoded = |chat: &Conversation| {
            let text = self.render(chat, AddGenerationPrompt::No).ok()?;
            Some(texts.iter().map(|encoded| text.matches(encoded).count()).sum::<usize>())
        };
        match (n_encoded(chat), n_encoded(&objects)) {
            (Some(as_text), Some(as_objects)) if as_text > as_objects => Cow::Owned(objects),
            _ => Cow::Borrowed(chat),
        }
    }
}

impl ChatTemplate {
    /// Replaces tool call arguments that are not JSON of an object by `{}`, if this template fails on them.
    ///
    /// A client sends back a call that a token limit has cut.
    pub fn with_complete_arguments<'a>(&self, chat: Cow<'a, Conversation>) -> Cow<'a, Conversation> {
        let fails = |chat: &Conversation| self.render(chat, AddGenerationPrompt::Yes).is_err();
        match as_complete_objects(&chat) {
            Some(complete) if fails(&chat) && !fails(&complete) => Cow::Owned(complete),
            _ => chat,
        }
    }
}

/// Returns the message's arguments that are JSON text, each encoded as a JSON string.
fn encoded(message: &Message) -> Vec<String> {
    let calls = message.fields().get("tool_calls").and_then(Json::as_array).into_iter().flatten();
    let arguments = calls.filter_map(|call| call.get("function").unwrap_or(call).get("arguments"));
    arguments.filter(|arguments| object(arguments).is_some()).map(Json::to_string).collect()
}

/// Returns the name that most templates have for the role of a message, if the message has another one.
fn usual_name(message: &Message) -> Option<&'static str> {
    ChatRole::of(message.role()).map(ChatRole::name).filter(|name| *name != message.role())
}
