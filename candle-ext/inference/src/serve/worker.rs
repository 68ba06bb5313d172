//! The model's worker: continuous batching of all running jobs on one thread.
//!
//! Each step is one forward of the new tokens of all sequences: the last token of those that generate, and a part of
//! the prompts of the others.

use anyhow::Result;
use candle_core::{D, Tensor};
use candlewick_ops::to_host;
use candlewick_parallel::{AppendTokens, KvCachePool};
use tokio::sync::mpsc;

use super::api_error::ApiError;
use super::job::{GenerationEnd, GenerationEvent, GenerationJob, LogprobOptions, TokenLogprobs};
use super::logprobs::{token_logprobs, token_text};
use super::prefix_rows::{PrefixRows, n_common};
use crate::lm::Lm;
use crate::sampler::TokenSampler;
use crate::text_stream::StoppableText;

/// Limits of the worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerLimits {
    /// Concurrent sequences.
    pub(super) n_sequences: usize,
    /// New tokens of a forward, unless more sequences generate.
    pub(super) n_tokens: usize,
    /// Tokens in the KV cache.
    pub(super) pool_rows: usize,
}

/// The model's worker.
pub(super) struct Worker<'m> {
    lm: &'m Lm,
    limits: WorkerLimits,
    pool: KvCachePool,
    rows: PrefixRows,
    sequences: Vec<Sequence<'m>>,
    /// The next job, if the KV cache has no space for it yet.
    next: Option<GenerationJob>,
}

/// A running job.
struct Sequence<'m> {
    job: GenerationJob,
    /// Tokens of prompt and completion.
    ids: Vec<u32>,
    /// First row in the pool.
    start: usize,
    /// Number of cached tokens.
    n_seen: usize,
    sampler: TokenSampler,
    text: StoppableText<'m>,
    /// Log-probabilities of the prompt's tokens so far.
    prompt_logprobs: Vec<TokenLogprobs>,
    has_ended: bool,
}

/// Part of a sequence in a forward.
struct SequencePart {
    /// Index of the sequence.
    sequence: usize,
    n_tokens: usize,
    /// Number of rows of logits, for the last tokens of the part.
    n_logits: usize,
}

/// Shortest prefix worth a copy.
const MIN_SHARED: usize = 8;

/// Memory of the logits of a prompt's tokens in a forward.
const MAX_PROMPT_LOGITS_BYTES: usize = 128 << 20;

impl<'m> Worker<'m> {
    /// Creates a worker without jobs.
    pub(super) fn new(lm: &'m Lm, limits: WorkerLimits) -> Self {
        let pool = KvCachePool::new(lm.engine().model().n_blocks(), limits.pool_rows);
        Self { lm, limits, pool, rows: PrefixRows::new(limits.pool_rows), sequences: Vec::new(), next: None }
    }

    /// Runs the jobs of the queue until it is closed and all have ended.
    pub(super) fn run(mut self, mut queue: mpsc::Receiver<GenerationJob>) {
        loop {
            self.end_where(|sequence| sequence.job.events.is_closed());
            if !self.admit(&mut queue) {
                return;
            }
            if let Err(error) = self.step() {
                let error = ApiError::internal(&error);
                self.sequences.iter_mut().for_each(|sequence| sequence.fail(error.clone()));
            }
            self.end_where(|sequence| sequence.has_ended);
        }
    }

    /// Starts jobs while there is space. Waits for one if no sequence is running; returns false if there are no more.
    fn admit(&mut self, queue: &mut mpsc::Receiver<GenerationJob>) -> bool {
        while self.sequences.len() < self.limits.n_sequences {
            let job = match self.next.take() {
                Some(job) => Some(job),
                None if self.sequences.is_empty() => match queue.blocking_recv() {
                    Some(job) => Some(job),
                    None => return false,
                },
                None => queue.try_recv().ok(),
            };
            let Some(job) = job else { break };
            if job.events.is_closed() {
                continue;
            }
            match self.begin(job) {
                None => {}
                waiting => {
                    self.next = waiting;
                    break;
                }
            }
        }
        true
    }

    /// Starts a job, or returns it if it must wait for space, or for a prefix that another sequence is computing.
    fn begin(&mut self, job: GenerationJob) -> Option<GenerationJob> {
        let scores_prompt = job.logprobs.is_some_and(|logprobs| logprobs.of_prompt);
        if job.n_max == 0 && !scores_prompt {
            job.send(GenerationEvent::End { text: String::new(), reason: GenerationEnd::Length });
            return None;
        }
        // At least the last token is computed, for its logits.
        let reusable = if scores_prompt { &[][..] } else { &job.prompt[..job.prompt.len() - 1] };
        if self.n_uncomputed(reusable) >= MIN_SHARED {
            return Some(job);
        }
        let Some(start) = self.rows.allocate(job.prompt.len() + job.n_max) else { return Some(job) };
        let n_seen = match self.copy_prefix(reusable, start) {
            Ok(n_seen) => n_seen,
            Err(error) => {
                job.send(GenerationEvent::Failed(ApiError::internal(&error)));
                self.rows.free(start);
                return None;
            }
        };
        self.sequences.push(Sequence::new(job, start, n_seen, self.lm));
        None
    }

    /// Returns the number of tokens of the prefix that a running sequence shares and has not computed yet.
    fn n_uncomputed(&self, ids: &[u32]) -> usize {
        let n = |sequence: &Sequence| n_common(&sequence.ids, ids).saturating_sub(sequence.n_seen);
        self.sequences.iter().map(n).max().unwrap_or(0)
    }

    /// Copies the longest computed prefix of `ids` to the rows that begin at `start`, and returns its length.
    fn copy_prefix(&mut self, ids: &[u32], start: usize) -> Result<usize> {
        let running = |sequence: &Sequence| (sequence.start, n_common(&sequence.ids[..sequence.n_seen], ids));
        let candidates = self.sequences.iter().map(running).chain(self.rows.longest_prefix(ids));
        match candidates.max_by_key(|(_, n)| *n) {
            Some((from, n)) if n >= MIN_SHARED => {
                self.pool.copy(from..from + n, start)?;
                Ok(n)
            }
            _ => Ok(0),
        }
    }

    /// Runs one forward, and sends its results.
    fn step(&mut self) -> Result<()> {
        let parts = self.parts();
        if parts.is_empty() {
            return Ok(());
        }
        let appends: Vec<AppendTokens> = parts.iter().map(|part| self.sequences[part.sequence].append(part)).collect();
        let append = self.pool.append(&appends)?;
        let mut rows = Vec::new();
        for (part, last) in parts.iter().zip(append.last_rows()) {
            rows.extend((0..part.n_logits as u32).rev().map(|before| last - before));
        }
        // A forward has at least one row of logits.
        let first_row = append.last_rows()[..1].to_vec();
        let n_rows = rows.len();
        let logits = self.lm.engine().logits(append.tokens(), if n_rows == 0 { &first_row } else { &rows }, &append)?;
        let logits = Logits::read(&logits.narrow(0, 0, n_rows.max(1))?, self.needs_logits(&parts))?;
        let mut first = 0;
        for part in &parts {
            let sequence = &mut self.sequences[part.sequence];
            if let Err(error) = sequence.advance(part, &logits, first, self.lm) {
                sequence.fail(error);
            }
            first += part.n_logits;
        }
        Ok(())
    }

    /// Divides the tokens of a forward between the sequences; those that generate are first.
    fn parts(&self) -> Vec<SequencePart> {
        let mut order: Vec<usize> = (0..self.sequences.len()).collect();
        order.sort_by_key(|i| self.sequences[*i].n_fresh());
        let mut n_left = self.limits.n_tokens.max(order.len());
        let n_vocab = self.lm.engine().model().config().vocab_size();
        let max_scored = (MAX_PROMPT_LOGITS_BYTES / (n_vocab * size_of::<f32>())).max(1);
        let mut parts = Vec::new();
        for sequence in order {
            let part = self.sequences[sequence].part(sequence, n_left, max_scored);
            n_left -= part.n_tokens;
            if part.n_tokens > 0 {
                parts.push(part);
            }
        }
        parts
    }

    /// Returns true if a sequence samples, or returns log-probabilities.
    fn needs_logits(&self, parts: &[SequencePart]) -> bool {
        parts.iter().filter(|part| part.n_logits > 0).any(|part| {
            let Sequence { job, sampler, .. } = &self.sequences[part.sequence];
            job.logprobs.is_some() || !sampler.is_argmax()
        })
    }

    /// Ends sequences, and keeps their computed tokens.
    fn end_where(&mut self, ends: impl Fn(&Sequence) -> bool) {
        let (ended, running) = std::mem::take(&mut self.sequences).into_iter().partition(ends);
        self.sequences = running;
        let ended: Vec<Sequence> = ended;
        for Sequence { start, mut ids, n_seen, .. } in ended {
            ids.truncate(n_seen);
            self.rows.keep(start, ids);
        }
    }
}

/// Logits of a forward: whole rows, or the most probable token of each.
struct Logits {
    rows_nv: Option<Vec<Vec<f32>>>,
    argmax_n: Vec<u32>,
    is_finite_n: Vec<bool>,
}

impl Logits {
    fn read(logits_nv: &Tensor, whole: bool) -> Result<Self> {
        // A single non-finite value makes the sum non-finite, and only the sums are copied from the GPU.
        let sums = to_host(&logits_nv.sum(D::Minus1)?)?.to_vec1::<f32>()?;
        Ok(Self {
            rows_nv: if whole { Some(to_host(logits_nv)?.to_vec2()?) } else { None },
            argmax_n: to_host(&logits_nv.argmax(D::Minus1)?)?.to_vec1()?,
            is_finite_n: sums.into_iter().map(f32::is_finite).collect(),
        })
    }

    /// Returns a row of logits, which [`Worker::needs_logits`] has requested.
    fn row(&self, row: usize) -> &[f32] {
        self.rows_nv.as_ref().map_or(&[], |rows| &rows[row])
    }
}

impl<'m> Sequence<'m> {
    fn new(job: GenerationJob, start: usize, n_seen: usize, lm: &'m Lm) -> Self {
        let mut sampler = TokenSampler::new(job.sampling, job.seed);
        sampler.observe(&job.prompt);
        let text = StoppableText::new(lm.tokenizer(), &job.stop);
        let ids = job.prompt.to_vec();
        Self { job, ids, start, n_seen, sampler, text, prompt_logprobs: Vec::new(), has_ended: false }
    }

    /// Returns the number of tokens that are not cached.
    fn n_fresh(&self) -> usize {
        self.ids.len() - self.n_seen
    }

    /// Returns true while the prompt's tokens are being scored.
    fn scores_prompt(&self) -> bool {
        self.job.logprobs.is_some_and(|logprobs| logprobs.of_prompt) && self.n_seen < self.job.prompt.len()
    }

    /// Returns the sequence's part of the next forward, of at most `n_left` tokens.
    fn part(&self, sequence: usize, n_left: usize, max_scored: usize) -> SequencePart {
        let n_tokens = self.n_fresh().min(n_left);
        if self.scores_prompt() {
            let n_tokens = n_tokens.min(max_scored);
            return SequencePart { sequence, n_tokens, n_logits: n_tokens };
        }
        let n_logits = usize::from(n_tokens > 0 && n_tokens == self.n_fresh());
        SequencePart { sequence, n_tokens, n_logits }
    }

    fn append(&self, part: &SequencePart) -> AppendTokens {
        let ids = self.ids[self.n_seen..self.n_seen + part.n_tokens].to_vec();
        AppendTokens { start: self.start, n_seen: self.n_seen, ids }
    }

    /// Takes the results of a forward. The logits of its part begin at row `first`.
    fn advance(&mut self, part: &SequencePart, logits: &Logits, first: usize, lm: &Lm) -> Result<(), ApiError> {
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
            self.job.send(GenerationEvent::Prompt(std::mem::take(&mut self.prompt_logprobs)));
        }
        if self.job.n_max == 0 {
            return self.end(GenerationEnd::Length);
        }
        self.generate(rows.end - 1, logits, lm)
    }

    /// Scores the prompt's tokens after the tokens of a forward.
    fn score_prompt(&mut self, rows: std::ops::Range<usize>, logits: &Logits, lm: &Lm) -> Result<(), ApiError> {
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
        let token = match self.sampler.is_argmax() {
            true => logits.argmax_n[row],
            false => self.sampler.sample(&mut logits.row(row).to_vec()),
        };
        let previous = self.ids[self.ids.len() - 1];
        let score = |LogprobOptions { n_top, .. }: LogprobOptions| {
            token_logprobs(lm.tokenizer(), logits.row(row), previous, token, n_top)
        };
        let logprobs = self.job.logprobs.map(score).transpose().map_err(|error| internal(error.into()))?;
        let is_stop = self.job.stop_ids.contains(&token);
        let text = match is_stop {
            true => String::new(),
            false => self.text.push(token).map_err(|error| internal(error.into()))?,
        };
        self.job.send(GenerationEvent::Token { text, logprobs });
        self.ids.push(token);
        if is_stop || self.text.has_stopped() {
            return self.end(GenerationEnd::Stop);
        }
        match self.ids.len() - self.job.prompt.len() == self.job.n_max {
            true => self.end(GenerationEnd::Length),
            false => Ok(()),
        }
    }

    fn end(&mut self, reason: GenerationEnd) -> Result<(), ApiError> {
        let text = self.text.finish().map_err(|error| internal(error.into()))?;
        let reason = if self.text.has_stopped() { GenerationEnd::Stop } else { reason };
        self.job.send(GenerationEvent::End { text, reason });
        self.has_ended = true;
        Ok(())
    }

    fn fail(&mut self, error: ApiError) {
        self.job.send(GenerationEvent::Failed(error));
        self.has_ended = true;
    }
}

impl GenerationJob {
    /// Sends an event. A closed receiver cancels the job before the next forward.
    fn send(&self, event: GenerationEvent) {
        let _ = self.events.send((self.choice, event));
    }
}

fn internal(error: anyhow::Error) -> ApiError {
    ApiError::internal(&error)
}
