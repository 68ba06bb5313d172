//! How much one forward takes.

/// The most that one forward takes. A single run of tokens that is longer has a forward of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// New tokens.
    pub n_tokens: usize,
    /// Keys that they look at, of all runs together.
    pub n_keys: usize,
    /// Runs of tokens.
    pub n_runs: usize,
    /// Texts that are generated at the same time.
    pub n_texts: usize,
    /// Tokens whose keys and values are remembered for them, unless a single text needs more.
    pub pool_rows: usize,
}

/// What a forward has been given so far.
pub struct BatchLoad {
    limits: BatchLimits,
    n_tokens: usize,
    n_keys: usize,
    n_runs: usize,
}

impl BatchLimits {
    /// As many tokens as make a good forward: a CPU has read the weights often enough then, and what it computes stays in
    /// its caches. `row_bytes` is what a token's keys and values take in all blocks.
    pub fn auto(is_cpu: bool, row_bytes: usize) -> Self {
        let (n_tokens, n_texts, pool_bytes) = if is_cpu { (1 << 10, 64, 2 << 30) } else { (1 << 14, 256, 8 << 30) };
        let pool_rows = pool_bytes / row_bytes.max(1);
        Self { n_tokens, n_keys: 16 * n_tokens, n_runs: usize::MAX, n_texts, pool_rows }
    }

    /// The same, with no more than so many sequences.
    #[must_use]
    pub fn at_most(self, n: Option<usize>) -> Self {
        let n = n.unwrap_or(usize::MAX);
        Self { n_runs: self.n_runs.min(n), n_texts: self.n_texts.min(n), ..self }
    }

    /// So many sequences, however long they are.
    pub fn sequences(n: usize) -> Self {
        let all = usize::MAX;
        Self { n_tokens: all, n_keys: all, n_runs: n, n_texts: n, pool_rows: all }
    }

    /// A forward of nothing.
    pub fn empty(&self) -> BatchLoad {
        BatchLoad { limits: *self, n_tokens: 0, n_keys: 0, n_runs: 0 }
    }
}

impl BatchLoad {
    /// Takes a run of tokens with all keys that it looks at, if there is room or nothing else is there.
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
