//! Attention over a prefix tree: shared prefixes of several sequences are computed once.
//!
//! Dimensions: p cached tokens, t new tokens, s keys of all runs, g KV heads, k head size

use std::iter;
use std::ops::Range;
use std::sync::Mutex;

use candle_core::{Device, Result, Tensor, bail};
use candlewick_model::{AttentionCall, LengthClass, SequenceMixing};
use candlewick_ops::{CuSeqlens, Weight, attention, embedding};

use crate::engine::PackedTokens;
use crate::kv_cache::lock;

/// Prefix of a run of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefix {
    /// The first n cached tokens; 0 for the beginning of a sequence.
    Cached(usize),
    /// The path that ends with an earlier run of the batch, given by its index.
    Run(usize),
}

/// A run of tokens that continues a prefix.
#[derive(Clone, Copy, Debug)]
pub struct TokenRun<'a> {
    /// Prefix of the run.
    pub prefix: Prefix,
    /// The tokens, at least one.
    pub ids: &'a [u32],
    /// RoPE frequencies of the sequences; those of the prefix.
    pub class: LengthClass,
}

/// KV cache of one path through a prefix tree, kept from batch to batch.
pub struct PrefixKvCache {
    blocks: Vec<Mutex<Option<[Tensor; 2]>>>,
    n_tokens: usize,
}

/// Attention of one batch over a prefix tree. The rows of its runs are adjacent.
pub struct PrefixTreeAttention<'p> {
    path: &'p PrefixKvCache,
    tokens: PackedTokens,
    seqs: CuSeqlens,
    /// Indices of the keys of all runs among the p + t rows, u32 [s]; `None` if each run attends to itself alone.
    keys: Option<Tensor>,
    /// Indices of the rows to keep cached, u32; `None` for none.
    kept: Option<Tensor>,
}

impl PrefixKvCache {
    /// Creates an empty cache for `n_blocks` layers.
    pub fn new(n_blocks: usize) -> Self {
        Self { blocks: (0..n_blocks).map(|_| Mutex::default()).collect(), n_tokens: 0 }
    }

    /// Returns the number of cached tokens.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Plans a batch. Its forward must follow; afterwards the path up to `kept` is cached.
    pub fn plan_batch(&mut self, runs: &[TokenRun], kept: Prefix, device: &Device) -> Result<PrefixTreeAttention<'_>> {
        let mut layout = BatchLayout::new(self.n_tokens);
        runs.iter().try_for_each(|run| layout.add(run))?;
        let kept = layout.rows(kept)?;
        // A GEMM of one row takes another kernel and rounds differently, so a padding token is added.
        if layout.tokens.ids.len() == 1 {
            layout.add(&TokenRun { prefix: Prefix::Cached(0), ids: &[0], class: LengthClass::default() })?;
        }
        let n_kept = kept.iter().map(Range::len).sum();
        let keys = match runs.iter().all(|run| run.prefix == Prefix::Cached(0)) {
            true => None,
            false => Some(index(layout.paths.iter().flatten(), device)?),
        };
        let kept = (n_kept > 0).then(|| index(kept.iter(), device)).transpose()?;
        let seqs = CuSeqlens::from_q_and_k(layout.ends_q, layout.ends_k)?;
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

/// Rows of a batch's runs among the cached and new rows.
struct BatchLayout {
    n_cached: usize,
    tokens: PackedTokens,
    ends_q: Vec<usize>,
    ends_k: Vec<usize>,
    /// Rows of each run's path, from the beginning of the sequence to the run's end.
    paths: Vec<Vec<Range<usize>>>,
}

impl BatchLayout {
    fn new(n_cached: usize) -> Self {
        let (ends_q, ends_k) = (vec![0], vec![0]);
        Self { n_cached, tokens: PackedTokens::default(), ends_q, ends_k, paths: Vec::new() }
    }

    fn add(&mut self, run: &TokenRun) -> Result<()> {
        let mut path = self.rows(run.prefix)?;
        let n_before: usize = path.iter().map(Range::len).sum();
        let first = self.n_cached + self.tokens.ids.len();
        path.push(first..first + run.ids.len());
        self.tokens.extend(run.ids, n_before, run.class);
        self.ends_q.push(self.tokens.ids.len());
        self.ends_k.push(self.ends_k[self.ends_k.len() - 1] + n_before + run.ids.len());
        self.paths.push(path);
        Ok(())
    }

    fn rows(&self, until: Prefix) -> Result<Vec<Range<usize>>> {
        match until {
            Prefix::Cached(0) => Ok(Vec::new()),
            Prefix::Cached(n) if n <= self.n_cached => Ok(iter::once(0..n).collect()),
            Prefix::Cached(n) => bail!("continue a prefix of {n} cached tokens: {} are cached", self.n_cached),
            Prefix::Run(run_idx) => match self.paths.get(run_idx) {
                Some(path) => Ok(path.clone()),
                None => bail!("continue run {run_idx}: the batch has {} runs before", self.paths.len()),
            },
        }
    }
}

impl SequenceMixing for PrefixTreeAttention<'_> {
    /// Computes attention of each run over its path.
    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        let AttentionCall { layer_idx: block_idx, q: q_thk, k: k_tgk, v: v_tgk, spec, .. } = *call;
        let mut cached = lock(&self.path.blocks[block_idx]);
        let [k, v] = match &*cached {
            Some([k, v]) => [Tensor::cat(&[k, k_tgk], 0)?, Tensor::cat(&[v, v_tgk], 0)?],
            None => [k_tgk.clone(), v_tgk.clone()],
        };
        let out = match &self.keys {
            None => attention(q_thk, k_tgk, v_tgk, &self.seqs, spec)?,
            Some(keys) => attention(q_thk, &gather(&k, keys)?, &gather(&v, keys)?, &self.seqs, spec)?,
        };
        *cached = match &self.kept {
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

/// Gathers rows of `x` [n, g, k] along dim 0 into [r, g, k]; `rows` holds u32 indices [r].
fn gather(x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    let (n, g, k) = x.dims3()?;
    let table = Weight::frozen(x.contiguous()?.reshape((n, g * k))?);
    embedding(rows, &table, None)?.reshape((rows.elem_count(), g, k))
}
