//! Batch limits of one forward.

use candlewick_parallel::Engine;

/// Batch limits of one forward. A longer single sequence gets a forward of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// New tokens of a forward.
    pub n_tokens: usize,
    /// Keys that the new tokens attend to, summed over token runs.
    pub n_keys: usize,
    /// Token runs (sequences, or nodes of the prefix tree).
    pub n_runs: usize,
    /// Sequences generated at the same time.
    pub n_texts: usize,
    /// Tokens in the KV cache, unless a single sequence needs more.
    pub pool_rows: usize,
}

/// Tokens, keys and runs in a batch so far.
pub struct BatchLoad {
    limits: BatchLimits,
    n_tokens: usize,
    n_keys: usize,
    n_runs: usize,
}

impl BatchLimits {
    /// Returns default limits. A CPU forward stays small enough for its caches. `row_bytes` is the KV cache size of a
    /// token over all layers.
    pub fn auto(is_cpu: bool, row_bytes: usize) -> Self {
        let (n_tokens, n_texts, pool_bytes) = if is_cpu { (1 << 10, 64, 2 << 30) } else { (1 << 14, 256, 8 << 30) };
        let pool_rows = pool_bytes / row_bytes.max(1);
        Self { n_tokens, n_keys: 16 * n_tokens, n_runs: usize::MAX, n_texts, pool_rows }
    }

    /// Returns default limits for an engine.
    pub fn of_engine(engine: &Engine) -> Self {
        let heads = engine.model().config().attention_heads();
        let row_bytes = 2 * engine.model().n_blocks() * heads.n_kv * heads.dim * size_of::<f32>();
        Self::auto(engine.device().is_cpu(), row_bytes)
    }

    /// Limits the number of sequences to `n`.
    #[must_use]
    pub fn at_most(self, n: Option<usize>) -> Self {
        let n = n.unwrap_or(usize::MAX);
        Self { n_runs: self.n_runs.min(n), n_texts: self.n_texts.min(n), ..self }
    }

    /// Returns limits of `n` sequences of any length.
    pub fn sequences(n: usize) -> Self {
        let all = usize::MAX;
        Self { n_tokens: all, n_keys: all, n_runs: n, n_texts: n, pool_rows: all }
    }

    /// Returns an empty batch.
    pub fn empty(&self) -> BatchLoad {
        BatchLoad { limits: *self, n_tokens: 0, n_keys: 0, n_runs: 0 }
    }
}

impl BatchLoad {
    /// Adds a token run with its keys if it fits or the batch is empty. Returns true if it was added.
    pub fn add(&mut self, n_tokens: usize, n_keys: usize) -> bool {
        let fits = self.n_tokens + n_tokens <= self.limits.n_tokens
            && self.n_keys + n_keys <= self.limits.n_keys
            && self.n_runs < self.limits.n_runs;
        if !fits && self.n_runs > 0 {
            return false;
        }
        self.n_tokens += n_tokens;
        self.n_keys += n_keys;
        self.n_runs += 1;
        true
    }
}
