//! Floating-point operations of a decoder (Llama, Mistral, Qwen2, Qwen3), by ArcticTraining's
//! formula, so that TFLOPS compare:
//!
//! N = L (3 h i + h (q + k + v + o)) + V h   with q = o = n_heads k, k = v = n_kv_heads k
//! FLOPs = a N tokens + b k n_heads L sum(s^2)
//!
//! Forwards that backward computes again are counted apart, by what is really computed again: blocks, MLPs. There
//! ArcticTraining's formula counts the head as well, and all blocks or none.
//!
//! h hidden, i intermediate, k head dim, L layers, V vocabulary, s the length of a packed sequence.

use candlewick_model::Config;
use candlewick_ops::{AttentionCost, LinearCost};

/// Holds the sizes that the count depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Of each of the L layers, the sliding window if it has one: a query sees itself and at most `window - 1` keys before
    /// it.
    pub windows: Vec<Option<usize>>,
    /// h.
    pub hidden: usize,
    /// i.
    pub intermediate: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// k.
    pub head_dim: usize,
    /// V.
    pub vocab: usize,
}

/// Holds the factors a and b: operations a weight and token, and a visible query-key pair, head
/// dim and head. Every product of matrices costs 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    linear: u64,
    attention: u64,
}

impl Pass {
    /// Forward alone: evaluation.
    pub const FORWARD: Self = Self { linear: LinearCost::FORWARD_FLOPS, attention: AttentionCost::FORWARD_FLOPS };
    /// Forward, and a backward that costs twice as much.
    pub const TRAIN: Self =
        Self { linear: Self::ADAPTER.linear + LinearCost::GRAD_WEIGHT_FLOPS, attention: Self::ADAPTER.attention };
    /// Frozen weights under an adapter: no gradient of the weights. The adapter itself is not counted.
    pub const ADAPTER: Self = Self {
        linear: LinearCost::FORWARD_FLOPS + LinearCost::GRAD_INPUT_FLOPS,
        attention: AttentionCost::FORWARD_FLOPS + AttentionCost::BACKWARD_FLOPS,
    };
}

/// Holds what backward computes again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recomputed {
    /// Blocks of which the input was kept, and no tape.
    pub n_blocks: usize,
    /// Those of them of which attention's output was not kept either.
    pub n_attentions: usize,
    /// MLPs of which nothing was kept inside of their block: tiled ones.
    pub n_mlps: usize,
}

/// Says which query-key pairs count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visibility {
    /// All s^2 pairs, needed or not: what ArcticTraining and most published TFLOPS count.
    Full,
    /// Pairs that a causal mask leaves, s (s + 1) / 2, fewer under a layer's sliding window.
    Causal,
}

impl ModelShape {
    /// Reads the sizes off a model's configuration.
    pub fn of(config: &Config) -> Self {
        Self {
            windows: (0..config.n_layers()).map(|block_idx| config.window(block_idx)).collect(),
            hidden: config.hidden_size(),
            intermediate: config.intermediate_size(),
            n_heads: config.n_heads(),
            n_kv_heads: config.n_kv_heads(),
            head_dim: config.head_dim(),
            vocab: config.vocab_size(),
        }
    }

    /// Returns N: the weights that take part in matrix products, the output head included and the
    /// embedding's lookup not.
    pub fn n_weights(&self) -> u64 {
        (self.windows.len() * self.n_block_weights() + self.vocab * self.hidden) as u64
    }

    fn n_block_weights(&self) -> usize {
        self.n_mlp_weights() + self.hidden * (2 * self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    fn n_mlp_weights(&self) -> usize {
        3 * self.hidden * self.intermediate
    }
}

/// Counts the operations of one pass over packed sequences of these lengths.
pub fn flops(shape: &ModelShape, pass: Pass, visibility: Visibility, lengths: &[usize]) -> f64 {
    let pairs: f64 = shape.windows.iter().map(|window| visibility.pairs(*window, lengths)).sum();
    count(shape, pass, shape.n_weights(), pairs, lengths)
}

/// Counts the operations of the forwards that backward computes again, with all query-key pairs: no useful work.
pub fn recomputed_flops(shape: &ModelShape, again: Recomputed, lengths: &[usize]) -> f64 {
    let n_weights = again.n_blocks * shape.n_block_weights() + again.n_mlps * shape.n_mlp_weights();
    let pairs = again.n_attentions as f64 * Visibility::Full.pairs(None, lengths);
    count(shape, Pass::FORWARD, n_weights as u64, pairs, lengths)
}

/// `pairs`: of query and key, of all layers.
fn count(shape: &ModelShape, pass: Pass, n_weights: u64, pairs: f64, lengths: &[usize]) -> f64 {
    let n_tokens: u64 = lengths.iter().map(|&s| s as u64).sum();
    let width = (shape.head_dim * shape.n_heads) as f64;
    (pass.linear * n_weights) as f64 * n_tokens as f64 + pass.attention as f64 * width * pairs
}

/// Returns the share of the peak that useful work reached. Pass operations counted without
/// recomputation: doing a block's forward twice is not useful work.
pub fn model_flops_utilization(flops: f64, seconds: f64, peak_flops_per_second: f64) -> f64 {
    flops / seconds / peak_flops_per_second
}

/// Returns the dense bf16 peak of a GPU by its name, in floating-point operations a second, as NVIDIA's data sheets
/// have it.
pub fn gpu_peak(name: &str) -> Option<f64> {
    const PEAKS: [(&str, f64); 7] = [
        ("B200", 2250e12),
        ("GH200", 989.5e12),
        ("H200", 989.5e12),
        ("H100 PCIe", 756e12),
        ("H100", 989.5e12),
        ("A100", 312e12),
        ("L40S", 362e12),
    ];
    PEAKS.iter().find(|(part, _)| name.contains(part)).map(|(_, peak)| *peak)
}

impl Visibility {
    /// The pairs of one layer.
    fn pairs(self, window: Option<usize>, lengths: &[usize]) -> f64 {
        let of_sequence = |s: f64| match self {
            Visibility::Full => s * s,
            Visibility::Causal => {
                let w = window.map_or(s, |w| s.min(w as f64));
                // The first w queries see 1, 2, .. w keys, each later one w.
                w * (w + 1.0) / 2.0 + (s - w) * w
            }
        };
        lengths.iter().map(|&s| of_sequence(s as f64)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// h = 4, k = 2, 2 query heads, 1 key head: a layer has 3*4*6 + 4*(4+2+2+4) = 120 weights.
    fn tiny() -> ModelShape {
        let windows = vec![None; 3];
        ModelShape { windows, hidden: 4, intermediate: 6, n_heads: 2, n_kv_heads: 1, head_dim: 2, vocab: 10 }
    }

    #[test]
    fn a_tiny_model_by_hand() {
        assert_eq!(tiny().n_weights(), 3 * 120 + 40);
        // 7 tokens; 3^2 + 4^2 = 25 pairs; width 2*2*3 = 12.
        let count = |pass| flops(&tiny(), pass, Visibility::Full, &[3, 4]);
        assert_eq!(count(Pass::FORWARD), 2.0 * 400.0 * 7.0 + 4.0 * 12.0 * 25.0);
        assert_eq!(count(Pass::TRAIN), 6.0 * 400.0 * 7.0 + 12.0 * 12.0 * 25.0);
        assert_eq!(count(Pass::ADAPTER), 4.0 * 400.0 * 7.0 + 12.0 * 12.0 * 25.0);
    }

    #[test]
    fn what_is_computed_again_is_counted_by_blocks_and_mlps() {
        let count = |n_blocks, n_attentions, n_mlps| {
            recomputed_flops(&tiny(), Recomputed { n_blocks, n_attentions, n_mlps }, &[3, 4])
        };
        assert_eq!(count(0, 0, 0), 0.0);
        // 7 tokens; a block has 120 weights and attends to 25 pairs with a width of 2*2; an MLP has 3*4*6 = 72 weights.
        assert_eq!(count(1, 1, 0), 2.0 * 120.0 * 7.0 + 4.0 * 4.0 * 25.0);
        assert_eq!(count(1, 0, 0), 2.0 * 120.0 * 7.0);
        assert_eq!(count(0, 0, 1), 2.0 * 72.0 * 7.0);
        assert_eq!(count(2, 1, 3), count(1, 1, 0) + count(1, 0, 0) + 3.0 * count(0, 0, 1));
        // All blocks are the whole forward but for the head.
        let forward = flops(&tiny(), Pass::FORWARD, Visibility::Full, &[3, 4]);
        assert_eq!(count(3, 3, 0), forward - 2.0 * 40.0 * 7.0);
    }

    #[test]
    fn causal_pairs_equal_a_count_of_them() {
        for s in 0..9u64 {
            for window in [None, Some(1), Some(3), Some(8), Some(20)] {
                let sees = |i: u64, j: u64| j <= i && window.is_none_or(|w| i - j < w as u64);
                let pairs = (0..s).flat_map(|i| (0..s).map(move |j| (i, j))).filter(|&(i, j)| sees(i, j));
                assert_eq!(Visibility::Causal.pairs(window, &[s as usize]), pairs.count() as f64, "{s} {window:?}");
            }
        }
    }

    #[test]
    fn a_layers_window_hides_pairs_of_that_layer() {
        let windowed = ModelShape { windows: vec![None, Some(2), None], ..tiny() };
        let count = |shape: &ModelShape, visibility| flops(shape, Pass::FORWARD, visibility, &[4]);
        assert_eq!(count(&windowed, Visibility::Full), count(&tiny(), Visibility::Full));
        // Of 10 causal pairs of 4 tokens, 7 lie within 2; width 2*2.
        assert_eq!(count(&tiny(), Visibility::Causal) - count(&windowed, Visibility::Causal), 4.0 * 4.0 * 3.0);
    }

    #[test]
    fn real_models_have_the_published_number_of_weights() {
        let smollm2_135m = ModelShape {
            windows: vec![None; 30],
            hidden: 576,
            intermediate: 1536,
            n_heads: 9,
            n_kv_heads: 3,
            head_dim: 64,
            vocab: 49_152,
        };
        // 134,515,008 parameters, less 61 norms of 576.
        assert_eq!(smollm2_135m.n_weights(), 134_515_008 - 61 * 576);
        let qwen3_0_6b = ModelShape {
            windows: vec![None; 28],
            hidden: 1024,
            intermediate: 3072,
            n_heads: 16,
            n_kv_heads: 8,
            head_dim: 128,
            vocab: 151_936,
        };
        // 596,049,920 parameters, less 57 norms of 1024 and 56 of 128.
        assert_eq!(qwen3_0_6b.n_weights(), 596_049_920 - 57 * 1024 - 56 * 128);
    }

    #[test]
    fn gpus_are_known_by_their_names() {
        assert_eq!(gpu_peak("NVIDIA H200"), Some(989.5e12));
        assert_eq!(gpu_peak("NVIDIA H100 PCIe"), Some(756e12));
        assert_eq!(gpu_peak("NVIDIA H100 80GB HBM3"), Some(989.5e12));
        assert_eq!(gpu_peak("NVIDIA GeForce RTX 4090"), None);
    }

    #[test]
    fn utilization_is_work_over_time_over_peak() {
        assert_eq!(model_flops_utilization(3e12, 2.0, 6e12), 0.25);
    }
}
