//! Arguments of tool calls, which data sets store as objects or as JSON text.

use std::borrow::Cow;

use serde_json::Value as Json;

use super::fallback::{as_objects, object};
use super::{AddGenerationPrompt, ChatTemplate};
use crate::conversation::{Conversation, Message};

impl ChatTemplate {
    /// Parses tool call arguments from JSON text to objects, if this template would encode the text twice.
    ///
    /// OpenAI writes `"arguments": "{\"x\": 1}"`, and `arguments | tojson` prints that with escaped quotes. For a
    /// template that prints strings unchanged, the conversation stays as it is.
    pub fn with_parsed_tool_arguments<'a>(&self, chat: &'a Conversation) -> Cow<'a, Conversation> {
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

/// Returns the message's arguments that are JSON text, each encoded as a JSON string.
fn encoded(message: &Message) -> Vec<String> {
    let calls = message.fields().get("tool_calls").and_then(Json::as_array).into_iter().flatten();
    let arguments = calls.filter_map(|call| call.get("function").unwrap_or(call).get("arguments"));
    arguments.filter(|arguments| object(arguments).is_some()).map(Json::to_string).collect()
}
