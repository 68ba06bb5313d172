//! A running job of the model's worker: its tokens, its rows in the KV cache, and the results of each forward.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use candle_core::{D, Tensor};
use candlewick_ops::to_host;
use candlewick_parallel::AppendTokens;

use super::api_error::ApiError;
use super::job::{GenerationEnd, GenerationEvent, GenerationJob, LogprobOptions, ReplyConstraint, TokenLogprobs};
use super::logprobs::{token_logprobs, token_text};
use super::prefix_rows::PrefixKey;
use crate::constraint::TokenConstraint;
use crate::generate::length_class;
use crate::lm::Lm;
use crate::sampler::TokenSampler;
use crate::text_stream::StoppableText;

/// A running job.
pub(super) struct Sequence<'m> {
    pub(super) job: GenerationJob,
    /// Key of its cached tokens.
    pub(super) key: PrefixKey,
    /// Tokens of prompt and completion.
    pub(super) ids: Vec<u32>,
    /// First row in the pool.
    pub(super) start: usize,
    /// Number of rows in the pool.
    pub(super) n_rows: usize,
    /// Number of cached tokens.
    pub(super) n_seen: usize,
    pub(super) sampler: TokenSampler,
    pub(super) text: StoppableText<'m>,
    /// Log-probabilities of the prompt's tokens so far.
    pub(super) prompt_logprobs: Vec<TokenLogprobs>,
    pub(super) is_prompt_scored: bool,
    pub(super) has_ended: bool,
}

/// Part of a sequence in a forward.
pub(super) struct SequencePart {
    /// Index of the sequence.
    pub(super) sequence: usize,
    pub(super) n_tokens: usize,
    /// Number of rows of logits, for the last tokens of the part.
    pub(super) n_logits: usize,
}

/// Rows that a sequence reserves for new tokens at a time, at least.
pub(super) const MIN_GROWTH: usize = 256;

/// Logits of a forward: whole rows, or the most probable token of each.
pub(super) struct Logits {
    rows_nv: Option<Vec<Vec<f32>>>,
    argmax_n: Vec<u32>,
    is_finite_n: Vec<bool>,
}

impl Logits {
    pub(super) fn read(logits_nv: &Tensor, whole: bool) -> Result<Self> {
        // A single non-finite value makes the sum non-finite, and only the sums are copied from the GPU.
        let sums = to_host(&logits_nv.sum(D::Minus1)?)?.to_vec1::<f32>()?;
        Ok(Self {
            rows_nv: if whole { Some(to_host(logits_nv)?.to_vec2()?) } else { None },
            argmax_n: to_host(&logits_nv.argmax(D::Minus1)?)?.to_vec1()?,
            is_finite_n: sums.into_iter().map(f32::is_finite).collect(),
        })
    }

    /// Returns a row of logits, which `Worker::needs_logits` has requested.
    fn row(&self, row: usize) -> &[f32] {
        self.rows_nv.as_ref().map_or(&[], |rows| &rows[row])
    }
}

impl<'m> Sequence<'m> {
    pub(super) fn new(job: GenerationJob, rows: Range<usize>, n_seen: usize, lm: &'m Lm) -> Self {
        let mut sampler = TokenSampler::new(job.sampling, job.seed).with_bias(Arc::clone(&job.logit_bias));
        sampler.observe(&job.prompt);
        let text = StoppableText::new(lm.tokenizer(), &job.stop).with_visible(&job.visible);
        let ids = job.prompt.to_vec();
        let key = job.prefix_key(lm);
        Self {
            job,
            key,
            ids,
            start: rows.start,
            n_rows: rows.len(),
            n_seen,
            sampler,
            text,
            prompt_logprobs: Vec::new(),
            is_prompt_scored: false,
            has_ended: false,
        }
    }

    /// Returns the number of tokens that are not cached.
    pub(super) fn n_fresh(&self) -> usize {
        self.ids.len() - self.n_seen
    }

    /// Returns the number of rows to reserve: the tokens, and as many new ones as were generated.
    pub(super) fn n_wanted(&self) -> usize {
        let n_generated = self.ids.len() - self.job.prompt.len();
        (self.ids.len() + n_generated.max(MIN_GROWTH)).min(self.job.prompt.len() + self.job.n_max)
    }

    /// Returns true while the prompt's tokens are being scored.
    pub(super) fn scores_prompt(&self) -> bool {
        let scores = self.job.logprobs.is_some_and(|logprobs| logprobs.of_prompt);
        scores && !self.is_prompt_scored && self.n_seen < self.job.prompt.len()
    }

    /// Returns the sequence's part of the next forward, of at most `n_left` tokens.
    pub(super) fn part(&self, sequence: usize, n_left: usize, max_scored: usize) -> SequencePart {
        let n_tokens = self.n_fresh().min(n_left);
        if self.scores_prompt() {
            let n_tokens = n_tokens.min(max_scored);
            return SequencePart { sequence, n_tokens, n_logits: n_tokens };
        }
        let n_logits = usize::from(n_tokens > 0 && n_tokens == self.n_fresh());
        SequencePart { sequence, n_tokens, n_logits }
    }

    pub(super) fn append(&self, part: &SequencePart) -> AppendTokens {
        let ids = self.ids[self.n_seen..self.n_seen + part.n_tokens].to_vec();
        AppendTokens { start: self.start, n_seen: self.n_seen, ids, class: self.key.class }
    }

    /// Takes the results of a forward. The logits of its part begin at row `first`.
    pub(super) fn advance(
        &mut self,
        part: &SequencePart,
        logits: &Logits,
        first: usize,
        lm: &Lm,
    ) -> Result<(), ApiError> {
        let rows = first..first + part.n_logits;
        if !logits.is_finite_n[rows.clone()].iter().all(|is_finite| *is_finite) {
            let problem = "the model's logits are not finite; its weights hold NaN, or numbers too large for the dtype \
                           (start the server with --dtype f32)";
            return Err(ApiError::internal(&anyhow::anyhow!(problem)));
        }
        if self.scores_prompt() {
            self.score_prompt(rows.clone(), logits, lm)?;
        }
        self.n_seen += part.n_tokens;
        if self.n_seen < self.ids.len() {
            return Ok(());
        }
        if !self.prompt_logprobs.is_empty() {
            self.is_prompt_scored = true;
            self.job.send(GenerationEvent::Prompt(std::mem::take(&mut self.prompt_logprobs)));
        }
        if self.job.n_max == 0 {
            return self.end(GenerationEnd::Length);
        }
        self.generate(rows.end - 1, logits, lm)
    }

    /// Scores the prompt's tokens after the tokens of a forward.
    fn score_prompt(&mut self, rows: Range<usize>, logits: &Logits, lm: &Lm) -> Result<(), ApiError> {
        let n_top = self.job.logprobs.map_or(0, |logprobs| logprobs.n_top);
        if self.prompt_logprobs.is_empty() {
            let token = token_text(lm.tokenizer(), None, self.ids[0]).map_err(|error| internal(error.into()))?;
            self.prompt_logprobs.push(TokenLogprobs { token, logprob: None, top: Vec::new() });
        }
        for (row, at) in rows.zip(self.n_seen..) {
            let Some(&id) = self.job.prompt.get(at + 1) else { break };
            let scored = token_logprobs(lm.tokenizer(), logits.row(row), self.ids[at], id, n_top);
            self.prompt_logprobs.push(scored.map_err(|error| internal(error.into()))?);
        }
        Ok(())
    }

    /// Samples the next token from a row of logits.
    fn generate(&mut self, row: usize, logits: &Logits, lm: &Lm) -> Result<(), ApiError> {
        let token = match self.is_argmax() {
            true => logits.argmax_n[row],
            false => self.sample(logits.row(row).to_vec())?,
        };
        let previous = self.ids[self.ids.len() - 1];
        let score = |LogprobOptions { n_top, .. }: LogprobOptions| {
            token_logprobs(lm.tokenizer(), logits.row(row), previous, token, n_top)
        };
        let logprobs = self.job.logprobs.map(score).transpose().map_err(|error| internal(error.into()))?;
        let is_stop = self.job.stop_ids.contains(&token) || self.job.text_stop_ids.contains(&token);
        let text = match is_stop {
            true => String::new(),
            false => self.text.push(token).map_err(|error| internal(error.into()))?,
        };
        self.job.send(GenerationEvent::Token { text, logprobs });
        self.ids.push(token);
        let is_complete = !is_stop && self.constrain(|constraint| constraint.push(token))?.unwrap_or(false);
        if is_stop || is_complete || self.text.has_stopped() {
            return self.end(GenerationEnd::Stop);
        }
        match self.ids.len() - self.job.prompt.len() == self.job.n_max {
            true => self.end(GenerationEnd::Length),
            false => Ok(()),
        }
    }

    /// Computes the mask of the next token, if the part ends the tokens so far.
    pub(super) fn prepare_mask(&mut self, part: &SequencePart) {
        let samples = self.n_seen + part.n_tokens >= self.ids.len() && self.job.n_max > 0;
        if let Some(ReplyConstraint { tokens, .. }) = self.job.constraint.as_mut().filter(|_| samples) {
            tokens.prepare();
        }
    }

    /// Returns true if the next token is the one with the largest logit.
    pub(super) fn is_argmax(&self) -> bool {
        self.sampler.is_argmax() && self.job.constraint.is_none()
    }

    fn sample(&mut self, mut logits_v: Vec<f32>) -> Result<u32, ApiError> {
        let (stop_ids, text_stop_ids) = (Arc::clone(&self.job.stop_ids), Arc::clone(&self.job.text_stop_ids));
        self.constrain(|constraint| constraint.mask(&mut logits_v, &stop_ids, &text_stop_ids))?;
        Ok(self.sampler.sample(&mut logits_v))
    }

    /// Uses the grammar, if there is one.
    fn constrain<T>(&mut self, use_it: impl FnOnce(&mut TokenConstraint) -> Result<T>) -> Result<Option<T>, ApiError> {
        let Some(ReplyConstraint { field, tokens }) = &mut self.job.constraint else { return Ok(None) };
        use_it(tokens).map(Some).map_err(|error| {
            ApiError::field(*field, format!("{field}: the schema is too complex for this text: {error:#}"))
        })
    }

    fn end(&mut self, reason: GenerationEnd) -> Result<(), ApiError> {
        let text = self.text.finish().map_err(|error| internal(error.into()))?;
        let reason = if self.text.has_stopped() { GenerationEnd::Stop } else { reason };
        self.job.send(GenerationEvent::End { text, reason });
        self.has_ended = true;
        Ok(())
    }

    pub(super) fn fail(&mut self, error: ApiError) {
        self.job.send(GenerationEvent::Failed(error));
        self.has_ended = true;
    }
}

impl GenerationJob {
    /// Returns the key of the job's cached tokens on `lm`, its model.
    pub(super) fn prefix_key(&self, lm: &Lm) -> PrefixKey {
        let class = length_class(lm.engine().model(), self.prompt.len(), self.n_max);
        PrefixKey { model: self.model, class }
    }

    /// Sends an event. A closed receiver cancels the job before the next forward.
    pub(super) fn send(&self, event: GenerationEvent) {
        let _ = self.events.send((self.choice, event));
    }
}

fn internal(error: anyhow::Error) -> ApiError {
    ApiError::internal(&error)
}
