//! Parts of a streamed reply: thinking, content and tool calls.

use rand::Rng;
use rand::distr::Alphanumeric;
use serde_json::{Value as Json, json};

use crate::reasoning::{ReasoningParser, ReplyText};
use crate::tool_calls::{ReplyContent, ToolCallParser, ToolCallPart};

/// Parser of a reply: its thinking first, then tool calls in the rest.
#[derive(Clone, Debug, Default)]
pub(super) struct ReplyParser {
    pub(super) reasoning: ReasoningParser,
    pub(super) tool_calls: ToolCallParser,
}

/// Reply, or the newest part of it.
#[derive(Clone, Debug, Default)]
pub(super) struct ParsedReply {
    /// Thinking.
    pub(super) reasoning: String,
    pub(super) content: ReplyContent,
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
        parsed.content.append(self.tool_calls.finish());
        parsed
    }

    fn parsed(&mut self, ReplyText { reasoning, content }: ReplyText) -> ParsedReply {
        ParsedReply { reasoning, content: self.tool_calls.push(&content) }
    }
}

impl ParsedReply {
    /// Appends the next part of the reply.
    pub(super) fn append(&mut self, part: Self) {
        self.reasoning += &part.reasoning;
        self.content.append(part.content);
    }

    /// Returns true without text and calls.
    pub(super) fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content == ReplyContent::default()
    }
}

/// Returns a call, or a part of one, in OpenAI's format. The first part has the name and a new id.
pub(super) fn call_json(call: &ToolCallPart) -> Json {
    let Some(name) = &call.name else { return json!({"function": {"arguments": call.arguments}}) };
    let id: String = rand::rng().sample_iter(Alphanumeric).take(ID_LENGTH).map(char::from).collect();
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": call.arguments}})
}
