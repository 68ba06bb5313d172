//! Keys and values of many sequences that grow by themselves: the `attend` seam of generation in batches.
//!
//! n rows of the pool, t new tokens, g key heads, k head dim

use std::ops::Range;
use std::sync::Mutex;

use candle_core::{Result, Tensor};
use candlewick_model::{AttentionCall, ParallelOps};
use candlewick_ops::{Seqs, attention, kv_cache_dtype, set_rows};

use crate::engine::PackedTokens;
use crate::kv_cache::lock;

/// One buffer for each block's keys and one for its values, in which each sequence has a run of rows.
pub struct KvCachePool {
    blocks: Vec<Mutex<Option<[Tensor; 2]>>>,
    n_rows: usize,
}

/// New tokens of a sequence.
#[derive(Clone, Debug)]
pub struct AppendTokens {
    /// The first row of the sequence in the pool.
    pub start: usize,
    /// How many of its tokens the pool holds.
    pub n_seen: usize,
    /// The tokens behind them, at least one.
    pub ids: Vec<u32>,
}

/// The parallel_ops of one forward, in which some sequences grow.
pub struct KvAppend<'p> {
    pool: &'p KvCachePool,
    tokens: PackedTokens,
    last_rows: Vec<u32>,
    seqs: Seqs,
    /// Where the new keys and values belong.
    rows: Vec<u32>,
    /// The rows of the pool that are looked at.
    used: Range<usize>,
}

impl KvCachePool {
    /// Makes room for `n_rows` tokens in each of `n_blocks` blocks; memory is taken by the first forward.
    pub fn new(n_blocks: usize, n_rows: usize) -> Self {
        Self { blocks: (0..n_blocks).map(|_| Mutex::default()).collect(), n_rows }
    }

    /// Copies the keys and values of some rows to those from `to` on. The two do not overlap.
    pub fn copy(&self, from: Range<usize>, to: usize) -> Result<()> {
        let rows: Vec<u32> = (to..to + from.len()).map(|row| row as u32).collect();
        for block in &self.blocks {
            for buffer in lock(block).iter().flatten() {
                set_rows(buffer, &rows, &buffer.narrow(0, from.start, from.len())?.force_contiguous()?)?;
            }
        }
        Ok(())
    }

    /// Lays out a forward of these sequences, whose runs in the pool do not overlap.
    pub fn append(&self, sequences: &[AppendTokens]) -> Result<KvAppend<'_>> {
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        order.sort_unstable_by_key(|i| sequences[*i].start);
        let used = order.first().map_or(0, |first| sequences[*first].start);
        let mut layout = BatchLayout { last_rows: vec![0; sequences.len()], ..BatchLayout::new(used) };
        for i in order {
            layout.add(&sequences[i]);
            layout.last_rows[i] = layout.tokens.ids.len() as u32 - 1;
        }
        // One token alone would take another way through the products, and round otherwise than among others.
        if layout.tokens.ids.len() == 1 {
            layout.add(&AppendTokens { start: self.n_rows, n_seen: 0, ids: vec![0] });
        }
        let BatchLayout { tokens, last_rows, rows, ends_q, ends_k, .. } = layout;
        let used = used..used + ends_k[ends_k.len() - 1];
        Ok(KvAppend { pool: self, tokens, last_rows, seqs: Seqs::with_keys(ends_q, ends_k)?, rows, used })
    }

    /// Buffers for what looks like this. The last row is for a token that nobody asks for. A CPU computes attention in f32
    /// and would widen all rows each time.
    fn buffers(&self, like_tgk: &Tensor) -> Result<[Tensor; 2]> {
        let (_, n_heads, head_dim) = like_tgk.dims3()?;
        let dtype = kv_cache_dtype(like_tgk);
        let zeros = || Tensor::zeros((self.n_rows + 1, n_heads, head_dim), dtype, like_tgk.device());
        Ok([zeros()?, zeros()?])
    }
}

/// The sequences of a forward in the order of their rows. What is free between them is a sequence that asks nothing.
struct BatchLayout {
    first: usize,
    tokens: PackedTokens,
    last_rows: Vec<u32>,
    rows: Vec<u32>,
    ends_q: Vec<usize>,
    ends_k: Vec<usize>,
}

impl BatchLayout {
    fn new(first: usize) -> Self {
        let (ends_q, ends_k) = (vec![0], vec![0]);
        Self { first, tokens: PackedTokens::default(), last_rows: Vec::new(), rows: Vec::new(), ends_q, ends_k }
    }

    fn add(&mut self, AppendTokens { start, n_seen, ids }: &AppendTokens) {
        let (n_keys, end) = (n_seen + ids.len(), self.first + self.ends_k[self.ends_k.len() - 1]);
        if *start > end {
            self.ends_q.push(self.tokens.ids.len());
            self.ends_k.push(start - self.first);
        }
        self.tokens.ids.extend(ids);
        self.tokens.positions.extend((*n_seen..n_keys).map(|position| position as u32));
        self.rows.extend((start + n_seen..start + n_keys).map(|row| row as u32));
        self.ends_q.push(self.tokens.ids.len());
        self.ends_k.push(start + n_keys - self.first);
    }
}

impl KvAppend<'_> {
    /// Returns the tokens of the forward.
    pub fn tokens(&self) -> &PackedTokens {
        &self.tokens
    }

    /// Returns the row of each sequence's last token, in the order in which the sequences were given.
    pub fn last_rows(&self) -> &[u32] {
        &self.last_rows
    }
}

impl ParallelOps for KvAppend<'_> {
    /// Puts the new keys and values into the pool and attends from the new queries to their sequences.
    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        let AttentionCall { layer_idx: block_idx, q: q_thk, k: k_tgk, v: v_tgk, spec, .. } = *call;
        let mut block = lock(&self.pool.blocks[block_idx]);
        let [k, v] = match &mut *block {
            Some(buffers) => buffers,
            empty => empty.insert(self.pool.buffers(k_tgk)?),
        };
        set_rows(k, &self.rows, k_tgk)?;
        set_rows(v, &self.rows, v_tgk)?;
        let [k, v] = [k, v].map(|buffer| buffer.narrow(0, self.used.start, self.used.len()));
        attention(&q_thk.to_dtype(kv_cache_dtype(q_thk))?, &k?, &v?, &self.seqs, spec)?.to_dtype(q_thk.dtype())
    }
}
