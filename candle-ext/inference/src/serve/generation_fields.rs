//! Fields that requests for chats and completions share.

use std::sync::Arc;

use serde_json::{Map, Value as Json, json};

use super::api_error::ApiError;
use super::fields::{Fields, shown};
use super::job::{GenerationEvent, GenerationJob, LogprobOptions};
use super::reply_grammar::ReplyPart;
use super::response_format::response_format;
use super::server_state::ServerState;
use crate::lm::special_stops;
use crate::sampler::{LogitBias, SamplingParams, seed_of};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Fields of a generation.
pub(super) struct GenerationFields {
    /// Choices for each prompt.
    pub(super) n: usize,
    /// Index of the model.
    pub(super) model: usize,
    /// Options of a streamed response.
    pub(super) stream: Option<StreamOptions>,
    /// Format of the text, if the request has `response_format`.
    pub(super) response_format: Option<ReplyPart>,
    sampling: SamplingParams,
    logit_bias: LogitBias,
    seed: u64,
    stop: Arc<[String]>,
    /// Tokens that end the text, besides those of the model.
    stop_token_ids: Arc<[u32]>,
    eos: EosMeaning,
}

/// Meaning of the model's end-of-text tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EosMeaning {
    End,
    /// They are text: `ignore_eos`.
    Text,
}

/// Options of a streamed response.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamOptions {
    /// Sends token counts at the end.
    pub(super) include_usage: bool,
}

/// Tokens of a prompt.
pub(super) struct TokenizedPrompt {
    /// Tokens, at least one.
    pub(super) ids: Vec<u32>,
    /// Maximum number of new tokens.
    pub(super) n_max: usize,
}

/// Settings of all jobs of a request.
pub(super) struct JobSettings<'a> {
    /// Special tokens that are part of the text.
    pub(super) visible: Arc<[u32]>,
    pub(super) logprobs: Option<LogprobOptions>,
    /// Tokens that end a text, besides those of stop strings.
    pub(super) stop_ids: &'a [u32],
}

/// Largest number of stop strings.
const MAX_STOPS: usize = 64;

/// Largest size of a stop string.
const MAX_STOP_BYTES: usize = 1024;

/// Largest absolute value of a logit bias, OpenAI's.
const MAX_LOGIT_BIAS: f64 = 100.0;

/// Largest number of most probable tokens at a position.
pub(super) const MAX_TOP_LOGPROBS: usize = 20;

impl GenerationFields {
    /// Takes the fields of a request, and finds its model.
    pub(super) fn take(fields: &mut Fields, state: &ServerState) -> Result<Self, ApiError> {
        let model = state.find_model(fields.text("model")?.as_deref())?;
        refuse_unsupported(fields)?;
        let n = fields.count("n")?.unwrap_or(1);
        if n == 0 {
            return Err(ApiError::field("n", "n is 0, expected at least 1"));
        }
        state.check_number_of_choices(1, n)?;
        let seed = fields.integer("seed")?.map_or_else(rand::random, i64::cast_unsigned);
        let logit_bias = logit_bias(fields, state.models[model].n_vocab)?;
        let (stream, sampling, stop) = (stream(fields)?, sampling(fields)?, stop(fields)?);
        let response_format = response_format(fields)?;
        let stop_token_ids = stop_token_ids(fields, state.models[model].n_vocab)?;
        let eos = if fields.boolean("ignore_eos")?.unwrap_or(false) { EosMeaning::Text } else { EosMeaning::End };
        Ok(Self { n, model, stream, response_format, sampling, logit_bias, seed, stop, stop_token_ids, eos })
    }

    /// Creates the jobs of a request, all choices of the first prompt first, and the receiver of their events.
    pub(super) fn jobs(
        &self,
        prompts: Vec<TokenizedPrompt>,
        settings: JobSettings<'_>,
        state: &ServerState,
    ) -> (Vec<GenerationJob>, UnboundedReceiver<(usize, GenerationEvent)>) {
        let JobSettings { visible, logprobs, stop_ids } = settings;
        let (events, receiver) = unbounded_channel();
        let of_model = if self.eos == EosMeaning::End { stop_ids } else { &[] };
        let of_strings = special_stops(&state.models[self.model].tokenizer, &self.stop);
        let stop_ids: Arc<[u32]> = of_model.iter().copied().chain(of_strings).collect();
        let mut jobs = Vec::new();
        for TokenizedPrompt { ids, n_max } in prompts {
            let prompt: Arc<[u32]> = ids.into();
            for index in 0..self.n {
                jobs.push(GenerationJob {
                    model: self.model,
                    prompt: Arc::clone(&prompt),
                    n_max,
                    sampling: self.sampling,
                    logit_bias: Arc::clone(&self.logit_bias),
                    constraint: None,
                    visible: Arc::clone(&visible),
                    seed: seed_of(self.seed, index as u64),
                    stop: Arc::clone(&self.stop),
                    stop_ids: Arc::clone(&stop_ids),
                    text_stop_ids: Arc::clone(&self.stop_token_ids),
                    logprobs,
                    choice: jobs.len(),
                    events: events.clone(),
                });
            }
        }
        (jobs, receiver)
    }
}

/// Rejects fields of OpenAI and vLLM that would change the response, unless they have their defaults, which some clients send.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    fields.refuse("best_of", &json!(1), "use n")?;
    fields.refuse("functions", &json!([]), "use tools")?;
    fields.refuse("function_call", &json!("auto"), "use tool_choice")?;
    for (name, default) in [
        ("suffix", json!("")),
        ("use_beam_search", json!(false)),
        ("early_stopping", json!(false)),
        ("length_penalty", json!(1)),
        ("min_tokens", json!(0)),
        ("include_stop_str_in_output", json!(false)),
        ("skip_special_tokens", json!(true)),
        ("spaces_between_special_tokens", json!(true)),
        ("bad_words", json!([])),
        ("logits_processors", json!([])),
        ("return_tokens_as_token_ids", json!(false)),
        ("return_token_ids", json!(false)),
        ("priority", json!(0)),
        ("modalities", json!(["text"])),
    ] {
        fields.refuse(name, &default, "remove it")?;
    }
    for name in ["structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"] {
        fields.refuse(name, &json!({}), "use response_format")?;
    }
    Ok(())
}

fn stream(fields: &mut Fields) -> Result<Option<StreamOptions>, ApiError> {
    let options = fields.object("stream_options")?;
    let is_streamed = fields.boolean("stream")?.unwrap_or(false);
    if !is_streamed && options.is_some() {
        return Err(ApiError::field("stream_options", "stream_options needs stream: true"));
    }
    let mut options = Fields::nested(options.unwrap_or_default());
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    // It would hide the sizes of tokens from listeners; the parts are the same.
    options.boolean("include_obfuscation")?;
    options.refuse("continuous_usage_stats", &json!(false), "use include_usage")?;
    options.finish()?;
    Ok(is_streamed.then_some(StreamOptions { include_usage }))
}

/// Takes the sampling parameters. The defaults are OpenAI's.
fn sampling(fields: &mut Fields) -> Result<SamplingParams, ApiError> {
    let top_k = match fields.integer("top_k")?.unwrap_or(0) {
        // vLLM and SGLang write -1 for all tokens.
        -1 => 0,
        top_k => usize::try_from(top_k)
            .map_err(|_| ApiError::field("top_k", format!("top_k is {top_k}, expected at least 0; 0 is all tokens")))?,
    };
    let params = SamplingParams {
        temperature: fields.number("temperature")?.unwrap_or(1.0),
        top_k,
        top_p: fields.number("top_p")?.unwrap_or(1.0),
        min_p: fields.number("min_p")?.unwrap_or(0.0),
        repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(1.0),
        presence_penalty: fields.number("presence_penalty")?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty")?.unwrap_or(0.0),
    };
    params.check().map_err(|error| ApiError::field(error.name, error.to_string()))?;
    Ok(params)
}

/// Takes the numbers to add to logits, by token ids below `n_vocab`.
fn logit_bias(fields: &mut Fields, n_vocab: usize) -> Result<LogitBias, ApiError> {
    let refused = |problem: String| ApiError::field("logit_bias", problem);
    let entry = |(key, value): (String, Json)| {
        let id = key.parse::<u32>().ok().filter(|id| (*id as usize) < n_vocab).ok_or_else(|| {
            let key = shown(&Json::String(key.clone()));
            refused(format!("logit_bias has the key {key}, expected the id of a token; the vocabulary has {n_vocab}"))
        })?;
        let bias = value.as_f64().filter(|bias| bias.abs() <= MAX_LOGIT_BIAS).ok_or_else(|| {
            let value = shown(&value);
            refused(format!(
                "logit_bias of token {id} is {value}, expected a number from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}"
            ))
        })?;
        Ok((id, bias as f32))
    };
    fields.object("logit_bias")?.unwrap_or_default().into_iter().map(entry).collect()
}

fn stop(fields: &mut Fields) -> Result<Arc<[String]>, ApiError> {
    let stop = fields.texts("stop")?.unwrap_or_default();
    if stop.len() > MAX_STOPS {
        let problem = format!("stop has {} strings, at most {MAX_STOPS} are possible", stop.len());
        return Err(ApiError::field("stop", problem));
    }
    if let Some(long) = stop.iter().find(|stop| stop.len() > MAX_STOP_BYTES) {
        let problem = format!("stop has a string of {} bytes, at most {MAX_STOP_BYTES} are possible", long.len());
        return Err(ApiError::field("stop", problem));
    }
    if stop.iter().any(String::is_empty) {
        return Err(ApiError::field("stop", "stop has an empty string; remove it"));
    }
    Ok(stop.into())
}

/// Takes the token ids that end the text, below `n_vocab`.
fn stop_token_ids(fields: &mut Fields, n_vocab: usize) -> Result<Arc<[u32]>, ApiError> {
    const NAME: &str = "stop_token_ids";
    let ids = fields.array(NAME)?.unwrap_or_default();
    if ids.len() > MAX_STOPS {
        let problem = format!("{NAME} has {} tokens, at most {MAX_STOPS} are possible", ids.len());
        return Err(ApiError::field(NAME, problem));
    }
    let checked = |id: &Json| {
        let checked = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < n_vocab);
        let problem = || format!("{NAME} has {}, expected token ids below {n_vocab}", shown(id));
        checked.ok_or_else(|| ApiError::field(NAME, problem()))
    };
    ids.iter().map(checked).collect()
}

/// Takes the maximum number of new tokens, which has two names.
pub(super) fn max_tokens(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    match (fields.count("max_tokens")?, fields.count("max_completion_tokens")?) {
        (Some(old), Some(new)) if old != new => {
            let problem = format!("max_completion_tokens is {new}, but max_tokens is {old}; remove one of them");
            Err(ApiError::field("max_completion_tokens", problem))
        }
        (old, new) => Ok(new.or(old)),
    }
}

/// Checks a number of most probable tokens.
pub(super) fn checked_top(name: &'static str, n: usize) -> Result<usize, ApiError> {
    match n <= MAX_TOP_LOGPROBS {
        true => Ok(n),
        false => Err(ApiError::field(name, format!("{name} is {n}, at most {MAX_TOP_LOGPROBS} are possible"))),
    }
}

/// Returns the object of an array's item.
pub(super) fn object_of(name: &'static str, item: usize, value: Json) -> Result<Map<String, Json>, ApiError> {
    match value {
        Json::Object(fields) => Ok(fields),
        other => Err(ApiError::field(name, format!("{name}[{item}] is {}, expected an object", shown(&other)))),
    }
}
