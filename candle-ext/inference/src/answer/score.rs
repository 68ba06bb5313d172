//! Scoring of token sequences: a prefix tree in batches, each shared prefix once.

use std::ops::Range;

use anyhow::{Context, Result, bail};
use candlewick_model::{LengthClass, Model};
use candlewick_parallel::{Engine, Prefix, PrefixKvCache, ScoreQuery, TokenRun};

use super::batch::BatchLimits;
use super::prefix_tree::{PrefixNode, PrefixTree};
use super::rolling::ScoredSequence;
use candlewick_runtime::exit::ExitCode;

/// Log-likelihood of one sequence's targets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SequenceScore {
    /// Sum of the targets' log-probabilities, in nats.
    pub logprob: f64,
    /// True if greedy decoding would generate the targets.
    pub is_greedy: bool,
}

/// Plan of sequences to score, of which this rank runs some.
///
/// All sequences shape the prefix tree, so the bits of a score do not depend on the number of ranks or on cached
/// responses.
pub struct ScoringPlan<'s> {
    scored: &'s [ScoredSequence],
    classes: Vec<LengthClass>,
    tree: PrefixTree,
}

/// A query for token `id` of `sequence`, after the token at `offset` of its node.
struct TargetQuery {
    sequence: usize,
    offset: usize,
    id: u32,
}

impl<'s> ScoringPlan<'s> {
    /// Plans the scoring of all sequences with `model`.
    pub fn new(scored: &'s [ScoredSequence], model: &Model) -> Self {
        let seen: Vec<&[u32]> = scored.iter().map(ScoredSequence::seen).collect();
        let classes: Vec<LengthClass> = seen.iter().map(|seen| model.length_class(seen.len())).collect();
        let tree = PrefixTree::new(&seen, &classes);
        Self { scored, classes, tree }
    }

    /// Returns the order in which sequences are scored.
    pub fn order(&self) -> &[usize] {
        &self.tree.order
    }

    /// Returns each sequence's cost in the order of [`ScoringPlan::order`]: tokens not shared with earlier ones.
    pub fn costs(&self) -> Vec<usize> {
        let mut is_paid = vec![false; self.tree.nodes.len()];
        let mut cost_of = |sequence: &usize| {
            let new = self.tree.path(*sequence).into_iter().filter(|node| {
                let is_new = !is_paid[*node];
                is_paid[*node] = true;
                is_new
            });
            let n_tokens: usize = new.map(|node| self.tree.nodes[node].end - self.tree.nodes[node].start).sum();
            n_tokens + self.scored[*sequence].n_targets
        };
        self.tree.order.iter().map(&mut cost_of).collect()
    }

    /// Scores the sequences `wanted`, and passes on the results of each batch.
    ///
    /// `go_on` is called before each forward; its error ends the run.
    pub fn run(
        &self,
        engine: &Engine,
        limits: &BatchLimits,
        wanted: &[usize],
        go_on: impl Fn() -> Result<()>,
        mut done: impl FnMut(Vec<(usize, SequenceScore)>) -> Result<()>,
    ) -> Result<()> {
        let mut questions = self.questions(wanted);
        let nodes: Vec<usize> = self.needed(wanted);
        let mut scores = vec![SequenceScore { logprob: 0.0, is_greedy: true }; self.scored.len()];
        let mut n_open: Vec<usize> = self.scored.iter().map(|scored| scored.n_targets).collect();
        let mut path = PrefixKvCache::new(engine.model().n_blocks());
        let batches = self.batches(&nodes, limits);
        for (i, batch) in batches.iter().enumerate() {
            go_on()?;
            let next = batches.get(i + 1).map(|batch| nodes[batch.start]);
            let asked: Vec<Vec<TargetQuery>> =
                nodes[batch.clone()].iter().map(|node| std::mem::take(&mut questions[*node])).collect();
            let mut finished = Vec::new();
            let answers = self.forward(engine, &mut path, &nodes[batch.clone()], next, &asked)?;
            for (TargetQuery { sequence, .. }, (logprob, is_greedy)) in asked.iter().flatten().zip(answers) {
                let score = &mut scores[*sequence];
                score.logprob += f64::from(logprob);
                score.is_greedy &= is_greedy;
                n_open[*sequence] -= 1;
                if n_open[*sequence] == 0 {
                    finished.push((*sequence, *score));
                }
            }
            done(finished)?;
        }
        Ok(())
    }

    /// Returns the nodes on the paths of these sequences, in tree order.
    fn needed(&self, wanted: &[usize]) -> Vec<usize> {
        let mut is_needed = vec![false; self.tree.nodes.len()];
        wanted.iter().flat_map(|sequence| self.tree.path(*sequence)).for_each(|node| is_needed[node] = true);
        (0..is_needed.len()).filter(|node| is_needed[*node]).collect()
    }

    /// Returns the queries of each node. A sequence's targets are in order, because its nodes are.
    fn questions(&self, wanted: &[usize]) -> Vec<Vec<TargetQuery>> {
        let mut questions: Vec<Vec<TargetQuery>> = self.tree.nodes.iter().map(|_| Vec::new()).collect();
        for &sequence in wanted {
            let scored = &self.scored[sequence];
            let mut on_path = self.tree.path(sequence).into_iter().peekable();
            for (row, &id) in (scored.first_row()..).zip(scored.targets()) {
                while on_path.next_if(|node| self.tree.nodes[*node].end <= row).is_some() {}
                if let Some(&node) = on_path.peek() {
                    questions[node].push(TargetQuery { sequence, offset: row - self.tree.nodes[node].start, id });
                }
            }
        }
        questions
    }

    /// Splits the nodes into batches within the limits.
    fn batches(&self, nodes: &[usize], limits: &BatchLimits) -> Vec<Range<usize>> {
        let mut batches = Vec::new();
        let mut batch = 0..0;
        let mut load = limits.empty();
        for (i, node) in nodes.iter().enumerate() {
            let PrefixNode { start, end, .. } = self.tree.nodes[*node];
            if !load.add(end - start, end) {
                batches.push(std::mem::replace(&mut batch, i..i));
                load = limits.empty();
                load.add(end - start, end);
            }
            batch.end = i + 1;
        }
        batches.push(batch);
        batches.retain(|batch| !batch.is_empty());
        batches
    }

    /// Runs a batch of nodes and answers their queries.
    ///
    /// Parents are in the batch or on the cached path. Afterwards the known part of `next`'s path is cached.
    fn forward(
        &self,
        engine: &Engine,
        path: &mut PrefixKvCache,
        batch: &[usize],
        next: Option<usize>,
        asked: &[Vec<TargetQuery>],
    ) -> Result<Vec<(f32, bool)>> {
        let after = |node: usize| match self.tree.nodes[node].parent {
            None => Prefix::Cached(0),
            Some(parent) => match batch.binary_search(&parent) {
                Ok(run) => Prefix::Run(run),
                Err(_) => Prefix::Cached(self.tree.nodes[parent].end),
            },
        };
        let run = |node: &usize| {
            let PrefixNode { sequence, start, end, .. } = self.tree.nodes[*node];
            let ids = &self.scored[sequence].ids[start..end];
            TokenRun { prefix: after(*node), ids, class: self.classes[sequence] }
        };
        let runs: Vec<TokenRun> = batch.iter().map(run).collect();
        let mut questions = Vec::new();
        let mut first_row = 0;
        for (run, asked) in runs.iter().zip(asked) {
            let ask =
                |question: &TargetQuery| ScoreQuery { row: (first_row + question.offset) as u32, id: question.id };
            questions.extend(asked.iter().map(ask));
            first_row += run.ids.len();
        }
        let mut compute = || {
            let branches = path.plan_batch(&runs, next.map_or(Prefix::Cached(0), after), engine.device())?;
            engine.token_scores(branches.tokens(), &questions, &branches)
        };
        let scores = compute().context("failed to score a batch")?;
        if let Some(bad) = scores.logprobs.iter().find(|logprob| !logprob.is_finite()) {
            let error = anyhow::anyhow!("failed to score a text: the model gives a token the log-probability {bad}");
            return Err(error.context(ExitCode::NonFinite));
        }
        if scores.logprobs.len() != questions.len() {
            bail!("failed to score a batch: {} answers to {} questions", scores.logprobs.len(), questions.len());
        }
        Ok(scores.logprobs.into_iter().zip(scores.is_greedy).collect())
    }
}
