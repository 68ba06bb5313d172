//! Chat conversations: messages and tool definitions.
//!
//! A message keeps the JSON object that the chat template sees, with every extra key in its place. [`crate::format`]
//! reads data set rows into conversations; [`crate::render`] tokenizes them.

use serde::Serialize;
use serde_json::{Map, Value as Json};

use crate::long_integer;

/// A chat: messages in order, and the tool definitions offered to the model, if any.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Conversation {
    /// The messages, oldest first.
    pub messages: Vec<Message>,
    /// Tool definitions as chat templates expect them: a list of JSON schemas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<Json>,
}

impl Conversation {
    /// Creates a conversation without tools.
    pub fn new(messages: impl IntoIterator<Item = Message>) -> Self {
        let messages = messages.into_iter().collect();
        Self { messages, tools: None }
    }

    /// Sets the tool definitions, as JSON schemas.
    #[must_use]
    pub fn with_tools(self, tools: Json) -> Self {
        Self { tools: Some(tools), ..self }
    }

    /// Returns the message roles that chat templates do not define.
    pub fn unknown_roles(&self) -> impl Iterator<Item = &str> {
        self.messages.iter().map(Message::role).filter(|role| ChatRole::of(role).is_none())
    }

    /// Returns true if any message has the role `assistant`. Without one, no token has loss.
    pub fn has_assistant(&self) -> bool {
        self.messages.iter().any(Message::is_assistant)
    }
}

/// One message: a JSON object with a `role`, a `content` and any further keys, such as `tool_calls`,
/// `reasoning_content` or `name`.
///
/// `content` is a string or a list of parts. With `tool_calls` it may be null.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Message(Map<String, Json>);

/// Keys that hold reasoning outside of the content.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Role of a message's author, by its usual names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatRole {
    /// `system` or `developer`.
    System,
    /// `user`.
    User,
    /// `assistant`.
    Assistant,
    /// `tool`, `function`, `ipython`, `observation` or `tool_response`.
    Tool,
}

impl ChatRole {
    /// Returns the role of this name. `None` for a name that chat templates do not define.
    pub fn of(name: &str) -> Option<Self> {
        match name {
            "system" | "developer" => Some(Self::System),
            "user" => Some(Self::User),
            "assistant" => Some(Self::Assistant),
            "tool" | "function" | "ipython" | "observation" | "tool_response" => Some(Self::Tool),
            _ => None,
        }
    }

    /// Returns the name that most chat templates have for this role.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// Reason why a JSON object is not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// `role` is missing or is not a string.
    #[error("read a message: key `role` is {found}, expected a string such as \"user\"")]
    Role {
        /// The type of the value found, or `missing`.
        found: &'static str,
    },
    /// `content` has a type that chat templates do not accept.
    #[error(
        "read a {role} message: key `content` is {found}, expected a string or a list of parts \
         (null only with `tool_calls`)"
    )]
    Content {
        /// The message's role.
        role: String,
        /// The type of the value found, or `missing`.
        found: &'static str,
    },
}

impl Message {
    /// Creates a message with plain text as its content.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let mut fields = Map::new();
        fields.insert("role".into(), Json::String(role.into()));
        fields.insert("content".into(), Json::String(content.into()));
        Self(fields)
    }

    /// Converts a JSON object to a message. The keys keep their order.
    pub fn from_fields(fields: Map<String, Json>) -> Result<Self, MessageError> {
        let Some(Json::String(role)) = fields.get("role") else {
            return Err(MessageError::Role { found: kind(fields.get("role")) });
        };
        let is_content = match fields.get("content") {
            Some(Json::String(_) | Json::Array(_)) => true,
            Some(Json::Null) | None => fields.get("tool_calls").is_some_and(Json::is_array),
            Some(_) => false,
        };
        if !is_content {
            let found = kind(fields.get("content"));
            return Err(MessageError::Content { role: role.clone(), found });
        }
        Ok(Self(fields))
    }

    /// Sets a key of the message.
    #[must_use]
    pub fn with(mut self, key: impl Into<String>, value: Json) -> Self {
        self.0.insert(key.into(), value);
        self
    }

    /// Removes the reasoning.
    pub(crate) fn without_reasoning(mut self) -> Self {
        self.0.retain(|key, _| !REASONING.contains(&key.as_str()));
        self
    }

    /// Returns the role: `system`, `user`, `assistant`, `tool`, ...
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Json::as_str).unwrap_or_default()
    }

    /// Returns the content if it is plain text.
    pub fn text(&self) -> Option<&str> {
        self.0.get("content").and_then(Json::as_str)
    }

    /// Returns true if the role is `assistant`.
    pub fn is_assistant(&self) -> bool {
        self.role() == "assistant"
    }

    /// Returns false if the message has `"weight": 0`, which masks it from the loss.
    pub fn is_trained_on(&self) -> bool {
        self.0.get("weight").and_then(Json::as_f64) != Some(0.0)
    }

    /// Returns true if the message calls a tool.
    pub fn has_tool_calls(&self) -> bool {
        self.0.get("tool_calls").and_then(Json::as_array).is_some_and(|calls| !calls.is_empty())
    }

    /// Returns the reasoning, from `reasoning_content`, `thinking` or `reasoning`.
    pub fn reasoning(&self) -> Option<&str> {
        let texts = REASONING.iter().filter_map(|key| self.0.get(*key)?.as_str());
        texts.into_iter().find(|text| !text.trim().is_empty())
    }

    /// Returns true if the content is missing or blank.
    pub fn is_blank(&self) -> bool {
        match self.0.get("content") {
            None | Some(Json::Null) => true,
            Some(Json::String(text)) => text.trim().is_empty(),
            Some(Json::Array(parts)) => parts.is_empty(),
            Some(_) => false,
        }
    }

    /// Returns true for an assistant's message without content, tool calls and reasoning.
    pub fn is_empty_answer(&self) -> bool {
        self.is_assistant() && self.is_blank() && !self.has_tool_calls() && self.reasoning().is_none()
    }

    /// Returns every key of the message, in order.
    pub fn fields(&self) -> &Map<String, Json> {
        &self.0
    }
}

fn kind(value: Option<&Json>) -> &'static str {
    match value {
        None => "missing",
        Some(Json::Null) => "null",
        Some(Json::Bool(_)) => "a boolean",
        Some(Json::Number(_)) => "a number",
        Some(Json::String(_)) => "a string",
        Some(Json::Array(_)) => "a list",
        Some(number @ Json::Object(_)) if long_integer::digits(number).is_some() => "a number",
        Some(Json::Object(_)) => "an object",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Message, String> {
        let Json::Object(fields) = serde_json::from_str(json).unwrap() else { panic!("{json}") };
        Message::from_fields(fields).map_err(|error| error.to_string())
    }

    #[test]
    fn extra_keys_keep_their_order() {
        let json = r#"{"name":"a","role":"tool","z":1,"content":[{"type":"text"}],"b":null}"#;
        assert_eq!(serde_json::to_string(&parse(json).unwrap()).unwrap(), json);
    }

    #[test]
    fn null_content_requires_tool_calls() {
        assert!(parse(r#"{"role":"assistant","content":null,"tool_calls":[]}"#).is_ok());
        let error = parse(r#"{"role":"assistant","content":null}"#).unwrap_err();
        assert!(error.contains("assistant message: key `content` is null"), "{error}");
        let error = parse(r#"{"role":"user","content":3}"#).unwrap_err();
        assert!(error.contains("is a number"), "{error}");
    }

    #[test]
    fn a_role_must_be_text() {
        assert!(parse(r#"{"content":"x"}"#).unwrap_err().contains("`role` is missing"));
        assert!(parse(r#"{"role":1,"content":"x"}"#).unwrap_err().contains("`role` is a number"));
    }
}
