//! Continuous batching: a finished sequence is replaced by the next prompt.

use std::collections::VecDeque;
use std::mem::take;

use anyhow::{Context, Result};
use candle_core::{D, Tensor};
use candlewick_model::{LengthClass, Model};
use candlewick_ops::to_host;
use candlewick_parallel::{AppendTokens, Engine, KvCachePool, RowAllocator};
use candlewick_text::tokenizer::Tokenizer;

use super::batch::BatchLimits;
use super::prefix_tree::{PrefixNode, PrefixTree};
use super::stop::StopCriteria;
use crate::generate::{check_finite, length_class};
use crate::sampler::TokenSampler;

/// A generation request as tokens.
pub struct GenerationRequest {
    /// Prompt tokens, at least one.
    pub ids: Vec<u32>,
    /// Maximum number of new tokens.
    pub n_max: usize,
    /// Stop criteria.
    pub stop: StopCriteria,
    /// Sampler of the next token.
    pub sampler: TokenSampler,
}

/// Plan of a set of generation requests, of which this rank runs some.
pub struct GenerationPlan<'p> {
    prompts: &'p [GenerationRequest],
    classes: Vec<LengthClass>,
    /// Prefix tree of all prompts without their last tokens, so that each prompt computes at least one token.
    tree: PrefixTree,
    /// True for each tree node that several prompts share.
    is_shared: Vec<bool>,
}

impl<'p> GenerationPlan<'p> {
    /// Plans all prompts for `model`.
    pub fn new(prompts: &'p [GenerationRequest], model: &Model) -> Self {
        let beginnings: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt.ids[..prompt.ids.len() - 1]).collect();
        let class = |prompt: &GenerationRequest| length_class(model, prompt.ids.len(), prompt.n_max);
        let classes: Vec<LengthClass> = prompts.iter().map(class).collect();
        let tree = PrefixTree::new(&beginnings, &classes);
        let mut n_users = vec![0; tree.nodes.len()];
        (0..prompts.len()).flat_map(|prompt| tree.path(prompt)).for_each(|node| n_users[node] += 1);
        Self { prompts, classes, tree, is_shared: n_users.into_iter().map(|n| n > 1).collect() }
    }

    /// Returns the order in which prompts are generated.
    pub fn order(&self) -> &[usize] {
        &self.tree.order
    }

    /// Returns each prompt's cost in the order of [`GenerationPlan::order`]: its unshared tokens plus `n_max`.
    pub fn costs(&self) -> Vec<usize> {
        let cost = |i: &usize| self.prompts[*i].ids.len() - self.n_shared(*i) + self.prompts[*i].n_max;
        self.tree.order.iter().map(cost).collect()
    }

    fn n_shared(&self, prompt: usize) -> usize {
        self.shared(prompt).last().map_or(0, |node| self.tree.nodes[*node].end)
    }

    /// Returns the nodes that a prompt shares with others, from the root.
    fn shared(&self, prompt: usize) -> Vec<usize> {
        self.tree.path(prompt).into_iter().filter(|node| self.is_shared[*node]).collect()
    }

    /// Generates completions of the prompts `wanted` (in plan order), and passes each to `on_text` when it is complete.
    ///
    /// `go_on` is called before each forward; its error ends the run.
    pub fn run(
        &self,
        engine: &Engine,
        tokenizer: &Tokenizer,
        limits: &BatchLimits,
        wanted: &[usize],
        go_on: impl Fn() -> Result<()>,
        mut done: impl FnMut(usize, String) -> Result<()>,
    ) -> Result<()> {
        let (nothing, wanted): (Vec<usize>, Vec<usize>) = wanted.iter().partition(|i| self.prompts[**i].n_max == 0);
        nothing.into_iter().try_for_each(|prompt| done(prompt, String::new()))?;
        let pool_rows = self.pool_rows(&wanted, limits);
        let mut state = State {
            plan: self,
            engine,
            tokenizer,
            pool: KvCachePool::new(engine.model().n_blocks(), pool_rows),
            allocator: RowAllocator::new(pool_rows),
            beginnings: Vec::new(),
            new_beginning: None,
            texts: Vec::new(),
            waiting: wanted.into_iter().collect(),
        };
        while !state.texts.is_empty() || !state.waiting.is_empty() {
            go_on()?;
            state.let_in(limits)?;
            state.step().context("failed to generate")?;
            for text in state.take_ended() {
                done(text.prompt, self.prompts[text.prompt].stop.text(&text.generated, tokenizer)?)?;
            }
        }
        Ok(())
    }

    /// Returns the size of the KV cache pool: the concurrent sequences, and at least the largest one with its shared
    /// prefix.
    fn pool_rows(&self, wanted: &[usize], limits: &BatchLimits) -> usize {
        let own = |i: &usize| self.prompts[*i].ids.len() + self.prompts[*i].n_max;
        let beginnings = |i: &usize| self.shared(*i).iter().map(|node| self.tree.nodes[*node].end).sum::<usize>();
        let largest = wanted.iter().map(|i| own(i) + beginnings(i)).max().unwrap_or(0);
        let mut sizes: Vec<usize> = wanted.iter().map(own).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let at_once: usize = sizes.iter().take(limits.n_texts).sum();
        (at_once + largest).min(limits.pool_rows.max(largest))
    }
}

/// A shared prefix in the KV cache pool.
struct Beginning {
    node: usize,
    start: usize,
}

/// A sequence that is being generated.
struct Text {
    prompt: usize,
    start: usize,
    /// Number of cached tokens.
    n_seen: usize,
    /// Tokens to compute next.
    fresh: Vec<u32>,
    generated: Vec<u32>,
    sampler: TokenSampler,
    has_ended: bool,
}

struct State<'s, 'p> {
    plan: &'s GenerationPlan<'p>,
    engine: &'s Engine,
    tokenizer: &'s Tokenizer,
    pool: KvCachePool,
    allocator: RowAllocator,
    /// Cached shared prefixes, each a continuation of the previous one.
    beginnings: Vec<Beginning>,
    /// The newest prefix, if it is not yet computed.
    new_beginning: Option<AppendTokens>,
    texts: Vec<Text>,
    waiting: VecDeque<usize>,
}

impl State<'_, '_> {
    /// Admits prompts while the cache has space, up to one whose shared prefix must be computed first.
    fn let_in(&mut self, limits: &BatchLimits) -> Result<()> {
        let mut n_fresh = self.texts.len();
        while self.texts.len() < limits.n_texts && n_fresh < limits.n_tokens {
            let Some(&prompt) = self.waiting.front() else { return Ok(()) };
            if !self.begin(prompt)? {
                let has_nothing_to_do = self.texts.is_empty() && self.new_beginning.is_none();
                if !has_nothing_to_do {
                    return Ok(());
                }
                // Cached prefixes block the next prompt; any prompt fits an empty pool.
                self.forget_beginnings(0);
                continue;
            }
            self.waiting.pop_front();
            n_fresh += self.texts.last().map_or(0, |text| text.fresh.len());
        }
        Ok(())
    }

    /// Starts a sequence if its shared prefix is cached and it fits; else starts computing the prefix, if that fits.
    fn begin(&mut self, prompt: usize) -> Result<bool> {
        let shared = self.plan.shared(prompt);
        let n_kept =
            self.beginnings.iter().zip(&shared).take_while(|(beginning, node)| beginning.node == **node).count();
        self.forget_beginnings(n_kept);
        let GenerationRequest { ids, n_max, sampler, .. } = &self.plan.prompts[prompt];
        if let Some(&node) = shared.get(n_kept) {
            let PrefixNode { start: n_seen, end, .. } = self.plan.tree.nodes[node];
            if let Some(start) = self.place(end, n_seen)? {
                self.beginnings.push(Beginning { node, start });
                let (ids, class) = (ids[n_seen..end].to_vec(), self.plan.classes[prompt]);
                self.new_beginning = Some(AppendTokens { start, n_seen, ids, class });
            }
            return Ok(false);
        }
        let n_seen = shared.last().map_or(0, |node| self.plan.tree.nodes[*node].end);
        let Some(start) = self.place(ids.len() + n_max, n_seen)? else { return Ok(false) };
        let (fresh, mut sampler) = (ids[n_seen..].to_vec(), sampler.clone());
        sampler.observe(ids);
        self.texts.push(Text { prompt, start, n_seen, fresh, generated: Vec::new(), sampler, has_ended: false });
        Ok(true)
    }

    /// Allocates `len` rows and copies the first `n_seen` from the newest prefix; `None` if they do not fit.
    fn place(&mut self, len: usize, n_seen: usize) -> Result<Option<usize>> {
        let Some(start) = self.allocator.allocate(len) else { return Ok(None) };
        if let Some(Beginning { start: from, .. }) = self.beginnings.last() {
            self.pool.copy(*from..from + n_seen, start)?;
        }
        Ok(Some(start))
    }

    fn forget_beginnings(&mut self, n_kept: usize) {
        self.beginnings.drain(n_kept..).for_each(|beginning| self.allocator.free(beginning.start));
    }

    /// Runs one decode step, together with the prefix that is being computed.
    fn step(&mut self) -> Result<()> {
        let classes = &self.plan.classes;
        let grow = |text: &mut Text| {
            let (ids, class) = (take(&mut text.fresh), classes[text.prompt]);
            AppendTokens { start: text.start, n_seen: text.n_seen, ids, class }
        };
        let mut sequences: Vec<AppendTokens> = self.texts.iter_mut().map(grow).collect();
        sequences.extend(self.new_beginning.take());
        let append = self.pool.append(&sequences)?;
        // The logits after the prefix are computed and ignored.
        let logits = self.engine.logits(append.tokens(), append.last_rows(), &append)?;
        if !self.texts.is_empty() {
            check_finite(&logits.narrow(0, 0, self.texts.len())?)?;
        }
        let tokens = choose(&mut self.texts, &logits)?;
        for ((text, growth), token) in self.texts.iter_mut().zip(&sequences).zip(tokens) {
            text.n_seen += growth.ids.len();
            text.generated.push(token);
            text.fresh = vec![token];
            let GenerationRequest { n_max, stop, .. } = &self.plan.prompts[text.prompt];
            text.has_ended = text.generated.len() == *n_max || stop.ends(&text.generated, self.tokenizer)?;
        }
        Ok(())
    }

    fn take_ended(&mut self) -> Vec<Text> {
        let (ended, going_on) = take(&mut self.texts).into_iter().partition(|text| text.has_ended);
        self.texts = going_on;
        let ended: Vec<Text> = ended;
        ended.iter().for_each(|text| self.allocator.free(text.start));
        ended
    }
}

/// Samples the next token of each sequence from the first rows of the logits.
fn choose(texts: &mut [Text], logits: &Tensor) -> Result<Vec<u32>> {
    if texts.iter().all(|text| text.sampler.is_argmax()) {
        return Ok(to_host(&logits.argmax(D::Minus1)?)?.to_vec1()?);
    }
    let rows = to_host(logits)?.to_vec2::<f32>()?;
    let choose = |(text, mut logits): (&mut Text, Vec<f32>)| text.sampler.sample(&mut logits);
    Ok(texts.iter_mut().zip(rows).map(choose).collect())
}
