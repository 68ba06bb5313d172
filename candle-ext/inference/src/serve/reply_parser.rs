//! Parts of a streamed reply: thinking, content and tool calls.

use rand::Rng;
use rand::distr::Alphanumeric;
use serde_json::{Value as Json, json};

use crate::reasoning::{ReasoningParser, ReplyText};
use crate::tool_calls::{ReplyContent, ToolCall, ToolCallParser};

/// Parser of a reply: its thinking first, then tool calls in the rest.
#[derive(Clone, Debug, Default)]
pub(super) struct ReplyParser {
    pub(super) reasoning: ReasoningParser,
    pub(super) tool_calls: ToolCallParser,
}

/// Reply, or the newest part of it.
#[derive(Clone, Debug, Default)]
pub(super) struct ParsedReply {
    pub(super) text: ReplyText,
    pub(super) tool_calls: Vec<ToolCall>,
}

/// Length of a call's id. Mistral's templates accept no other.
const ID_LENGTH: usize = 9;

impl ReplyParser {
    /// Adds text and returns the parts that are certain.
    pub(super) fn push(&mut self, text: &str) -> ParsedReply {
        let parsed = self.reasoning.push(text);
        self.parsed(parsed)
    }

    /// Returns the remaining parts.
    pub(super) fn finish(&mut self) -> ParsedReply {
        let rest = self.reasoning.finish();
        let mut parsed = self.parsed(rest);
        parsed.text.content += &self.tool_calls.finish().text;
        parsed
    }

    fn parsed(&mut self, ReplyText { reasoning, content }: ReplyText) -> ParsedReply {
        let ReplyContent { text, calls } = self.tool_calls.push(&content);
        ParsedReply { text: ReplyText { reasoning, content: text }, tool_calls: calls }
    }
}

impl ParsedReply {
    /// Appends the next part of the reply.
    pub(super) fn append(&mut self, part: Self) {
        self.text.append(&part.text);
        self.tool_calls.extend(part.tool_calls);
    }

    /// Returns true without text and calls.
    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tool_calls.is_empty()
    }
}

/// Returns a call in OpenAI's format, with a new id.
pub(super) fn call_json(call: &ToolCall) -> Json {
    let id: String = rand::rng().sample_iter(Alphanumeric).take(ID_LENGTH).map(char::from).collect();
    json!({"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
}
