//! Runs of tokens that branch: what several continue is computed once. The `attend` seam of a forward over a prefix tree.
//!
//! p remembered tokens, t new ones, s keys of all runs, g key heads, k head dim

use std::iter;
use std::ops::Range;
use std::sync::Mutex;

use candle_core::{Device, Result, Tensor, bail};
use candlewick_model::Seams;
use candlewick_ops::{AttentionSpec, CuSeqlens, Weight, attention, embedding};

use crate::engine::Tokens;
use crate::kv_cache::lock;

/// What a run continues, and what is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The first so many tokens of what was remembered; 0 is the beginning.
    Remembered(usize),
    /// The end of this run of the same batch, which comes before.
    Run(usize),
}

/// Tokens that continue others.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// What is before them.
    pub after: Until,
    /// The tokens, at least one.
    pub ids: &'a [u32],
}

/// The keys and values of one path through the tree, kept from one batch to the next.
pub struct Path {
    blocks: Vec<Mutex<Option<[Tensor; 2]>>>,
    n_tokens: usize,
}

/// The seams of one batch's forward. The tokens of its runs are rows, one run after the other.
pub struct Branches<'p> {
    path: &'p Path,
    tokens: Tokens,
    seqs: CuSeqlens,
    /// Which of the p + t rows are the keys of the runs, u32 [s]; `None` if each run has its own and no more.
    keys: Option<Tensor>,
    /// Which of them are remembered, u32; `None` for nothing.
    kept: Option<Tensor>,
}

impl Path {
    /// Remembers nothing yet, of `n_blocks` blocks.
    pub fn new(n_blocks: usize) -> Self {
        Self { blocks: (0..n_blocks).map(|_| Mutex::default()).collect(), n_tokens: 0 }
    }

    /// Returns the number of tokens that are remembered.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Lays out a batch. Its forward, which has to follow, leaves the path up to `kept`.
    pub fn branch(&mut self, runs: &[Run], kept: Until, device: &Device) -> Result<Branches<'_>> {
        let mut layout = Layout::new(self.n_tokens);
        runs.iter().try_for_each(|run| layout.add(run))?;
        let kept = layout.rows(kept)?;
        // One token alone would take another way through the products, and round otherwise than among others.
        if layout.tokens.ids.len() == 1 {
            layout.add(&Run { after: Until::Remembered(0), ids: &[0] })?;
        }
        let n_kept = kept.iter().map(Range::len).sum();
        let keys = match runs.iter().all(|run| run.after == Until::Remembered(0)) {
            true => None,
            false => Some(index(layout.paths.iter().flatten(), device)?),
        };
        let kept = (n_kept > 0).then(|| index(kept.iter(), device)).transpose()?;
        let seqs = CuSeqlens::from_q_and_k(layout.ends_q, layout.ends_k)?;
        self.n_tokens = n_kept;
        Ok(Branches { path: self, tokens: layout.tokens, seqs, keys, kept })
    }
}

impl Branches<'_> {
    /// Returns the tokens of all runs.
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }
}

/// Where the runs of a batch lie among the remembered and the new rows.
struct Layout {
    n_remembered: usize,
    tokens: Tokens,
    ends_q: Vec<usize>,
    ends_k: Vec<usize>,
    /// The rows from the beginning of each run's path to its end.
    paths: Vec<Vec<Range<usize>>>,
}

impl Layout {
    fn new(n_remembered: usize) -> Self {
        let (ends_q, ends_k) = (vec![0], vec![0]);
        Self { n_remembered, tokens: Tokens::default(), ends_q, ends_k, paths: Vec::new() }
    }

    fn add(&mut self, run: &Run) -> Result<()> {
        let mut path = self.rows(run.after)?;
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

    fn rows(&self, until: Until) -> Result<Vec<Range<usize>>> {
        match until {
            Until::Remembered(0) => Ok(Vec::new()),
            Until::Remembered(n) if n <= self.n_remembered => Ok(iter::once(0..n).collect()),
            Until::Remembered(n) => bail!("branch after {n} remembered tokens: there are {}", self.n_remembered),
            Until::Run(run_idx) => match self.paths.get(run_idx) {
                Some(path) => Ok(path.clone()),
                None => bail!("branch after run {run_idx}: {} runs are before", self.paths.len()),
            },
        }
    }
}

impl Seams for Branches<'_> {
    /// Attends from each run to its whole path.
    fn attend(
        &self,
        block_idx: usize,
        q_thk: &Tensor,
        k_tgk: &Tensor,
        v_tgk: &Tensor,
        _seqs: &CuSeqlens,
        spec: &AttentionSpec,
    ) -> Result<Tensor> {
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
