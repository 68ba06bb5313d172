//! Memory of self-attention.
//!
//! Dimensions: t tokens, d hidden size, q and kv widths of this rank's queries and keys, s bytes of an element

use candlewick_ops::{AttentionCost, AttentionHeads, rms_norm_cost, rope_cost};

use super::spec::SelfAttentionSpec;
use crate::layer_sizes::LayerSizes;
use crate::mixer::{MixerCost, MixerSpec};
use crate::{LinearSpec, QkNorm};

/// Returns the memory of attention on one rank.
pub(super) fn cost(spec: &SelfAttentionSpec, sizes: &LayerSizes) -> MixerCost {
    let attention = attention_cost(spec, sizes);
    let on_rank = |linear: &LinearSpec| (linear.out.len / sizes.n_slices) as u64;
    let [q, kv, _] = spec.qkv.each_ref().map(on_rank);
    let (t, d, s) = (sizes.n_tokens, sizes.hidden_size as u64, sizes.n_bytes());
    // q, k, v, attention's output, and q and k before their norms.
    let normed = if spec.qk_norm == QkNorm::None { 0 } else { t * (q + kv) };
    let adapters = sizes.adapters_saved(t, spec.linears());
    let saved = rms_norm_cost(normed, sizes.dtype).saved_bytes + attention.forward().saved_bytes + adapters;
    // Of backward: the gradients of the sum, of attention's output, of q, k and v.
    let qkv = t * s * (d + 2 * q + 2 * kv);
    let residual = 2 * sizes.activation_bytes() - sizes.output_bytes();
    // Norms of heads save the joined rows of q, k and v, from which backward copies the values.
    let values = if spec.qk_norm == QkNorm::PerHead { t * kv * s } else { 0 };
    let of_attention = saved + qkv + values + attention.backward().scratch_bytes + sizes.exchange.backward_bytes;
    let is_joined = spec.qk_norm != QkNorm::AllHeads && spec.qkv.iter().all(LinearSpec::is_plain);
    let of_projections = match is_joined {
        // After that of attention: the layer's output, the gradient of the sum, the recomputed norm, the gradient of the joined
        // rows, and that of their input.
        true => t * s * (4 * d + q + 2 * kv),
        // The gradients of q and k, those of their inputs, and the sum of these.
        false => t * s * (5 * d + q + kv),
    };
    MixerCost {
        saved,
        saved_by_selective: attention.replay_bytes(),
        forward: qkv + attention.forward().scratch_bytes + sizes.exchange.forward_bytes,
        until_forward_ends: attention.reference_forward_bytes(),
        backward: residual + of_attention.max(of_projections),
        rope: rope_cost(t, spec.rotary_dim as u64).saved_bytes,
        state_elements: 2 * kv,
    }
}

fn attention_cost(spec: &SelfAttentionSpec, sizes: &LayerSizes) -> AttentionCost {
    let (n_query, n_kv) = (spec.n_heads / sizes.n_slices, spec.n_kv_heads / sizes.n_slices);
    AttentionCost {
        n_tokens: sizes.n_tokens,
        longest: sizes.longest,
        heads: AttentionHeads { n_query, n_kv, dim: spec.head_dim },
        dtype: sizes.dtype,
        implementation: sizes.attention,
        device: sizes.device,
    }
}
