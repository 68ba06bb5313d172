//! FLOPs of a decoder, by ArcticTraining's formula, so that TFLOPS are comparable:
//!
//! N = sum over layers of (m + h (q + k + v + o)) + V h. Here q = o = n_heads k, and k = v = n_kv_heads k.
//! FLOPs = a N tokens + b k n_heads L sum(s^2).
//!
//! A dense MLP has m = 3 h i. A mixture of experts has m = h e + 3 h (K i + i') + g: the router, the experts of a token, the
//! shared expert and its gate.
//!
//! Recomputation in backward is counted separately, by the recomputed layers and MLPs. ArcticTraining's formula counts
//! it for the LM head too, and for all layers or none.
//!
//! h is the hidden size, and i the intermediate size of an MLP or an expert; i' is that of the shared expert. e is the number of
//! experts, and K that of a token. g is h with a gate of the shared expert, and 0 without. k is the head dim. L is the number of
//! layers, V the vocabulary size, and s the length of a packed sequence.

use candlewick_model::{LayerSpec, LinearSpec, Model};
use candlewick_ops::{AttentionCost, LinearCost};

/// The sizes of a model's matmuls and attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// The decoder layers.
    pub layers: Vec<LayerShape>,
    /// Elements of matmul weights outside the layers: V h of the LM head. An MTP layer adds V h, because it has its own
    /// logits, and 2 h^2 of its projection.
    pub n_weights_outside_layers: usize,
}

/// The sizes of one layer's matmuls and attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Elements of the mixer's weights.
    pub n_mixer_weights: usize,
    /// Elements of the MLP's weights that a token is multiplied with.
    pub n_mlp_weights: usize,
    /// k n_heads: the width of all query heads; 0 without attention.
    pub attention_width: usize,
    /// The sliding window: a query attends to itself and at most `window - 1` keys before it.
    pub window: Option<usize>,
}

/// The factors a and b: FLOPs for each weight and token, and for each query-key pair, head dim and head. Each matmul
/// counts 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlopFactors {
    linear: u64,
    attention: u64,
}

impl FlopFactors {
    /// The forward pass: evaluation.
    pub const FORWARD: Self = Self { linear: LinearCost::FORWARD_FLOPS, attention: AttentionCost::FORWARD_FLOPS };
    /// Forward, and a backward that costs twice as much.
    pub const TRAIN: Self =
        Self { linear: Self::ADAPTER.linear + LinearCost::GRAD_WEIGHT_FLOPS, attention: Self::ADAPTER.attention };
    /// Forward and backward with frozen weights under an adapter, without weight gradients. The adapter itself is not
    /// counted.
    pub const ADAPTER: Self = Self {
        linear: LinearCost::FORWARD_FLOPS + LinearCost::GRAD_INPUT_FLOPS,
        attention: AttentionCost::FORWARD_FLOPS + AttentionCost::BACKWARD_FLOPS,
    };
}

/// The parts of a layer that backward recomputes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recomputed {
    /// The layer, of which only the input was saved.
    pub layer: bool,
    /// The layer's attention.
    pub attention: bool,
    /// The tiled MLP, whose intermediate activations are never saved.
    pub tiled_mlp: bool,
}

/// The query-key pairs that attention FLOPs count, whatever the model's mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionPairs {
    /// All s^2 pairs, as ArcticTraining and most published TFLOPS count them.
    Full,
    /// The pairs under a causal mask, s (s + 1) / 2; fewer with a sliding window.
    Causal,
}

impl ModelShape {
    /// Reads the layers of a model, and its MTP layers.
    pub fn of(model: &Model) -> Self {
        let config = model.config();
        let n_head_weights = config.vocab_size() * config.hidden_size();
        let n_projection_weights = 2 * config.hidden_size() * config.hidden_size();
        Self {
            layers: model.layers().map(LayerShape::of).collect(),
            n_weights_outside_layers: (1 + config.n_mtp_layers()) * n_head_weights
                + config.n_mtp_layers() * n_projection_weights,
        }
    }

    /// Returns N: the number of matmul weights, with the LM head and without the embedding.
    pub fn n_weights(&self) -> u64 {
        (self.layers.iter().map(LayerShape::n_weights).sum::<usize>() + self.n_weights_outside_layers) as u64
    }
}

impl LayerShape {
    fn of(layer: &LayerSpec) -> Self {
        let attention = layer.mixer.attention_shape();
        Self {
            n_mixer_weights: layer.mixer.linears().into_iter().map(LinearSpec::n_weights).sum(),
            n_mlp_weights: layer.mlp.n_active_weights(),
            attention_width: attention.map_or(0, |shape| shape.n_heads * shape.head_dim),
            window: attention.and_then(|shape| shape.window),
        }
    }

    fn n_weights(&self) -> usize {
        self.n_mixer_weights + self.n_mlp_weights
    }
}

/// Counts the FLOPs of one pass over packed sequences of these lengths.
pub fn flops(shape: &ModelShape, factors: FlopFactors, attention_pairs: AttentionPairs, lengths: &[usize]) -> f64 {
    let of_layer = |layer: &LayerShape| layer.attention_width as f64 * attention_pairs.count(layer.window, lengths);
    count(factors, shape.n_weights(), shape.layers.iter().map(of_layer).sum(), lengths)
}

/// Counts the FLOPs of recomputation in backward, with all query-key pairs. It is no useful work. `again` has an entry
/// for each of the first layers.
pub fn recomputed_flops(shape: &ModelShape, again: &[Recomputed], lengths: &[usize]) -> f64 {
    let layers = || shape.layers.iter().zip(again);
    let n_weights = layers().map(|(layer, again)| {
        let once_more = if again.layer { layer.n_weights() } else { 0 };
        once_more + if again.tiled_mlp { layer.n_mlp_weights } else { 0 }
    });
    let attentions = layers().filter(|(_, again)| again.attention);
    let pairs = attentions.map(|(layer, _)| layer.attention_width as f64 * AttentionPairs::Full.count(None, lengths));
    count(FlopFactors::FORWARD, n_weights.sum::<usize>() as u64, pairs.sum(), lengths)
}

/// Counts FLOPs by these factors. `weighted_pairs` is the sum over layers of query-key pairs times the attention width.
fn count(factors: FlopFactors, n_weights: u64, weighted_pairs: f64, lengths: &[usize]) -> f64 {
    let n_tokens: u64 = lengths.iter().map(|&s| s as u64).sum();
    (factors.linear * n_weights) as f64 * n_tokens as f64 + factors.attention as f64 * weighted_pairs
}

/// Returns the dense bf16 peak of a GPU by its name, in FLOPs per second, from NVIDIA's data sheets.
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

impl AttentionPairs {
    /// Returns the number of query-key pairs of one layer.
    fn count(self, window: Option<usize>, lengths: &[usize]) -> f64 {
        let of_sequence = |s: f64| match self {
            AttentionPairs::Full => s * s,
            AttentionPairs::Causal => {
                let w = window.map_or(s, |w| s.min(w as f64));
                // The first w queries attend to 1, 2, .. w keys, each later one to w.
                w * (w + 1.0) / 2.0 + (s - w) * w
            }
        };
        lengths.iter().map(|&s| of_sequence(s as f64)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a shape with h = 4, i = 6, k = 2, 2 query heads, 1 KV head: a layer has 4*(4+2+2+4) + 3*4*6 = 120
    /// weights.
    fn tiny() -> ModelShape {
        let layer = LayerShape { n_mixer_weights: 48, n_mlp_weights: 72, attention_width: 4, window: None };
        ModelShape { layers: vec![layer; 3], n_weights_outside_layers: 40 }
    }

    #[test]
    fn a_tiny_model_has_the_flops_computed_by_hand() {
        assert_eq!(tiny().n_weights(), 3 * 120 + 40);
        // 7 tokens; 3^2 + 4^2 = 25 pairs; width 2*2*3 = 12.
        let count = |factors| flops(&tiny(), factors, AttentionPairs::Full, &[3, 4]);
        assert_eq!(count(FlopFactors::FORWARD), 2.0 * 400.0 * 7.0 + 4.0 * 12.0 * 25.0);
        assert_eq!(count(FlopFactors::TRAIN), 6.0 * 400.0 * 7.0 + 12.0 * 12.0 * 25.0);
        assert_eq!(count(FlopFactors::ADAPTER), 4.0 * 400.0 * 7.0 + 12.0 * 12.0 * 25.0);
    }

    #[test]
    fn recomputation_is_counted_by_layers_and_mlps() {
        let again = |layer, attention, tiled_mlp| Recomputed { layer, attention, tiled_mlp };
        let count = |again: &[Recomputed]| recomputed_flops(&tiny(), again, &[3, 4]);
        assert_eq!(count(&[again(false, false, false); 3]), 0.0);
        assert_eq!(count(&[]), 0.0);
        // 7 tokens; a layer has 120 weights and attends to 25 pairs with a width of 2*2; an MLP has 3*4*6 = 72 weights.
        assert_eq!(count(&[again(true, true, false)]), 2.0 * 120.0 * 7.0 + 4.0 * 4.0 * 25.0);
        assert_eq!(count(&[again(true, false, false)]), 2.0 * 120.0 * 7.0);
        assert_eq!(count(&[again(false, false, true)]), 2.0 * 72.0 * 7.0);
        let mixed = [again(true, true, true), again(false, false, true), again(true, false, true)];
        assert_eq!(count(&mixed), 2.0 * (2.0 * 120.0 + 3.0 * 72.0) * 7.0 + 4.0 * 4.0 * 25.0);
        // Recomputing all layers costs a forward without the LM head.
        let forward = flops(&tiny(), FlopFactors::FORWARD, AttentionPairs::Full, &[3, 4]);
        assert_eq!(count(&[again(true, true, false); 3]), forward - 2.0 * 40.0 * 7.0);
    }

    #[test]
    fn causal_pairs_equal_the_counted_pairs() {
        for s in 0..9u64 {
            for window in [None, Some(1), Some(3), Some(8), Some(20)] {
                let sees = |i: u64, j: u64| j <= i && window.is_none_or(|w| i - j < w as u64);
                let pairs = (0..s).flat_map(|i| (0..s).map(move |j| (i, j))).filter(|&(i, j)| sees(i, j));
                assert_eq!(AttentionPairs::Causal.count(window, &[s as usize]), pairs.count() as f64, "{s} {window:?}");
            }
        }
    }

    #[test]
    fn a_sliding_window_removes_pairs_of_its_layer() {
        let mut windowed = tiny();
        windowed.layers[1].window = Some(2);
        let count = |shape: &ModelShape, attention_pairs| flops(shape, FlopFactors::FORWARD, attention_pairs, &[4]);
        assert_eq!(count(&windowed, AttentionPairs::Full), count(&tiny(), AttentionPairs::Full));
        // Of 10 causal pairs of 4 tokens, 7 are within a window of 2; the width is 2*2.
        assert_eq!(count(&tiny(), AttentionPairs::Causal) - count(&windowed, AttentionPairs::Causal), 4.0 * 4.0 * 3.0);
    }

    #[track_caller]
    fn check_weights(config: serde_json::Value, n_parameters: u64, n_in_norms: u64) {
        let config = candlewick_model::Config::from_json(config).expect("a config");
        let shape = ModelShape::of(&Model::new(config, None).expect("a model"));
        assert_eq!(shape.n_weights(), n_parameters - n_in_norms);
    }

    #[test]
    fn real_models_have_the_published_number_of_weights() {
        let smollm2_135m = serde_json::json!({
            "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
            "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": true,
        });
        check_weights(smollm2_135m, 134_515_008, 61 * 576);
        let qwen3_0_6b = serde_json::json!({
            "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
            "tie_word_embeddings": true,
        });
        check_weights(qwen3_0_6b, 596_049_920, 57 * 1024 + 56 * 128);
    }

    #[test]
    fn each_mtp_layer_counts_a_layer_a_projection_and_logits() {
        let of = |n_mtp_layers| {
            let config = serde_json::json!({
                "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
                "num_attention_heads": 4, "vocab_size": 100,
            });
            let config = candlewick_model::Config::from_json(config).expect("a config").with_mtp_layers(n_mtp_layers);
            ModelShape::of(&Model::new(config, None).expect("a model"))
        };
        let n_layer_weights = 4 * 32 * 32 + 3 * 32 * 64;
        assert_eq!(of(0).n_weights(), 2 * n_layer_weights + 100 * 32);
        assert_eq!(of(3).n_weights() - of(0).n_weights(), 3 * (n_layer_weights + 2 * 32 * 32 + 100 * 32));
        assert_eq!(of(3).layers.len(), 5);
    }

    #[test]
    fn gpu_peaks_are_found_by_name() {
        assert_eq!(gpu_peak("NVIDIA H200"), Some(989.5e12));
        assert_eq!(gpu_peak("NVIDIA H100 PCIe"), Some(756e12));
        assert_eq!(gpu_peak("NVIDIA H100 80GB HBM3"), Some(989.5e12));
        assert_eq!(gpu_peak("NVIDIA GeForce RTX 4090"), None);
    }
}
