//! KV cache of many sequences, for batched generation.
//!
//! Dimensions: n rows of the pool, t new tokens, g KV heads, k head size

use std::ops::Range;
use std::sync::Mutex;

use candle_core::{Result, Tensor};
use candlewick_model::{AttentionCall, LengthClass, SequenceMixing};
use candlewick_ops::{CuSeqlens, attention, kv_cache_dtype, set_rows};

use crate::engine::PackedTokens;
use crate::kv_cache::lock;

/// KV cache of many sequences. Each sequence occupies contiguous rows of one key and one value buffer per layer.
pub struct KvCachePool {
    blocks: Vec<Mutex<Option<[Tensor; 2]>>>,
    n_rows: usize,
}

/// New tokens to append to a cached sequence.
#[derive(Clone, Debug)]
pub struct AppendTokens {
    /// First row of the sequence in the pool.
    pub start: usize,
    /// Number of the sequence's cached tokens.
    pub n_seen: usize,
    /// New tokens, at least one.
    pub ids: Vec<u32>,
    /// RoPE frequencies of the sequence; those of its cached tokens.
    pub class: LengthClass,
}

/// Attention of one forward that appends tokens to cached sequences.
pub struct KvAppend<'p> {
    pool: &'p KvCachePool,
    tokens: PackedTokens,
    last_rows: Vec<u32>,
    seqs: CuSeqlens,
    /// Pool rows that receive the new keys and values.
    rows: Vec<u32>,
    /// Pool rows that attention reads.
    used: Range<usize>,
}

impl KvCachePool {
    /// Creates a pool of `n_rows` tokens for each of `n_blocks` layers. The first forward allocates the memory.
    pub fn new(n_blocks: usize, n_rows: usize) -> Self {
        Self { blocks: (0..n_blocks).map(|_| Mutex::default()).collect(), n_rows }
    }

    /// Copies cached rows `from` to the rows that begin at `to`. The ranges must not overlap.
    pub fn copy(&self, from: Range<usize>, to: usize) -> Result<()> {
        let rows: Vec<u32> = (to..to + from.len()).map(|row| row as u32).collect();
        for block in &self.blocks {
            for buffer in lock(block).iter().flatten() {
                set_rows(buffer, &rows, &buffer.narrow(0, from.start, from.len())?.force_contiguous()?)?;
            }
        }
        Ok(())
    }

    /// Plans a forward of these sequences, whose rows must not overlap.
    pub fn append(&self, sequences: &[AppendTokens]) -> Result<KvAppend<'_>> {
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        order.sort_unstable_by_key(|i| sequences[*i].start);
        let used = order.first().map_or(0, |first| sequences[*first].start);
        let mut layout = BatchLayout { last_rows: vec![0; sequences.len()], ..BatchLayout::new(used) };
        for i in order {
            layout.add(&sequences[i]);
            layout.last_rows[i] = layout.tokens.ids.len() as u32 - 1;
        }
        // A GEMM of one row takes another kernel and rounds differently, so a padding token is added.
        if layout.tokens.ids.len() == 1 {
            layout.add(&AppendTokens { start: self.n_rows, n_seen: 0, ids: vec![0], class: LengthClass::default() });
        }
        let BatchLayout { tokens, last_rows, rows, ends_q, ends_k, .. } = layout;
        let used = used..used + ends_k[ends_k.len() - 1];
        Ok(KvAppend { pool: self, tokens, last_rows, seqs: CuSeqlens::from_q_and_k(ends_q, ends_k)?, rows, used })
    }

    /// Allocates buffers for keys and values like `like_tgk`. The last row is for a padding token. On the CPU they are
    /// f32, which saves a conversion in every forward.
    fn buffers(&self, like_tgk: &Tensor) -> Result<[Tensor; 2]> {
        let (_, n_heads, head_dim) = like_tgk.dims3()?;
        let dtype = kv_cache_dtype(like_tgk);
        let zeros = || Tensor::zeros((self.n_rows + 1, n_heads, head_dim), dtype, like_tgk.device());
        Ok([zeros()?, zeros()?])
    }
}

/// Sequences of a forward in row order. Free rows in between are a sequence without queries.
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

    fn add(&mut self, AppendTokens { start, n_seen, ids, class }: &AppendTokens) {
        let (n_keys, end) = (n_seen + ids.len(), self.first + self.ends_k[self.ends_k.len() - 1]);
        if *start > end {
            self.ends_q.push(self.tokens.ids.len());
            self.ends_k.push(start - self.first);
        }
        self.tokens.extend(ids, *n_seen, *class);
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

    /// Returns the row of each sequence's last token, in the order of the sequences passed in.
    pub fn last_rows(&self) -> &[u32] {
        &self.last_rows
    }
}

impl SequenceMixing for KvAppend<'_> {
    /// Stores the new keys and values in the pool, and computes attention of the new queries over their sequences.
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
