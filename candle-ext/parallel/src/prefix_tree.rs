//! Runs of tokens that branch: what several continue is computed once. The `attend` seam of a forward over a prefix tree.
//!
//! p remembered tokens, t new ones, s keys of all runs, g key heads, k head dim

use std::iter;
use std::ops::Range;
use std::sync::Mutex;

use candle_core::{Device, Result, Tensor, bail};
use candlewick_model::{AttentionCall, ParallelOps};
use candlewick_ops::{Seqs, Weight, attention, embedding};

use crate::engine::PackedTokens;
use crate::kv_cache::lock;

/// What a run continues, and what is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefix {
    /// The first so many tokens of what was remembered; 0 is the beginning.
    Cached(usize),
    /// The end of this run of the same batch, which comes before.
    Run(usize),
}

/// PackedTokens that continue others.
#[derive(Clone, Copy, Debug)]
pub struct TokenRun<'a> {
    /// What is before them.
    pub prefix: Prefix,
    /// The tokens, at least one.
    pub ids: &'a [u32],
}

/// The keys and values of one path through the tree, kept from one batch to the next.
pub struct PrefixKvCache {
    blocks: Vec<Mutex<Option<[Tensor; 2]>>>,
    n_tokens: usize,
}

/// The parallel_ops of one batch's forward. The tokens of its runs are rows, one run after the other.
pub struct PrefixTreeAttention<'p> {
    path: &'p PrefixKvCache,
    tokens: PackedTokens,
    seqs: Seqs,
    /// Which of the p + t rows are the keys of the runs, u32 [s]; `None` if each run has its own and no more.
    keys: Option<Tensor>,
    /// Which of them are remembered, u32; `None` for nothing.
    kept: Option<Tensor>,
}

impl PrefixKvCache {
    /// Remembers nothing yet, of `n_blocks` blocks.
    pub fn new(n_blocks: usize) -> Self {
        Self { blocks: (0..n_blocks).map(|_| Mutex::default()).collect(), n_tokens: 0 }
    }

    /// Returns the number of tokens that are remembered.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Lays out a batch. Its forward, which has to follow, leaves the path up to `kept`.
    pub fn plan_batch(&mut self, runs: &[TokenRun], kept: Prefix, device: &Device) -> Result<PrefixTreeAttention<'_>> {
        let mut layout = BatchLayout::new(self.n_tokens);
        runs.iter().try_for_each(|run| layout.add(run))?;
        let kept = layout.rows(kept)?;
        // One token alone would take another way through the products, and round otherwise than among others.
        if layout.tokens.ids.len() == 1 {
            layout.add(&TokenRun { prefix: Prefix::Cached(0), ids: &[0] })?;
        }
        let n_kept = kept.iter().map(Range::len).sum();
        let keys = match runs.iter().all(|run| run.prefix == Prefix::Cached(0)) {
            true => None,
            false => Some(index(layout.paths.iter().flatten(), device)?),
        };
        let kept = (n_kept > 0).then(|| index(kept.iter(), device)).transpose()?;
        let seqs = Seqs::with_keys(layout.ends_q, layout.ends_k)?;
        self.n_tokens = n_kept;
        Ok(PrefixTreeAttention { path: self, tokens: layout.tokens, seqs, keys, kept })
    }
}

impl PrefixTreeAttention<'_> {
    /// Returns the tokens of all runs.
    pub fn tokens(&self) -> &PackedTokens {
        &self.tokens
    }
}

/// Where the runs of a batch lie among the remembered and the new rows.
struct BatchLayout {
    n_remembered: usize,
    tokens: PackedTokens,
    ends_q: Vec<usize>,
    ends_k: Vec<usize>,
    /// The rows from the beginning of each run's path to its end.
    paths: Vec<Vec<Range<usize>>>,
}

impl BatchLayout {
    fn new(n_remembered: usize) -> Self {
        let (ends_q, ends_k) = (vec![0], vec![0]);
        Self { n_remembered, tokens: PackedTokens::default(), ends_q, ends_k, paths: Vec::new() }
    }

    fn add(&mut self, run: &TokenRun) -> Result<()> {
        let mut path = self.rows(run.prefix)?;
        let n_before: usize = path.iter().map(Range::len).sum();
        let first = self.n_remembered + self.tokens.ids.len();
        path.push(first..first + run.ids.len());
        self.tokens.ids.extend(run.ids);
        self.tokens.positions.extend((n_before..n_before + run.ids.len()).map(|position| position as u32));
        self.ends_q.push(self.tokens.ids.len());
        self.ends_k.push(self.ends_k[self.ends_k.len() - 1] + n_before + run.ids.len());
        self.paths.push(path);
        Ok(())
    }

    fn rows(&self, until: Prefix) -> Result<Vec<Range<usize>>> {
        match until {
            Prefix::Cached(0) => Ok(Vec::new()),
            Prefix::Cached(n) if n <= self.n_remembered => Ok(iter::once(0..n).collect()),
            Prefix::Cached(n) => bail!("branch after {n} remembered tokens: there are {}", self.n_remembered),
            Prefix::Run(run_idx) => match self.paths.get(run_idx) {
                Some(path) => Ok(path.clone()),
                None => bail!("branch after run {run_idx}: {} runs are before", self.paths.len()),
            },
        }
    }
}

impl ParallelOps for PrefixTreeAttention<'_> {
    /// Attends from each run to its whole path.
    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        let AttentionCall { layer_idx: block_idx, q: q_thk, k: k_tgk, v: v_tgk, spec, .. } = *call;
        let mut remembered = lock(&self.path.blocks[block_idx]);
        let [k, v] = match &*remembered {
            Some([k, v]) => [Tensor::cat(&[k, k_tgk], 0)?, Tensor::cat(&[v, v_tgk], 0)?],
            None => [k_tgk.clone(), v_tgk.clone()],
        };
        let out = match &self.keys {
            None => attention(q_thk, k_tgk, v_tgk, &self.seqs, spec)?,
            Some(keys) => attention(q_thk, &gather(&k, keys)?, &gather(&v, keys)?, &self.seqs, spec)?,
        };
        *remembered = match &self.kept {
            None => None,
            Some(rows) => Some([gather(&k, rows)?, gather(&v, rows)?]),
        };
        Ok(out)
    }
}

fn index<'r>(ranges: impl Iterator<Item = &'r Range<usize>>, device: &Device) -> Result<Tensor> {
    let rows: Vec<u32> = ranges.flat_map(|range| range.start as u32..range.end as u32).collect();
    Tensor::new(rows, device)
}

/// Rows of a tensor [.., g, k].
fn gather(x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    let (n, g, k) = x.dims3()?;
    let table = Weight::frozen(x.contiguous()?.reshape((n, g * k))?);
    embedding(rows, &table, None)?.reshape((rows.elem_count(), g, k))
}
