//! The model's worker: continuous batching of all running jobs on one thread.
//!
//! Each step is one forward of the new tokens of all sequences: the last token of those that generate, and a part of
//! the prompts of the others.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::Result;
use candlewick_parallel::{AppendTokens, KvCachePool};
use rayon::prelude::*;
use tokio::sync::mpsc;

use super::api_error::ApiError;
use super::job::{GenerationEnd, GenerationEvent, GenerationJob};
use super::metrics::WorkerGauges;
use super::prefix_rows::{PrefixKey, PrefixRows, n_common};
use super::sequence::{Logits, MIN_GROWTH, Sequence, SequencePart};
use crate::lm::Lm;

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
    /// A model and adapters on it, with the same layers.
    models: &'m [Lm],
    /// Model of the last forward.
    turn: usize,
    limits: WorkerLimits,
    pool: KvCachePool,
    rows: PrefixRows,
    sequences: Vec<Sequence<'m>>,
    /// Sequences that gave their rows to earlier ones, the earliest last.
    preempted: Vec<Sequence<'m>>,
    /// The next job, if the KV cache has no space for it yet.
    next: Option<GenerationJob>,
    gauges: Arc<WorkerGauges>,
}

/// Shortest prefix worth a copy.
const MIN_SHARED: usize = 8;

/// Memory of the logits of a prompt's tokens in a forward.
const MAX_PROMPT_LOGITS_BYTES: usize = 128 << 20;

impl<'m> Worker<'m> {
    /// Creates a worker without jobs.
    pub(super) fn new(models: &'m [Lm], limits: WorkerLimits, gauges: Arc<WorkerGauges>) -> Self {
        let pool = KvCachePool::new(models[0].engine().model().n_blocks(), limits.pool_rows);
        let rows = PrefixRows::new(limits.pool_rows);
        let (sequences, preempted) = (Vec::new(), Vec::new());
        Self { models, turn: 0, limits, pool, rows, sequences, preempted, next: None, gauges }
    }

    /// Runs the jobs of the queue until it is closed and all have ended.
    pub(super) fn run(mut self, mut queue: mpsc::Receiver<GenerationJob>) {
        loop {
            self.end_where(|sequence| sequence.job.events.is_closed());
            self.preempted.retain(|sequence| !sequence.job.events.is_closed());
            self.set_gauges();
            if !self.admit(&mut queue) {
                return;
            }
            self.set_gauges();
            if let Err(error) = self.reserve().and_then(|()| self.step()) {
                let error = ApiError::internal(&error);
                self.sequences.iter_mut().for_each(|sequence| sequence.fail(error.clone()));
            }
            self.end_where(|sequence| sequence.has_ended);
        }
    }

    fn set_gauges(&self) {
        self.gauges.n_running.store(self.sequences.len(), Ordering::Relaxed);
        let n_waiting = self.preempted.len() + usize::from(self.next.is_some());
        self.gauges.n_waiting.store(n_waiting, Ordering::Relaxed);
    }

    /// Starts jobs while there is space. Waits for one if no sequence is running; returns false if there are no more.
    fn admit(&mut self, queue: &mut mpsc::Receiver<GenerationJob>) -> bool {
        while self.sequences.len() < self.limits.n_sequences {
            if let Some(sequence) = self.preempted.pop() {
                match self.resume(sequence) {
                    None => continue,
                    Some(waiting) => {
                        self.preempted.push(waiting);
                        break;
                    }
                }
            }
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
        let key = job.prefix_key(&self.models[job.model]);
        if self.n_uncomputed(key, reusable) >= MIN_SHARED {
            return Some(job);
        }
        let n_rows = job.prompt.len() + job.n_max.min(MIN_GROWTH);
        let Some(start) = self.rows.allocate(n_rows) else { return Some(job) };
        let n_seen = match self.copy_prefix(key, reusable, start) {
            Ok(n_seen) => n_seen,
            Err(error) => {
                job.send(GenerationEvent::Failed(ApiError::internal(&error)));
                self.rows.free(start);
                return None;
            }
        };
        let lm = &self.models[job.model];
        self.sequences.push(Sequence::new(job, start..start + n_rows, n_seen, lm));
        None
    }

    /// Continues a preempted sequence, or returns it if it must wait for space. Tokens that are no longer cached are
    /// computed again.
    fn resume(&mut self, mut sequence: Sequence<'m>) -> Option<Sequence<'m>> {
        let n_rows = sequence.n_wanted();
        let Some(start) = self.rows.allocate(n_rows) else { return Some(sequence) };
        (sequence.start, sequence.n_rows) = (start, n_rows);
        let reusable = if sequence.scores_prompt() { &[][..] } else { &sequence.ids[..sequence.ids.len() - 1] };
        match self.copy_prefix(sequence.key, reusable, start) {
            Ok(n_seen) => {
                sequence.n_seen = n_seen;
                self.sequences.push(sequence);
            }
            Err(error) => {
                sequence.fail(ApiError::internal(&error));
                self.rows.free(start);
            }
        }
        None
    }

    /// Reserves rows for the new token of each sequence. If the KV cache is full, the newest sequences give their rows to
    /// the earlier ones.
    fn reserve(&mut self) -> Result<()> {
        let mut at = 0;
        while at < self.sequences.len() {
            if self.sequences[at].ids.len() <= self.sequences[at].n_rows || self.grow(at)? {
                at += 1;
            } else if let Some(newest) = self.sequences.pop() {
                self.preempt(newest);
            }
        }
        Ok(())
    }

    /// Extends the rows of a sequence, in place or by a copy. Returns false if there is no space.
    fn grow(&mut self, at: usize) -> Result<bool> {
        let Sequence { start, n_seen, .. } = self.sequences[at];
        let n_rows = self.sequences[at].n_wanted();
        if self.rows.grow(start, n_rows) {
            self.sequences[at].n_rows = n_rows;
            return Ok(true);
        }
        let Some(to) = self.rows.allocate(n_rows) else { return Ok(false) };
        self.pool.copy(start..start + n_seen, to)?;
        self.rows.free(start);
        (self.sequences[at].start, self.sequences[at].n_rows) = (to, n_rows);
        Ok(true)
    }

    /// Takes the rows of a sequence. Its computed tokens stay cached until their rows are needed.
    fn preempt(&mut self, mut sequence: Sequence<'m>) {
        self.rows.keep(sequence.key, sequence.start, sequence.ids[..sequence.n_seen].to_vec());
        sequence.n_seen = 0;
        sequence.prompt_logprobs.clear();
        self.preempted.push(sequence);
    }

    /// Returns the number of tokens of the prefix that a running sequence of this key shares and has not computed yet.
    fn n_uncomputed(&self, key: PrefixKey, ids: &[u32]) -> usize {
        let n = |sequence: &Sequence| n_common(&sequence.ids, ids).saturating_sub(sequence.n_seen);
        self.sequences.iter().filter(|sequence| sequence.key == key).map(n).max().unwrap_or(0)
    }

    /// Copies the longest computed prefix of `ids` with this key to the rows that begin at `start`, and returns its length.
    fn copy_prefix(&mut self, key: PrefixKey, ids: &[u32], start: usize) -> Result<usize> {
        let running = |sequence: &Sequence| (sequence.start, n_common(&sequence.ids[..sequence.n_seen], ids));
        let candidates = self.sequences.iter().filter(|sequence| sequence.key == key).map(running);
        let candidates = candidates.chain(self.rows.longest_prefix(key, ids));
        match candidates.max_by_key(|(_, n)| *n) {
            Some((from, n)) if n >= MIN_SHARED => {
                self.pool.copy(from..from + n, start)?;
                Ok(n)
            }
            _ => Ok(0),
        }
    }

    /// Runs one forward of one model, and sends its results. The models take turns.
    fn step(&mut self) -> Result<()> {
        let Some(model) = self.next_model() else { return Ok(()) };
        let lm = &self.models[model];
        self.turn = model;
        let parts = self.parts(model);
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
        let logits = lm.engine().logits(append.tokens(), if n_rows == 0 { &first_row } else { &rows }, &append)?;
        let logits = Logits::read(&logits.narrow(0, 0, n_rows.max(1))?, self.needs_logits(&parts))?;
        self.prepare_masks(&parts);
        let mut first = 0;
        for part in &parts {
            let sequence = &mut self.sequences[part.sequence];
            if let Err(error) = sequence.advance(part, &logits, first, lm) {
                sequence.fail(error);
            }
            first += part.n_logits;
        }
        Ok(())
    }

    /// Computes the masks of all sequences in parallel.
    fn prepare_masks(&mut self, parts: &[SequencePart]) {
        let with_part = |(index, sequence)| Some((sequence, parts.iter().find(|part| part.sequence == index)?));
        let constrained = |(_, sequence): &(usize, &mut Sequence<'m>)| sequence.job.constraint.is_some();
        let sequences = self.sequences.iter_mut().enumerate().filter(constrained).filter_map(with_part);
        let mut sequences: Vec<(&mut Sequence<'m>, &SequencePart)> = sequences.collect();
        sequences.par_iter_mut().for_each(|(sequence, part)| sequence.prepare_mask(part));
    }

    /// Returns the next model with a running sequence, after that of the last forward.
    fn next_model(&self) -> Option<usize> {
        let n = self.models.len();
        let is_running = |model: &usize| self.sequences.iter().any(|sequence| sequence.job.model == *model);
        (1..=n).map(|after| (self.turn + after) % n).find(is_running)
    }

    /// Divides the tokens of a forward between the sequences of a model; those that generate are first.
    fn parts(&self, model: usize) -> Vec<SequencePart> {
        let is_of_model = |i: &usize| self.sequences[*i].job.model == model;
        let mut order: Vec<usize> = (0..self.sequences.len()).filter(is_of_model).collect();
        order.sort_by_key(|i| self.sequences[*i].n_fresh());
        let mut n_left = self.limits.n_tokens.max(order.len());
        let n_vocab = self.models[model].engine().model().config().vocab_size();
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
            let sequence = &self.sequences[part.sequence];
            sequence.job.logprobs.is_some() || !sequence.is_argmax()
        })
    }

    /// Ends sequences, and keeps their computed tokens.
    fn end_where(&mut self, ends: impl Fn(&Sequence) -> bool) {
        let (ended, running) = std::mem::take(&mut self.sequences).into_iter().partition(ends);
        self.sequences = running;
        let ended: Vec<Sequence> = ended;
        for Sequence { key, start, mut ids, n_seen, .. } in ended {
            ids.truncate(n_seen);
            self.rows.keep(key, start, ids);
        }
    }
}
