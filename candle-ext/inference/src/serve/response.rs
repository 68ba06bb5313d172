//! Responses in OpenAI's format, whole or streamed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::http::StatusCode;
use futures_util::Stream;
use futures_util::stream::unfold;
use serde_json::{Value as Json, json};
use tokio::sync::mpsc::UnboundedReceiver;

use super::api_error::ApiError;
use super::choice::{Choice, chat_logprob};
use super::generation_fields::StreamOptions;
use super::grammar_threads::RequestedGrammar;
use super::job::{GenerationEvent, GenerationJob, ReplyConstraint};
use super::reply_parser::ReplyParser;
use super::request_record::RequestRecord;
use super::server_state::{ServerState, seconds_since_1970};

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
    /// Grammar of all choices, which is not compiled yet.
    pub(super) grammar: Option<RequestedGrammar>,
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
            ResponseKind::Completion => self.choice(index, ("text", json!(choice.reply.content.text)), choice),
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
            ResponseKind::Completion => self.choice(index, ("text", json!(part.reply.content.text)), part),
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

impl ParsedRequest {
    /// Compiles the grammar of the jobs.
    pub(super) async fn compile_grammar(&mut self, state: &ServerState) -> Result<(), ApiError> {
        let Some(grammar) = self.grammar.take() else { return Ok(()) };
        let field = grammar.field;
        let constraint = grammar.compile(&state.grammar_threads).await?;
        // The limits of a grammar are those of each choice.
        let of_choice = || Some(ReplyConstraint { field, tokens: constraint.independent() });
        self.jobs.iter_mut().for_each(|job| job.constraint = of_choice());
        Ok(())
    }

    fn choices(&mut self) -> Vec<Choice> {
        let choice = |_| Choice { parser: self.parser.clone(), ..Choice::default() };
        let mut choices: Vec<Choice> = self.jobs.iter().map(choice).collect();
        choices
            .iter_mut()
            .zip(self.echoes.drain(..))
            .for_each(|(choice, echo)| choice.reply.content.text = echo.to_string());
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
        let (parser, n_calls) = (std::mem::take(&mut part.parser), part.n_calls);
        let next = Choice { n_chars_before, begun_character, parser, n_calls, ..Choice::default() };
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
        self.record.end_stream(StatusCode::OK);
        self.has_ended = true;
    }

    /// Ends the stream with an error. Closing the receiver cancels the other choices.
    fn fail(&mut self, error: &ApiError) {
        self.send(&error.json());
        self.record.log_error(error);
        self.record.end_stream(error.status());
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
