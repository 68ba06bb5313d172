//! Choice of a response: its text, log-probabilities and tool calls, whole or streamed.

use serde_json::{Map, Value as Json, json};

use super::api_error::ApiError;
use super::job::{GenerationEnd, GenerationEvent, TokenLogprobs};
use super::reply_parser::{ParsedReply, ReplyParser, call_json};
use crate::tool_calls::{ReplyContent, ToolCallPart};

/// A choice, or the newest part of one.
#[derive(Default)]
pub(super) struct Choice {
    /// All of a completion is content.
    pub(super) reply: ParsedReply,
    pub(super) parser: ReplyParser,
    /// Tool calls that have begun so far.
    pub(super) n_calls: usize,
    pub(super) logprobs: Vec<TokenLogprobs>,
    pub(super) end: Option<GenerationEnd>,
    pub(super) n_tokens: usize,
    /// Characters of the choice's tokens in earlier parts.
    pub(super) n_chars_before: usize,
    /// First bytes of a character whose other bytes are in this part.
    pub(super) begun_character: Vec<u8>,
}

/// Least log-probability in a response; JSON has no infinity.
const MIN_LOGPROB: f32 = -9999.0;

/// Returns the log-probabilities of a token in the format of chats.
pub(super) fn chat_logprob(logprobs: &TokenLogprobs) -> Json {
    let entry = |token: &super::job::TokenText, logprob: f32| json!({"token": token.text, "logprob": logprob.max(MIN_LOGPROB), "bytes": token.bytes});
    let mut own = entry(&logprobs.token, logprobs.logprob.unwrap_or(0.0));
    own["top_logprobs"] = logprobs.top.iter().map(|(token, logprob)| entry(token, *logprob)).collect();
    own
}

impl Choice {
    pub(super) fn finish_reason(&self) -> Option<&'static str> {
        self.end.map(|end| match end {
            GenerationEnd::Length => "length",
            GenerationEnd::Stop if self.n_calls > 0 => "tool_calls",
            GenerationEnd::Stop => "stop",
        })
    }

    /// Returns the message of a chat.
    pub(super) fn message(&self) -> Json {
        let ParsedReply { reasoning, content: ReplyContent { text: content, calls } } = &self.reply;
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !reasoning.is_empty() {
            message["reasoning_content"] = json!(reasoning);
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.iter().map(call_json).collect();
            if content.is_empty() {
                message["content"] = Json::Null;
            }
        }
        message
    }

    /// Returns the part of a chat's message.
    pub(super) fn delta(&self) -> Json {
        let ParsedReply { reasoning, content: ReplyContent { text: content, calls } } = &self.reply;
        let fields = [("reasoning_content", reasoning), ("content", content)].into_iter();
        let fields = fields.filter(|(_, text)| !text.is_empty());
        let mut delta: Map<String, Json> = fields.map(|(key, text)| (key.to_owned(), json!(text))).collect();
        if !calls.is_empty() {
            let call = |part: &ToolCallPart| {
                let mut call = call_json(part);
                call["index"] = json!(part.index);
                call
            };
            delta.insert("tool_calls".to_owned(), calls.iter().map(call).collect());
        }
        Json::Object(delta)
    }

    pub(super) fn completion_logprobs(&self) -> Json {
        let all = &self.logprobs;
        let tokens: Vec<&str> = all.iter().map(|logprobs| logprobs.token.text.as_str()).collect();
        let own: Vec<Option<f32>> = all.iter().map(|it| it.logprob.map(|logprob| logprob.max(MIN_LOGPROB))).collect();
        let top: Vec<Json> = all.iter().map(top_logprobs).collect();
        let (offsets, ..) = self.text_offsets();
        json!({"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets})
    }

    /// Returns the offset of each token in characters, the offset after all of them, and the bytes of a character that is not
    /// complete.
    pub(super) fn text_offsets(&self) -> (Vec<usize>, usize, Vec<u8>) {
        let (mut n_chars, mut bytes) = (self.n_chars_before, self.begun_character.clone());
        let offset = |logprobs: &TokenLogprobs| {
            let offset = n_chars;
            bytes.extend(&logprobs.token.bytes);
            n_chars += take_characters(&mut bytes);
            offset
        };
        let offsets = self.logprobs.iter().map(offset).collect();
        (offsets, n_chars, bytes)
    }
}

/// Removes the complete characters from the beginning of `bytes`, and returns their number.
fn take_characters(bytes: &mut Vec<u8>) -> usize {
    let n_complete = match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => bytes.len(),
    };
    let complete: Vec<u8> = bytes.drain(..n_complete).collect();
    String::from_utf8_lossy(&complete).chars().count()
}

/// Returns the most probable tokens and the token itself; `null` for the first token of a prompt.
fn top_logprobs(logprobs: &TokenLogprobs) -> Json {
    let Some(own) = logprobs.logprob else { return Json::Null };
    let mut top = Map::new();
    let all = logprobs.top.iter().map(|(token, logprob)| (token, *logprob)).chain([(&logprobs.token, own)]);
    for (token, logprob) in all {
        top.entry(token.text.clone()).or_insert_with(|| json!(logprob.max(MIN_LOGPROB)));
    }
    Json::Object(top)
}

impl Choice {
    /// Adds an event. Returns the error of a failed job.
    pub(super) fn add(&mut self, event: GenerationEvent) -> Result<(), ApiError> {
        match event {
            GenerationEvent::Prompt(logprobs) => self.logprobs.extend(logprobs),
            GenerationEvent::Token { text, logprobs } => {
                self.reply.append(self.parser.push(&text));
                self.logprobs.extend(logprobs);
                self.n_tokens += 1;
            }
            GenerationEvent::End { text, reason } => {
                self.reply.append(self.parser.push(&text));
                self.reply.append(self.parser.finish());
                self.end = Some(reason);
            }
            GenerationEvent::Failed(error) => return Err(error),
        }
        self.n_calls = self.parser.tool_calls.n_calls();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_counted_once_their_last_byte_is_there() {
        let mut bytes = Vec::new();
        let mut after = |part: &[u8]| {
            bytes.extend(part);
            take_characters(&mut bytes)
        };
        assert_eq!([after(b"a \xf0"), after(b"\x9f\x99"), after(b"\x82"), after(b"bc")], [2, 0, 1, 2]);
        // An invalid byte is a replacement character of the text.
        assert_eq!([after(b"\x80"), after(b"d")], [1, 1]);
    }
}
