//! Memory estimate of the routed experts of a layer.

/// Bytes of an f32.
const F32_BYTES: u64 = size_of::<f32>() as u64;

/// Exchange of tokens between the ranks of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertExchange {
    /// One rank holds all experts.
    None,
    /// Rows travel to the ranks of their experts.
    Rows {
        /// Number of ranks that split each expert.
        n_shards: u64,
    },
    /// Every rank gets the tokens of all ranks.
    Tokens {
        /// Number of ranks that exchange tokens.
        n_ranks: u64,
        /// Number of ranks that split each expert.
        n_shards: u64,
    },
}

impl ExpertExchange {
    /// Returns the number of ranks that split each expert.
    pub(crate) fn n_shards(self) -> u64 {
        match self {
            Self::None => 1,
            Self::Rows { n_shards } | Self::Tokens { n_shards, .. } => n_shards,
        }
    }
}

/// Memory of the forward of a shared expert; zero without one.
#[derive(Clone, Copy, Default)]
pub(crate) struct SharedExpertBytes {
    pub(crate) peak: u64,
    pub(crate) output: u64,
    /// Bytes of the output before the gate, which the backward of the gate reads; zero without a gate.
    pub(crate) ungated: u64,
    /// Bytes that exist between the exchanges of tokens: the gated activation, or the output of an MLP in tiles.
    pub(crate) started: u64,
}

/// Sizes of the routed experts of a layer on one rank: every rank gets as many rows as it sends if the load balances.
pub(crate) struct ExpertsCost {
    pub(crate) n_tokens: u64,
    /// Rows of all experts from this rank's tokens: tokens times selected experts, or experts times their capacity.
    pub(crate) n_rows: u64,
    pub(crate) n_experts: u64,
    pub(crate) d: u64,
    pub(crate) f: u64,
    pub(crate) n_bytes: u64,
    /// Elements of this rank's gate and up projections, and of its down projections, that are rounded to FP8 for each matmul;
    /// zero without FP8.
    pub(crate) fp8_weights: [u64; 2],
    /// Bytes of a copy of the weights for a matmul on a GPU.
    pub(crate) copied_bytes: u64,
    /// Number of FP8 copies of a gradient that exist at once.
    pub(crate) n_fp8_grads: u64,
    /// True if the FP8 codes of exchanged tokens are saved instead of the tokens, where they are smaller.
    pub(crate) saves_fp8_input: bool,
    pub(crate) exchange: ExpertExchange,
    /// Tile of the tokens; `None` without tiles.
    pub(crate) tile: Option<TileOfExperts>,
}

/// Sizes of a tile of tokens, whose experts are computed together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileOfExperts {
    pub(crate) n_tokens: u64,
    /// Rows of the tokens' experts.
    pub(crate) n_rows: u64,
    /// True if the dense MLP of the shared expert saves the input of the experts, too.
    pub(crate) shares_input: bool,
}

impl ExpertsCost {
    /// Returns the bytes of the logits, of gate and up, of a weight per row, and of exchanged tokens. Permuted rows are
    /// recomputed. In tiles, the tokens are saved instead of gate and up.
    pub(crate) fn saved_bytes(&self) -> u64 {
        let weights = self.n_computed_rows() * F32_BYTES;
        let of_rows = match (self.tile, self.exchange) {
            (None, _) => self.rows(2 * self.width()),
            (Some(tile), ExpertExchange::None) if !tile.shares_input => self.input_bytes(),
            (Some(_), _) => 0,
        };
        self.logits_bytes() + of_rows + weights + self.codes_bytes().unwrap_or(self.exchanged_bytes())
    }

    /// Returns the bytes of the FP8 codes of all rows that are saved instead of exchanged tokens; `None` if the tokens are saved.
    /// Scales are not counted.
    fn codes_bytes(&self) -> Option<u64> {
        let bytes = self.n_computed_rows() * self.d;
        (self.saves_fp8_input && bytes < self.exchanged_bytes()).then_some(bytes)
    }

    /// Returns the bytes of the logits.
    pub(crate) fn logits_bytes(&self) -> u64 {
        self.n_tokens * self.n_experts * F32_BYTES
    }

    /// Returns the peak bytes of the forward: logits, exchanged tokens, gate and up, the gated activation and its
    /// projection. Sums of exchanged tokens replace the rows.
    pub(crate) fn forward_bytes(&self) -> u64 {
        let f = self.width();
        let [fp8_gate_up, fp8_down] = self.fp8_bytes([self.d, f]);
        let first = self.rows(self.d) + self.rows(2 * f) + fp8_gate_up + self.codes_bytes().unwrap_or(0);
        let second = self.rows(2 * f) + self.rows(f) + self.rows(self.d) + fp8_down;
        let (of_tiles, computed) = match self.tile {
            None => (0, self.rows(self.d)),
            // The output of all tiles, and that of one.
            Some(_) => (self.input_bytes() + self.tile_bytes(), self.input_bytes()),
        };
        let third = computed + 2 * self.exchanged_bytes();
        self.logits_bytes() + self.exchanged_bytes() + (of_tiles + first.max(second) + self.copied_bytes).max(third)
    }

    /// Returns the bytes that exist while outputs travel: logits, received and computed rows, and those that arrive.
    fn combine_bytes(&self) -> u64 {
        let computed = if self.tile.is_some() { self.input_bytes() } else { self.rows(self.d) };
        self.logits_bytes() + computed + 2 * self.exchanged_bytes()
    }

    /// Returns the peak bytes of the forward of routed and shared experts.
    ///
    /// On one rank the output of the routed experts is kept while the shared expert computes, and until both are added. It is as
    /// large as that of the shared expert. Otherwise the shared expert computes while tokens travel: its down projection while
    /// outputs do.
    pub(crate) fn forward_bytes_with(&self, shared: SharedExpertBytes) -> u64 {
        let kept = shared.output + shared.ungated;
        let sent = match self.exchange {
            ExpertExchange::None => return self.forward_bytes().max(shared.output + shared.peak.max(kept)),
            ExpertExchange::Rows { .. } => self.exchanged_bytes(),
            ExpertExchange::Tokens { .. } => 0,
        };
        let combine = shared.started + kept + self.combine_bytes();
        (shared.started + self.forward_bytes()).max(sent + self.exchanged_bytes() + shared.peak).max(combine)
    }

    /// Returns [`ExpertsCost::forward_bytes_with`] of a forward that is recorded for backward: on one rank, all that both save,
    /// with gated activations, is kept until the outputs are added.
    pub(crate) fn recorded_forward_bytes_with(&self, shared: SharedExpertBytes) -> u64 {
        let gated = if self.tile.is_some() { 0 } else { self.rows(self.width()) };
        let both = self.saved_bytes() + gated + shared.peak + 2 * shared.output + shared.ungated;
        let both = if self.exchange == ExpertExchange::None && shared.output > 0 { both } else { 0 };
        self.forward_bytes_with(shared).max(both)
    }

    /// Returns the peak bytes of the backward beyond the saved activations. The rows are recomputed from the norm's output, of
    /// `norm_output` bytes.
    pub(crate) fn backward_bytes(&self, norm_output: u64) -> u64 {
        let (rows, f) = (|width| self.rows(width), self.width());
        let [gate_up_weights, down_weights] = self.fp8_weights.map(|n| n * self.n_bytes);
        let [gate_up_grads, down_grads] = self.fp8_grad_bytes([2 * f, self.d]);
        // The gradient of the projection, the gated activation and its gradient.
        let down = rows(self.d) + 2 * rows(f) + down_grads + down_weights;
        // The gradients of the gated activation, and of gate and up.
        let gated = rows(3 * f);
        // The gradients of gate and up, which are free then, and of the permuted rows, and the rows. In FP8 the rows are freed
        // before the weights exist.
        let gate_up = rows(self.d) + rows(self.d).max(gate_up_weights) + gate_up_grads;
        match self.tile {
            None => self.copied_bytes + down.max(gated).max(gate_up + norm_output),
            // The gradient of the input. Of a tile: gate and up, the gated activation and the output, and the input's gradient.
            Some(_) => {
                let saved = rows(3 * f) + 2 * self.tile_bytes();
                self.copied_bytes + self.input_bytes() + saved + down.max(gated).max(gate_up) - rows(f) + norm_output
            }
        }
    }

    /// Returns the bytes of the gradients of sent rows or tokens, which arrive while the shared expert has its backward. The
    /// gradients of all ranks' tokens exist until they are summed.
    pub(crate) fn returned_bytes(&self) -> u64 {
        match self.exchange {
            ExpertExchange::None => 0,
            ExpertExchange::Rows { .. } | ExpertExchange::Tokens { .. } => self.exchanged_bytes(),
        }
    }

    /// Returns the bytes of the values of FP8 codes of gradients of gate and up, and of down, with these widths.
    fn fp8_grad_bytes(&self, widths: [u64; 2]) -> [u64; 2] {
        [0, 1].map(|i| if self.fp8_weights[i] > 0 { self.n_fp8_grads * self.rows(widths[i]) } else { 0 })
    }

    /// Returns the bytes of the values of FP8 codes in the matmuls of gate and up, and of down: of the weight, and of rows of
    /// these widths.
    fn fp8_bytes(&self, widths: [u64; 2]) -> [u64; 2] {
        let bytes = |i: usize| self.fp8_weights[i] * self.n_bytes + self.rows(widths[i]);
        [0, 1].map(|i| if self.fp8_weights[i] > 0 { bytes(i) } else { 0 })
    }

    /// Returns the bytes of rows that are computed together: all of them, or those of a tile.
    fn rows(&self, width: u64) -> u64 {
        self.n_live_rows() * width * self.n_bytes
    }

    /// Returns the number of rows that are computed together.
    pub(crate) fn n_live_rows(&self) -> u64 {
        self.tile.map_or(self.n_computed_rows(), |tile| tile.n_rows)
    }

    /// Returns the bytes of a tile of tokens.
    fn tile_bytes(&self) -> u64 {
        self.tile.map_or(0, |tile| tile.n_tokens * self.d * self.n_bytes)
    }

    /// Returns the bytes of the tokens from which experts are computed: this rank's, received rows, or those of all ranks.
    fn input_bytes(&self) -> u64 {
        match self.exchange {
            ExpertExchange::None => self.n_tokens * self.d * self.n_bytes,
            ExpertExchange::Rows { .. } | ExpertExchange::Tokens { .. } => self.exchanged_bytes(),
        }
    }

    /// Returns the number of rows that the rank computes. Each rank of an expert computes all of its rows.
    pub(crate) fn n_computed_rows(&self) -> u64 {
        self.n_rows * self.n_shards()
    }

    /// Returns the columns of an expert's intermediate size on this rank.
    pub(crate) fn width(&self) -> u64 {
        self.f.div_ceil(self.n_shards())
    }

    pub(crate) fn n_shards(&self) -> u64 {
        self.exchange.n_shards()
    }

    /// Returns the bytes of the rows or tokens that the rank has received, which backward reads.
    fn exchanged_bytes(&self) -> u64 {
        match self.exchange {
            ExpertExchange::None => 0,
            ExpertExchange::Rows { .. } => self.n_computed_rows() * self.d * self.n_bytes,
            ExpertExchange::Tokens { n_ranks, .. } => n_ranks * self.n_tokens * self.d * self.n_bytes,
        }
    }
}
