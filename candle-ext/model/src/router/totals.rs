//! Totals of routers over the forward passes of a step: selections of experts, and statistics of logits.

use candle_core::{Result, Tensor};

use crate::{LayerOutputSpec, LayerSpec};

/// Name of the side output of layers with a router, see [`RouterTotal::read`]. Padding does not count.
pub const ROUTER_TOTALS: &str = "router_totals";

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

impl LayerSpec {
    /// Returns the side output of the layer; `None` if it has none.
    pub fn side_output(&self) -> Option<LayerOutputSpec> {
        let n_numbers = self.n_experts()? + N_STATISTICS;
        Some(LayerOutputSpec { name: ROUTER_TOTALS, layer_idx: self.layer_idx, n_numbers })
    }
}

/// Returns the total of a forward pass from its
/// [`RouterStatistics::totals`](candlewick_ops::RouterStatistics::totals), and the selections that the capacity kept, an f32
/// scalar; `None` without a capacity.
pub(crate) fn total_of(statistics: Tensor, n_kept: Option<Tensor>) -> Result<Tensor> {
    let Some(n_kept) = n_kept else { return Ok(statistics) };
    let n_others = statistics.dim(0)? - 1;
    let n_selected = statistics.narrow(0, 0, n_others - 3)?.sum_all()?;
    let n_dropped = (n_selected - n_kept)?.reshape(1)?;
    Tensor::cat(&[&statistics.narrow(0, 0, n_others)?, &n_dropped], 0)
}

impl RouterTotal {
    /// Reads the numbers of [`ROUTER_TOTALS`], which are sums in f32.
    pub fn read(values: &[f64]) -> Self {
        let (counts, statistics) = values.split_at(values.len() - N_STATISTICS);
        let [n_tokens, logit_sum, logit_squares, n_dropped] = [0, 1, 2, 3].map(|i| statistics[i] as f32);
        let expert_counts = counts.iter().map(|count| *count as f32).collect();
        Self { expert_counts, n_tokens, logit_sum, logit_squares, n_dropped }
    }
}
