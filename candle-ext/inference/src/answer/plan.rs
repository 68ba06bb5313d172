//! Plan of a batch of requests: deduplicated and tokenized.

use std::collections::HashMap;

use anyhow::{Error, Result, ensure};
use rayon::prelude::*;

use super::encode::{EmptyContinuation, RequestEncoder, UnscorableRequests};
use super::generation::GenerationRequest;
use super::response_cache::key;
use super::rolling::{ScoredSequence, rolling_windows};
use super::sample::SamplingDefaults;
use super::score::SequenceScore;
use super::settings::BackendSettings;
use super::stop::StopCriteria;
use crate::request::{GenerationSettings, Request, Response};
use crate::sampler::TokenSampler;
use candlewick_runtime::exit::ExitCode;

/// Deduplicated requests of one call.
pub(super) struct RequestPlan {
    /// Unique requests.
    pub(super) questions: Vec<UniqueRequest>,
    /// Index of the unique request of each request.
    pub(super) places: Vec<usize>,
    pub(super) work: TokenizedRequests,
}

/// A unique request.
pub(super) struct UniqueRequest {
    /// Key in the response cache.
    pub(super) key: String,
    /// Number of tokens, and number of truncated tokens.
    pub(super) size: (usize, usize),
    /// Number of sequences to score.
    pub(super) n_scored: usize,
    is_rolling: bool,
}

/// Tokenized requests, with the unique request of each.
#[derive(Default)]
pub(super) struct TokenizedRequests {
    pub(super) scored: Vec<ScoredSequence>,
    pub(super) owners: Vec<usize>,
    pub(super) prompts: Vec<GenerationRequest>,
    pub(super) prompt_owners: Vec<usize>,
}

/// Tokens of a request.
enum Tokens {
    ScoredSequence(Vec<ScoredSequence>),
    GenerationRequest(Box<GenerationRequest>, usize),
}

impl RequestPlan {
    pub(super) fn new(
        requests: &[Request],
        encoder: &RequestEncoder,
        settings: &BackendSettings,
        defaults: SamplingDefaults,
        max_length: usize,
        identity: &str,
    ) -> Result<Self> {
        let mut found = HashMap::new();
        let mut n_asked: HashMap<blake3::Hash, usize> = HashMap::new();
        let (mut places, mut different) = (Vec::new(), Vec::new());
        for request in requests {
            let key_of = |draw| key(identity, request, settings.max_gen_toks, Some((settings.seed, draw)));
            // Repeated sampling of a request is another unique request.
            let n_asked = n_asked.entry(key_of(0)).or_default();
            let key = key_of(if is_sampled(request) { *n_asked } else { 0 });
            *n_asked += 1;
            places.push(*found.entry(key).or_insert_with(|| {
                different.push((request, key));
                different.len() - 1
            }));
        }
        let reader = Reader { encoder, settings, defaults, max_length };
        let read = |(request, key): &(&Request, blake3::Hash)| reader.read(request, *key.as_bytes());
        let tokens: Vec<Result<Tokens>> = different.par_iter().map(read).collect();
        if let Some(why) =
            tokens.iter().find_map(|tokens| tokens.as_ref().err()?.downcast_ref::<EmptyContinuation>()).cloned()
        {
            let is_unscorable =
                |question: usize| tokens[question].as_ref().is_err_and(|error| error.is::<EmptyContinuation>());
            let requests = (0..places.len()).filter(|request| is_unscorable(places[*request])).collect();
            return Err(Error::from(UnscorableRequests { requests, why }).context(ExitCode::Data));
        }
        let tokens = tokens.into_iter().collect::<Result<Vec<Tokens>>>()?;
        let (mut questions, mut work) = (Vec::new(), TokenizedRequests::default());
        for ((request, key), tokens) in different.into_iter().zip(tokens) {
            let (size, n_scored) = work.add(questions.len(), tokens);
            let is_rolling = matches!(request, Request::LoglikelihoodRolling { .. });
            questions.push(UniqueRequest { key: key.to_hex()[..32].to_owned(), size, n_scored, is_rolling });
        }
        Ok(Self { questions, places, work })
    }

    /// Returns the responses to rolling requests of empty texts.
    pub(super) fn empty_text_responses(&self) -> impl Iterator<Item = (usize, Response)> {
        let is_empty = |(_, question): &(usize, &UniqueRequest)| question.is_rolling && question.n_scored == 0;
        let empty = self.questions.iter().enumerate().filter(is_empty);
        empty.map(|(i, _)| (i, Response::LoglikelihoodRolling(0.0)))
    }

    /// Returns the number of requests that these scored sequences belong to.
    pub(super) fn n_requests(&self, scored: &[usize]) -> usize {
        let mut owners: Vec<usize> = scored.iter().map(|item| self.work.owners[*item]).collect();
        owners.sort_unstable();
        owners.dedup();
        owners.len()
    }

    /// Returns the response to a request whose sequences are all scored.
    pub(super) fn response_from_scores(&self, question: usize, mut scores: Vec<(usize, SequenceScore)>) -> Response {
        scores.sort_unstable_by_key(|(item, _)| *item);
        let logprob = scores.iter().map(|(_, score)| score.logprob).sum();
        match self.questions[question].is_rolling {
            true => Response::LoglikelihoodRolling(logprob),
            false => Response::Loglikelihood { logprob, is_greedy: scores.iter().all(|(_, score)| score.is_greedy) },
        }
    }
}

impl TokenizedRequests {
    /// Adds a request's tokens; returns its size and number of scored sequences.
    fn add(&mut self, question: usize, tokens: Tokens) -> ((usize, usize), usize) {
        match tokens {
            Tokens::ScoredSequence(scored) => {
                let n_truncated = scored.iter().map(|scored| scored.n_truncated).sum();
                let n_tokens = scored.iter().map(|scored| scored.ids.len() + scored.n_truncated).sum();
                let n_scored = scored.len();
                self.scored.extend(scored);
                self.owners.resize(self.scored.len(), question);
                ((n_tokens, n_truncated), n_scored)
            }
            Tokens::GenerationRequest(prompt, n_truncated) => {
                let n_tokens = prompt.ids.len() + n_truncated;
                self.prompts.push(*prompt);
                self.prompt_owners.push(question);
                ((n_tokens, n_truncated), 0)
            }
        }
    }
}

fn is_sampled(request: &Request) -> bool {
    matches!(request, Request::GenerateUntil { settings: GenerationSettings { do_sample: true, .. }, .. })
}

/// Tokenizes requests.
struct Reader<'r> {
    encoder: &'r RequestEncoder<'r>,
    settings: &'r BackendSettings,
    defaults: SamplingDefaults,
    max_length: usize,
}

impl Reader<'_> {
    fn read(&self, request: &Request, seed: [u8; 32]) -> Result<Tokens> {
        let Self { encoder, max_length, .. } = *self;
        match request {
            Request::Loglikelihood { context, continuation } => {
                let pair = encoder.pair(context, continuation)?;
                let n = pair.continuation.len();
                ensure!(
                    n <= max_length,
                    anyhow::anyhow!(
                        "failed to score a continuation of {n} tokens: the model's context has {max_length}; it begins \
                         with {:?}",
                        continuation.chars().take(60).collect::<String>()
                    )
                    .context(ExitCode::Data)
                );
                Ok(Tokens::ScoredSequence(vec![ScoredSequence::new(pair, max_length)]))
            }
            Request::LoglikelihoodRolling { text } => {
                let ids = encoder.text(text)?;
                let prefix = if ids.is_empty() { 0 } else { encoder.prefix_token_id()? };
                Ok(Tokens::ScoredSequence(rolling_windows(&ids, prefix, max_length)))
            }
            Request::GenerateUntil { context, settings } => self.prompt(context, settings, seed),
        }
    }

    fn prompt(&self, context: &str, settings: &GenerationSettings, seed: [u8; 32]) -> Result<Tokens> {
        let n_max = settings.max_gen_toks.unwrap_or(self.settings.max_gen_toks);
        ensure!(
            n_max < self.max_length,
            anyhow::anyhow!(
                "failed to generate {n_max} tokens: the model's context has {}, which also holds the prompt; lower \
                 max_gen_toks",
                self.max_length
            )
            .context(ExitCode::Usage)
        );
        let mut ids = self.encoder.prompt(context)?;
        let n_truncated = ids.len().saturating_sub(self.max_length - n_max);
        ids.drain(..n_truncated);
        let stop = StopCriteria::new(&settings.until, self.settings.think_end.clone(), self.encoder.tokenizer());
        let sampler = TokenSampler::new(self.defaults.params(settings)?, seed);
        Ok(Tokens::GenerationRequest(Box::new(GenerationRequest { ids, n_max, stop, sampler }), n_truncated))
    }
}
