//! Detection of tool calls, tool definitions and reasoning that a chat template omits.
//!
//! A template may read a key without printing it. So the conversation is rendered again with markers in these
//! values, and the output is searched for the markers.

use serde_json::{Value as Json, json};

use super::{AddGenerationPrompt, ChatTemplate};
use crate::conversation::{Conversation, Message};

/// Parts of a conversation that the rendered text omits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnrenderedParts {
    /// Indices of messages with an omitted tool call.
    pub tool_calls: Vec<usize>,
    /// Indices of messages with omitted reasoning.
    pub reasoning: Vec<usize>,
    /// True if tool definitions are given and omitted.
    pub tools: bool,
}

impl ChatTemplate {
    /// Finds tool calls, tool definitions and reasoning that the template omits.
    ///
    /// Returns none if the template fails on the markers, because it then inspects these values.
    pub fn unrendered_parts(&self, chat: &Conversation) -> UnrenderedParts {
        let has_tools = chat.tools.as_ref().is_some_and(Json::is_array);
        let is_probed = |message: &Message| message.has_tool_calls() || message.reasoning().is_some();
        if !has_tools && !chat.messages.iter().any(is_probed) {
            return UnrenderedParts::default();
        }
        let Ok(text) = self.render(&marked(chat), AddGenerationPrompt::No) else { return UnrenderedParts::default() };
        let lacks = |what: &str, message: usize| !text.contains(&marker(what, message));
        let messages = || chat.messages.iter().enumerate();
        let n_calls = |message: &Message| calls(message).filter(|call| name_of(call).is_some()).count();
        UnrenderedParts {
            tool_calls: messages()
                .filter(|(idx, message)| (0..n_calls(message)).any(|call| lacks(&format!("call{call}"), *idx)))
                .map(|(idx, _)| idx)
                .collect(),
            reasoning: messages()
                .filter(|(idx, message)| message.reasoning().is_some() && lacks("reasoning", *idx))
                .map(|(idx, _)| idx)
                .collect(),
            tools: has_tools && lacks("tool", 0),
        }
    }

    /// Returns true if the template renders the reasoning of the last answer. Many templates omit that of earlier
    /// answers by design.
    pub fn renders_reasoning(&self) -> bool {
        *self.renders_reasoning.get_or_init(|| {
            let answer = Message::new("assistant", "answer").with("reasoning_content", json!("thought"));
            let chat = Conversation::new([Message::new("user", "question"), answer]);
            self.unrendered_parts(&chat).reasoning.is_empty()
        })
    }
}

fn marker(what: &str, message: usize) -> String {
    format!("candlewick{what}of{message}marker")
}

/// Returns the conversation with a marker in each tool call, tool definition and reasoning.
fn marked(chat: &Conversation) -> Conversation {
    let messages = chat.messages.iter().enumerate().map(|(idx, message)| {
        let fields = message.fields().iter();
        fields.fold(message.clone(), |marked, (key, value)| marked.with(key.clone(), marked_field(idx, key, value)))
    });
    let messages = messages.collect();
    let tools = chat.tools.clone().map(|mut tools| {
        if let Some(list) = tools.as_array_mut() {
            let name = marker("tool", 0);
            list.push(json!({"type": "function", "function": {"name": name, "description": name,
                             "parameters": {"type": "object", "properties": {}, "required": []}}}));
        }
        tools
    });
    Conversation { messages, tools }
}

fn marked_field(message: usize, key: &str, value: &Json) -> Json {
    match (key, value) {
        ("reasoning_content" | "reasoning" | "thinking", Json::String(text)) => {
            json!(format!("{text} {}", marker("reasoning", message)))
        }
        ("tool_calls", Json::Array(calls)) => {
            let mut n_named = 0;
            let mark = |mut call: Json| {
                if let Some(Json::String(name)) = name_slot(&mut call) {
                    name.push_str(&marker(&format!("call{n_named}"), message));
                    n_named += 1;
                }
                call
            };
            calls.iter().cloned().map(mark).collect()
        }
        _ => value.clone(),
    }
}

fn calls(message: &Message) -> impl Iterator<Item = &Json> {
    message.fields().get("tool_calls").and_then(Json::as_array).into_iter().flatten()
}

fn name_of(call: &Json) -> Option<&str> {
    call.get("function").unwrap_or(call).get("name")?.as_str()
}

fn name_slot(call: &mut Json) -> Option<&mut Json> {
    let call = if call.get("function").is_some() { &mut call["function"] } else { call };
    call.get_mut("name")
}
