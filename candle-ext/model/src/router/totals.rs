//! Totals of routers over the forward passes of a step: selections of experts, and statistics of logits.

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_core::{Result, Tensor};

/// Totals of the routers by layer. Padding does not count.
#[derive(Debug, Default)]
pub struct RouterTotals {
    layers: RefCell<BTreeMap<usize, Tensor>>,
}

/// Totals of one router.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterTotal {
    /// Selections of each expert, before the capacity drops any.
    pub expert_counts: Vec<f32>,
    /// Tokens.
    pub n_tokens: f32,
    /// Sum of the logits.
    pub logit_sum: f32,
    /// Sum of the squares of the logits.
    pub logit_squares: f32,
    /// Selections that the capacity dropped.
    pub n_dropped: f32,
}

/// Elements of a total after the counts of the experts.
const N_STATISTICS: usize = 4;

impl RouterTotals {
    /// Returns the elements of a router's total, for `n_experts` experts.
    pub fn len_of(n_experts: usize) -> usize {
        n_experts + N_STATISTICS
    }

    /// Adds a forward pass: its [`RouterStatistics::totals`](candlewick_ops::RouterStatistics::totals), and the selections that
    /// the capacity kept, an f32 scalar; `None` without a capacity.
    pub(crate) fn add(&self, layer_idx: usize, statistics: Tensor, n_kept: Option<Tensor>) -> Result<()> {
        let total = match n_kept {
            Some(n_kept) => {
                let n_others = statistics.dim(0)? - 1;
                let n_selected = statistics.narrow(0, 0, n_others - 3)?.sum_all()?;
                let n_dropped = (n_selected - n_kept)?.reshape(1)?;
                Tensor::cat(&[&statistics.narrow(0, 0, n_others)?, &n_dropped], 0)?
            }
            None => statistics,
        };
        let mut layers = self.layers.borrow_mut();
        let sum = match layers.get(&layer_idx) {
            Some(sum) => (sum + total)?,
            None => total,
        };
        layers.insert(layer_idx, sum);
        Ok(())
    }

    /// Returns the total of each layer that computed, f32 [[`RouterTotals::len_of`]] by layer index.
    pub fn into_layers(self) -> BTreeMap<usize, Tensor> {
        self.layers.into_inner()
    }
}

impl RouterTotal {
    /// Reads the elements of a total.
    pub fn read(values: &[f32]) -> Self {
        let (counts, statistics) = values.split_at(values.len() - N_STATISTICS);
        let [n_tokens, logit_sum, logit_squares, n_dropped] = [0, 1, 2, 3].map(|i| statistics[i]);
        Self { expert_counts: counts.to_vec(), n_tokens, logit_sum, logit_squares, n_dropped }
    }
}
