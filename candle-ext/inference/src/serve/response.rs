//! Responses in OpenAI's format, whole or streamed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::http::StatusCode;
use futures_util::Stream;
use futures_util::stream::unfold;
use serde_json::{Map, Value as Json, json};
use tokio::sync::mpsc::UnboundedReceiver;

use super::api_error::ApiError;
use super::generation_fields::StreamOptions;
use super::job::{GenerationEnd, GenerationEvent, GenerationJob, TokenLogprobs};
use super::reply_parser::{ParsedReply, ReplyParser, call_json};
use super::request_record::RequestRecord;
use super::server_state::{ServerState, seconds_since_1970};
use crate::reasoning::ReplyText;

/// A request with its jobs.
pub(super) struct ParsedRequest {
    pub(super) jobs: Vec<GenerationJob>,
    pub(super) events: UnboundedReceiver<(usize, GenerationEvent)>,
    pub(super) format: ResponseFormat,
    pub(super) stream: Option<StreamOptions>,
    /// Tokens of all prompts.
    pub(super) n_prompt: usize,
    /// Text that precedes each choice, if the request has `echo`.
    pub(super) echoes: Vec<Arc<str>>,
    /// Parser of each choice.
    pub(super) parser: ReplyParser,
}

/// Endpoint of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResponseKind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

/// Format of a response.
pub(super) struct ResponseFormat {
    kind: ResponseKind,
    id: String,
    created: u64,
    model: String,
    has_logprobs: bool,
}

/// A choice, or the newest part of one.
#[derive(Default)]
struct Choice {
    /// All of a completion is content.
    reply: ParsedReply,
    parser: ReplyParser,
    /// Tool calls in earlier parts.
    n_calls_before: usize,
    logprobs: Vec<TokenLogprobs>,
    end: Option<GenerationEnd>,
    n_tokens: usize,
    /// Characters of the choice's tokens in earlier parts.
    n_chars_before: usize,
    /// First bytes of a character whose other bytes are in this part.
    begun_character: Vec<u8>,
}

/// Token counts of a response.
#[derive(Clone, Copy)]
struct Usage {
    n_prompt: usize,
    n_completion: usize,
}

impl ResponseFormat {
    /// Creates the format of a new response.
    pub(super) fn new(kind: ResponseKind, model: &str, has_logprobs: bool) -> Self {
        let prefix = if kind == ResponseKind::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:032x}", rand::random::<u128>());
        Self { kind, id, created: seconds_since_1970(), model: model.to_owned(), has_logprobs }
    }

    fn response(&self, object: &str, choices: Vec<Json>, usage: Option<Usage>) -> Json {
        let mut response = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices,
        });
        if let Some(Usage { n_prompt, n_completion }) = usage {
            response["usage"] = json!({
                "prompt_tokens": n_prompt, "completion_tokens": n_completion,
                "total_tokens": n_prompt + n_completion,
            });
        }
        response
    }

    fn whole(&self, choices: &[Choice], usage: Usage) -> Json {
        let object = match self.kind {
            ResponseKind::Chat => "chat.completion",
            ResponseKind::Completion => "text_completion",
        };
        let choice = |(index, choice): (usize, &Choice)| match self.kind {
            ResponseKind::Chat => self.choice(index, ("message", choice.message()), choice),
            ResponseKind::Completion => self.choice(index, ("text", json!(choice.reply.text.content)), choice),
        };
        self.response(object, choices.iter().enumerate().map(choice).collect(), Some(usage))
    }

    fn chunk(&self, choices: Vec<Json>, usage: Option<Usage>) -> Json {
        let object = match self.kind {
            ResponseKind::Chat => "chat.completion.chunk",
            ResponseKind::Completion => "text_completion",
        };
        self.response(object, choices, usage)
    }

    /// Returns the part of a choice as a choice of a chunk.
    fn part(&self, index: usize, part: &Choice) -> Json {
        match self.kind {
            ResponseKind::Chat => self.choice(index, ("delta", part.delta()), part),
            ResponseKind::Completion => self.choice(index, ("text", json!(part.reply.text.content)), part),
        }
    }

    fn choice(&self, index: usize, (key, content): (&str, Json), choice: &Choice) -> Json {
        let logprobs = match (self.has_logprobs, self.kind) {
            (false, _) => Json::Null,
            (true, ResponseKind::Chat) => {
                json!({"content": choice.logprobs.iter().map(chat_logprob).collect::<Vec<_>>(), "refusal": null})
            }
            (true, ResponseKind::Completion) => choice.completion_logprobs(),
        };
        json!({"index": index, key: content, "logprobs": logprobs, "finish_reason": choice.finish_reason()})
    }
}

/// Least log-probability in a response; JSON has no infinity.
const MIN_LOGPROB: f32 = -9999.0;

fn chat_logprob(logprobs: &TokenLogprobs) -> Json {
    let entry = |token: &super::job::TokenText, logprob: f32| json!({"token": token.text, "logprob": logprob.max(MIN_LOGPROB), "bytes": token.bytes});
    let mut own = entry(&logprobs.token, logprobs.logprob.unwrap_or(0.0));
    own["top_logprobs"] = logprobs.top.iter().map(|(token, logprob)| entry(token, *logprob)).collect();
    own
}

impl Choice {
    /// Returns the number of tool calls so far.
    fn n_calls(&self) -> usize {
        self.n_calls_before + self.reply.tool_calls.len()
    }

    fn finish_reason(&self) -> Option<&'static str> {
        self.end.map(|end| match end {
            GenerationEnd::Length => "length",
            GenerationEnd::Stop if self.n_calls() > 0 => "tool_calls",
            GenerationEnd::Stop => "stop",
        })
    }

    /// Returns the message of a chat.
    fn message(&self) -> Json {
        let ParsedReply { text: ReplyText { reasoning, content }, tool_calls } = &self.reply;
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !reasoning.is_empty() {
            message["reasoning_content"] = json!(reasoning);
        }
        if !tool_calls.is_empty() {
            message["tool_calls"] = tool_calls.iter().map(call_json).collect();
            if content.is_empty() {
                message["content"] = Json::Null;
            }
        }
        message
    }

    /// Returns the part of a chat's message. Each tool call is in one part.
    fn delta(&self) -> Json {
        let ParsedReply { text: ReplyText { reasoning, content }, tool_calls } = &self.reply;
        let fields = [("reasoning_content", reasoning), ("content", content)].into_iter();
        let fields = fields.filter(|(_, text)| !text.is_empty());
        let mut delta: Map<String, Json> = fields.map(|(key, text)| (key.to_owned(), json!(text))).collect();
        if !tool_calls.is_empty() {
            let call = |(index, call)| {
                let mut call = call_json(call);
                call["index"] = json!(index);
                call
            };
            delta.insert("tool_calls".to_owned(), (self.n_calls_before..).zip(tool_calls).map(call).collect());
        }
        Json::Object(delta)
    }

    fn completion_logprobs(&self) -> Json {
        let all = &self.logprobs;
        let tokens: Vec<&str> = all.iter().map(|logprobs| logprobs.token.text.as_str()).collect();
        let own: Vec<Option<f32>> = all.iter().map(|it| it.logprob.map(|logprob| logprob.max(MIN_LOGPROB))).collect();
        let top: Vec<Json> = all.iter().map(top_logprobs).collect();
        let (offsets, ..) = self.text_offsets();
        json!({"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets})
    }

    /// Returns the offset of each token in characters, the offset after all of them, and the bytes of a character that is not
    /// complete.
    fn text_offsets(&self) -> (Vec<usize>, usize, Vec<u8>) {
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
    fn add(&mut self, event: GenerationEvent) -> Result<(), ApiError> {
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
        Ok(())
    }
}

impl ParsedRequest {
    fn choices(&mut self) -> Vec<Choice> {
        let choice = |_| Choice { parser: self.parser.clone(), ..Choice::default() };
        let mut choices: Vec<Choice> = self.jobs.iter().map(choice).collect();
        choices
            .iter_mut()
            .zip(self.echoes.drain(..))
            .for_each(|(choice, echo)| choice.reply.text.content = echo.to_string());
        choices
    }

    /// Submits the jobs, and returns the complete response.
    pub(super) async fn complete(mut self, state: &ServerState, record: &RequestRecord) -> Result<Json, ApiError> {
        let mut choices = self.choices();
        record.set_response(&self.format.id, &self.format.model, false, self.n_prompt);
        state.submit(self.jobs)?;
        while let Some((index, event)) = self.events.recv().await {
            note_event(record, &event);
            choices[index].add(event)?;
        }
        if choices.iter().any(|choice| choice.end.is_none()) {
            return Err(ApiError::stopping());
        }
        choices.iter().filter_map(Choice::finish_reason).for_each(|reason| record.add_finish_reason(reason));
        let n_completion = choices.iter().map(|choice| choice.n_tokens).sum();
        Ok(self.format.whole(&choices, Usage { n_prompt: self.n_prompt, n_completion }))
    }

    /// Submits the jobs, and returns a stream of server-sent events. Dropping the stream cancels the jobs.
    pub(super) fn stream(
        mut self,
        options: StreamOptions,
        state: &ServerState,
        record: RequestRecord,
    ) -> Result<impl Stream<Item = Result<String, Infallible>> + use<>, ApiError> {
        let parts = self.choices();
        record.set_response(&self.format.id, &self.format.model, true, self.n_prompt);
        state.submit(self.jobs)?;
        let mut open = ResponseStream {
            format: self.format,
            events: self.events,
            n_open: parts.len(),
            parts,
            options,
            usage: Usage { n_prompt: self.n_prompt, n_completion: 0 },
            ready: VecDeque::new(),
            has_ended: false,
            record,
        };
        open.open();
        Ok(unfold(open, |mut stream| async move { stream.next().await.map(|event| (Ok(event), stream)) }))
    }
}

/// A streamed response.
struct ResponseStream {
    format: ResponseFormat,
    events: UnboundedReceiver<(usize, GenerationEvent)>,
    /// The part of each choice that has not been sent.
    parts: Vec<Choice>,
    /// Choices that have not ended.
    n_open: usize,
    options: StreamOptions,
    usage: Usage,
    /// Chunks to send.
    ready: VecDeque<String>,
    has_ended: bool,
    record: RequestRecord,
}

impl ResponseStream {
    /// Sends what precedes the first token: the role in a chat, the prompt's text in an echo.
    fn open(&mut self) {
        for index in 0..self.parts.len() {
            if self.format.kind == ResponseKind::Chat {
                let delta = json!({"role": "assistant", "content": ""});
                let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
                self.send(&self.format.chunk(vec![choice], None));
            }
        }
    }

    async fn next(&mut self) -> Option<String> {
        while self.ready.is_empty() && !self.has_ended {
            match self.events.recv().await {
                Some((index, event)) => self.add(index, event),
                None => self.close(),
            }
        }
        self.ready.pop_front()
    }

    fn add(&mut self, index: usize, event: GenerationEvent) {
        self.usage.n_completion += usize::from(matches!(event, GenerationEvent::Token { .. }));
        note_event(&self.record, &event);
        let part = &mut self.parts[index];
        if let Err(error) = part.add(event) {
            self.fail(&error);
            return;
        }
        if part.reply.is_empty() && part.logprobs.is_empty() && part.end.is_none() {
            return;
        }
        self.n_open -= usize::from(part.end.is_some());
        part.finish_reason().into_iter().for_each(|reason| self.record.add_finish_reason(reason));
        let (_, n_chars_before, begun_character) = part.text_offsets();
        let (parser, n_calls_before) = (std::mem::take(&mut part.parser), part.n_calls());
        let next = Choice { n_chars_before, begun_character, parser, n_calls_before, ..Choice::default() };
        let part = std::mem::replace(part, next);
        let chunk = self.format.chunk(vec![self.format.part(index, &part)], None);
        self.send(&chunk);
    }

    /// Ends the stream after all choices have ended.
    fn close(&mut self) {
        if self.n_open > 0 {
            self.fail(&ApiError::stopping());
            return;
        }
        if self.options.include_usage {
            let chunk = self.format.chunk(Vec::new(), Some(self.usage));
            self.send(&chunk);
        }
        self.ready.push_back("data: [DONE]\n\n".to_owned());
        self.has_ended = true;
    }

    /// Ends the stream with an error. Closing the receiver cancels the other choices.
    fn fail(&mut self, error: &ApiError) {
        self.send(&error.json());
        self.events.close();
        self.has_ended = true;
    }

    fn send(&mut self, chunk: &Json) {
        self.ready.push_back(format!("data: {chunk}\n\n"));
    }
}

/// Counts the token of an event.
fn note_event(record: &RequestRecord, event: &GenerationEvent) {
    if let GenerationEvent::Token { .. } = event {
        record.add_token();
    }
}

/// Returns a JSON response with status 200.
pub(super) fn json_response(body: &Json) -> axum::response::Response {
    use axum::response::IntoResponse;
    let content_type = [(axum::http::header::CONTENT_TYPE, "application/json")];
    (StatusCode::OK, content_type, body.to_string()).into_response()
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
