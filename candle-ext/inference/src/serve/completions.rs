//! Requests of `POST /v1/completions`.

use std::sync::Arc;

use candlewick_text::tokenizer::{SpecialTokens, TokenizerError};
use serde_json::Value as Json;

use super::api_error::ApiError;
use super::fields::{Fields, shown};
use super::generation_fields::{GenerationFields, JobSettings, TokenizedPrompt, checked_top, max_tokens};
use super::job::LogprobOptions;
use super::reply_parser::ReplyParser;
use super::response::{ParsedRequest, ResponseFormat, ResponseKind};
use super::response_format::RESPONSE_FORMAT;
use super::server_state::{ServedModel, ServerState};
use crate::reasoning::ReasoningStart;

/// OpenAI's default of `max_tokens`.
const MAX_TOKENS: usize = 16;

/// Parses a request and tokenizes its prompts.
pub(super) fn parse(mut fields: Fields, state: &ServerState) -> Result<ParsedRequest, ApiError> {
    let generation = GenerationFields::take(&mut fields, state)?;
    let model = &state.models[generation.model];
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let n_top = fields.count("logprobs")?.map(|n| checked_top("logprobs", n)).transpose()?;
    let logprobs = n_top.map(|n_top| LogprobOptions { n_top, of_prompt: echo });
    let max_tokens = max_tokens(&mut fields)?.unwrap_or(MAX_TOKENS);
    let specials = match fields.boolean("add_special_tokens")?.unwrap_or(true) {
        true => SpecialTokens::Include,
        false => SpecialTokens::Exclude,
    };
    let written = written(&mut fields, |n_prompts| state.check_number_of_choices(n_prompts, generation.n))?;
    fields.finish()?;
    let (mut prompts, mut echoes) = (Vec::new(), Vec::new());
    for written in written {
        let ids = written.ids(model, specials, state)?;
        let n_max = state.n_max(ids.len(), Some(max_tokens))?;
        if echo {
            let text = written.text(model).map_err(|error| ApiError::internal(&error.into()))?;
            echoes.extend(std::iter::repeat_n(Arc::<str>::from(text), generation.n));
        }
        prompts.push(TokenizedPrompt { ids, n_max });
    }
    let n_prompt = prompts.iter().map(|prompt| prompt.ids.len()).sum();
    if echo {
        check_echo(&echoes, n_prompt * generation.n * n_top.map_or(0, |n_top| n_top + 1))?;
    }
    let format = generation.response_format.as_ref().map(|format| format.grammar(ReasoningStart::None));
    let grammar = format.map(|grammar| model.requested(RESPONSE_FORMAT, grammar));
    let settings = JobSettings { visible: Arc::default(), logprobs, stop_ids: &model.stop_ids };
    let (jobs, events) = generation.jobs(prompts, settings, state);
    let format = ResponseFormat::new(ResponseKind::Completion, &model.name, logprobs.is_some());
    Ok(ParsedRequest {
        jobs,
        events,
        format,
        stream: generation.stream,
        n_prompt,
        echoes,
        parser: ReplyParser::default(),
        grammar,
    })
}

/// Largest size of the prompts in a response with `echo`.
const MAX_ECHO_BYTES: usize = 16 << 20;

/// Largest number of log-probabilities of the prompts in a response.
const MAX_ECHO_LOGPROBS: usize = 1 << 21;

/// Fails if a response with `echo` would be too large. It has the prompt in each choice.
fn check_echo(echoes: &[Arc<str>], n_logprobs: usize) -> Result<(), ApiError> {
    let n_bytes: usize = echoes.iter().map(|echo| echo.len()).sum();
    for (what, n, max) in [("bytes", n_bytes, MAX_ECHO_BYTES), ("log-probabilities", n_logprobs, MAX_ECHO_LOGPROBS)] {
        if n > max {
            let problem = format!(
                "echo returns {n} {what} of the prompts, at most {max} are possible; send fewer prompts or choices"
            );
            return Err(ApiError::field("echo", problem));
        }
    }
    Ok(())
}

/// A prompt as the request has it.
enum WrittenPrompt {
    Text(String),
    Ids(Vec<u64>),
}

/// Takes the prompts: a string, an array of strings, an array of token ids, or an array of such arrays. Calls `check` with
/// their number first.
fn written(
    fields: &mut Fields,
    check: impl FnOnce(usize) -> Result<(), ApiError>,
) -> Result<Vec<WrittenPrompt>, ApiError> {
    let wrong = |value: &Json| {
        let shown = shown(value);
        let problem =
            format!("prompt is {shown}, expected a string, token ids, or an array of strings or of token ids");
        ApiError::field("prompt", problem)
    };
    let value = fields.take("prompt").unwrap_or_default();
    let ids = |items: &[Json]| items.iter().map(Json::as_u64).collect::<Option<Vec<_>>>().map(WrittenPrompt::Ids);
    let item = |item: &Json| match item {
        Json::String(text) => Some(WrittenPrompt::Text(text.clone())),
        Json::Array(items) => ids(items),
        _ => None,
    };
    match &value {
        Json::String(text) => Ok(vec![WrittenPrompt::Text(text.clone())]),
        Json::Array(items) if items.is_empty() => Err(wrong(&value)),
        Json::Array(items) if items[0].is_number() => ids(items).map(|ids| vec![ids]).ok_or_else(|| wrong(&value)),
        Json::Array(items) => {
            check(items.len())?;
            items.iter().map(item).collect::<Option<_>>().ok_or_else(|| wrong(&value))
        }
        _ => Err(wrong(&value)),
    }
}

impl WrittenPrompt {
    /// Returns the token ids, at least one.
    fn ids(&self, model: &ServedModel, specials: SpecialTokens, state: &ServerState) -> Result<Vec<u32>, ApiError> {
        let ids = match self {
            Self::Text(text) => {
                state.check_length(model, text)?;
                let refused = |error: TokenizerError| ApiError::field("prompt", format!("failed to {error}"));
                model.tokenizer.encode(text, specials).map_err(refused)?
            }
            Self::Ids(ids) => ids.iter().map(|id| checked_id(*id, model.n_vocab)).collect::<Result<_, _>>()?,
        };
        match ids.is_empty() {
            true => Err(ApiError::field("prompt", "a prompt has no tokens")),
            false => Ok(ids),
        }
    }

    /// Returns the prompt as text. Its ids have been checked.
    fn text(&self, model: &ServedModel) -> Result<String, TokenizerError> {
        match self {
            Self::Text(text) => Ok(text.clone()),
            Self::Ids(ids) => {
                let ids: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
                model.tokenizer.decode(&ids, SpecialTokens::Include)
            }
        }
    }
}

fn checked_id(id: u64, n_vocab: usize) -> Result<u32, ApiError> {
    let outside = || ApiError::field("prompt", format!("prompt has the token {id}, but the vocabulary has {n_vocab}"));
    u32::try_from(id).ok().filter(|id| (*id as usize) < n_vocab).ok_or_else(outside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_echo_has_a_bounded_size() {
        let echo = Arc::<str>::from("a".repeat(1 << 10));
        let echoes = |n| vec![Arc::clone(&echo); n];
        assert!(check_echo(&echoes(1 << 14), MAX_ECHO_LOGPROBS).is_ok());
        assert!(check_echo(&echoes((1 << 14) + 1), 0).is_err());
        assert!(check_echo(&echoes(1), MAX_ECHO_LOGPROBS + 1).is_err());
    }
}
