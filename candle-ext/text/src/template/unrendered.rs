//! Detection of the parts of a conversation that a chat template omits.
//!
//! A template may read a key without printing it. So the conversation is rendered again with markers in these
//! values, and the output is searched for the markers. Contents need that only if the text does not show them.

use serde_json::{Value as Json, json};

use super::examples::ProbeChat;
use super::printed::PrintedChat;
use super::{AddGenerationPrompt, ChatTemplate};
use crate::conversation::{Conversation, Message};

/// Length in bytes from which a content is not also a part of a header, such as `user`.
const MIN_DISTINCT_CONTENT: usize = 16;

/// Name of the markers of contents.
const CONTENT: &str = "content";

/// Parts of a conversation that the rendered text omits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnrenderedParts {
    /// Indices of messages with omitted content.
    pub contents: Vec<usize>,
    /// Indices of messages with an omitted tool call.
    pub tool_calls: Vec<usize>,
    /// Indices of messages with omitted reasoning.
    pub reasoning: Vec<usize>,
    /// True if tool definitions are given and omitted.
    pub tools: bool,
}

impl UnrenderedParts {
    /// Returns the noun phrases of the omitted messages, tool calls and tools: "message 1 (tool)".
    ///
    /// Reasoning is not among them, because many templates omit that of earlier answers by design.
    pub fn describe(&self, chat: &Conversation) -> Vec<String> {
        let role = |idx: &usize| chat.messages[*idx].role();
        let contents = self.contents.iter().map(|idx| format!("the content of message {idx} ({})", role(idx)));
        let calls = self.tool_calls.iter().map(|idx| format!("the tool calls of message {idx} ({})", role(idx)));
        let tools = self.tools.then(|| "the tools".to_owned());
        contents.chain(calls).chain(tools).collect()
    }
}

impl ChatTemplate {
    /// Finds the parts of a conversation that the template omits.
    ///
    /// Returns none if the template fails on the conversation, or on the markers, because it then inspects these values.
    pub fn unrendered_parts(&self, chat: &Conversation, ending: AddGenerationPrompt) -> UnrenderedParts {
        self.print(chat, ending).map(|printed| printed.unrendered_parts()).unwrap_or_default()
    }
}

impl PrintedChat<'_> {
    /// Returns true if the template renders the reasoning of the last answer. Many templates omit that of earlier
    /// answers by design.
    pub(crate) fn renders_reasoning(&self) -> bool {
        let renders = |example: &ProbeChat| {
            let chat = example.with_reasoning();
            let printed = self.template.print(&chat, AddGenerationPrompt::No).ok()?;
            Some(printed.unrendered_parts().reasoning.is_empty())
        };
        let known = self.template.renders_reasoning.get_or_init(|| renders(&ProbeChat::of_two_answers()));
        let by_this_chat = || ProbeChat::from_conversation(&self.chat).and_then(|example| renders(&example));
        known.or_else(by_this_chat).unwrap_or(true)
    }

    /// Finds the parts of the conversation that the text omits. Returns none if the template fails on the markers.
    pub(crate) fn unrendered_parts(&self) -> UnrenderedParts {
        if self.shows_contents() {
            return UnrenderedParts::default();
        }
        let chat = &self.chat;
        let marked = with_marked_contents(&marked(chat), |idx| has_markable_content(&chat.messages[idx]));
        let Ok(text) = self.template.render(&marked, self.ending) else { return UnrenderedParts::default() };
        let lacks = |what: &str, message: usize| !text.contains(&marker(what, message));
        let lacks_content = |idx: usize, message: &Message| match message.text().map(str::trim) {
            None | Some("") => false,
            Some(_) if has_markable_content(message) => lacks(CONTENT, idx),
            Some(content) => !self.text.contains(content),
        };
        let n_calls = |message: &Message| calls(message).filter(|call| name_of(call).is_some()).count();
        let lacks_call =
            |idx: usize, message: &Message| (0..n_calls(message)).any(|call| lacks(&format!("call{call}"), idx));
        let lacks_reasoning = |idx: usize, message: &Message| message.reasoning().is_some() && lacks("reasoning", idx);
        let indices = |lacks: &dyn Fn(usize, &Message) -> bool| {
            let found = chat.messages.iter().enumerate().filter(|(idx, message)| lacks(*idx, message));
            found.map(|(idx, _)| idx).collect()
        };
        UnrenderedParts {
            contents: indices(&lacks_content),
            tool_calls: indices(&lacks_call),
            reasoning: indices(&lacks_reasoning),
            tools: chat.tools.as_ref().is_some_and(Json::is_array) && lacks("tool", 0),
        }
    }

    /// Returns true if the text has all contents in their order, and hardly by chance.
    ///
    /// Tools, tool calls and reasoning may repeat a content, and so may headers if it is short.
    fn shows_contents(&self) -> bool {
        let chat = &self.chat;
        if chat.tools.is_some() || chat.messages.iter().any(|it| it.has_tool_calls() || it.reasoning().is_some()) {
            return false;
        }
        let mut rest = self.text.as_str();
        chat.messages.iter().filter_map(Message::text).map(str::trim).filter(|text| !text.is_empty()).all(|content| {
            let found = rest.split_once(content).filter(|_| content.len() >= MIN_DISTINCT_CONTENT);
            rest = found.map_or(rest, |(_, after)| after);
            found.is_some()
        })
    }
}

/// Returns true for text that a template treats alike with a marker at its end. Qwen3 looks for a user's content that
/// begins and ends with a tag.
fn has_markable_content(message: &Message) -> bool {
    let is_tagged = |text: &str| message.role() == "user" && text.starts_with('<') && text.ends_with('>');
    message.text().map(str::trim).is_some_and(|text| !text.is_empty() && !is_tagged(text))
}

fn marker(what: &str, message: usize) -> String {
    format!("candlewick{what}of{message}marker")
}

/// Returns the text that [`with_marked_contents`] adds to the content of a message.
pub(super) fn content_marker(message: usize) -> String {
    marker(CONTENT, message)
}

/// Returns the conversation with a marker at the end of the contents of messages that `is_wanted` selects by their
/// indices. The beginning of a content may be reasoning, which templates omit.
pub(super) fn with_marked_contents(chat: &Conversation, is_wanted: impl Fn(usize) -> bool) -> Conversation {
    let mark = |(idx, message): (usize, &Message)| match message.text() {
        content if is_wanted(idx) && (content.is_some() || message.is_blank()) => {
            let content = content.unwrap_or_default();
            message.clone().with("content", json!(format!("{content} {}", content_marker(idx))))
        }
        _ => message.clone(),
    };
    Conversation { messages: chat.messages.iter().enumerate().map(mark).collect(), tools: chat.tools.clone() }
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
