//! KV cache of one sequence, for generation.

use std::sync::Mutex;

use candle_core::{Result, Tensor};
use candlewick_model::{AttentionCall, SequenceMixing};
use candlewick_ops::{CuSeqlens, attention};

/// KV cache of one sequence: a buffer of fixed capacity for each layer.
pub struct KvCache {
    blocks: Vec<Mutex<BlockCache>>,
    capacity: usize,
}

#[derive(Default)]
struct BlockCache {
    kv: Option<(Tensor, Tensor)>,
    n_tokens: usize,
}

impl KvCache {
    /// Creates an empty cache for `n_blocks` layers and up to `capacity` tokens.
    pub fn new(n_blocks: usize, capacity: usize) -> Self {
        Self { blocks: (0..n_blocks).map(|_| Mutex::default()).collect(), capacity }
    }

    /// Returns the number of cached tokens. A pipeline stage caches those of its own layers only.
    pub fn n_tokens(&self) -> usize {
        self.blocks.iter().map(|block| lock(block).n_tokens).max().unwrap_or(0)
    }
}

impl SequenceMixing for KvCache {
    /// Appends the new keys and values, and computes attention of the new queries over all cached tokens.
    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        let AttentionCall { layer_idx: block, q: q_thk, k: k_thk, v: v_thk, spec, .. } = *call;
        let n_new = q_thk.dim(0)?;
        let mut cache = lock(&self.blocks[block]);
        let n_seen = cache.n_tokens;
        if n_seen + n_new > self.capacity {
            candle_core::bail!("cache {} tokens: the capacity is {}", n_seen + n_new, self.capacity);
        }
        let buffers = match cache.kv.take() {
            Some(buffers) => buffers,
            None => (self.buffer(k_thk)?, self.buffer(v_thk)?),
        };
        buffers.0.slice_set(&k_thk.contiguous()?, 0, n_seen)?;
        buffers.1.slice_set(&v_thk.contiguous()?, 0, n_seen)?;
        let n_keys = n_seen + n_new;
        let seqs = CuSeqlens::from_q_and_k(vec![0, n_new], vec![0, n_keys])?;
        let out = attention(q_thk, &buffers.0.narrow(0, 0, n_keys)?, &buffers.1.narrow(0, 0, n_keys)?, &seqs, spec)?;
        cache.kv = Some(buffers);
        cache.n_tokens = n_keys;
        Ok(out)
    }
}

impl KvCache {
    fn buffer(&self, like_thk: &Tensor) -> Result<Tensor> {
        let (_, n_heads, head_dim) = like_thk.dims3()?;
        Tensor::zeros((self.capacity, n_heads, head_dim), like_thk.dtype(), like_thk.device())
    }
}

pub(crate) fn lock<T>(block: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    block.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
