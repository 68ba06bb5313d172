//! Specification of self-attention.

use crate::linear_spec::layer_name;
use crate::{Config, Dim, DimSize, LinearSpec, QkNorm};

/// Causal self-attention with RoPE and grouped KV heads (GQA).
#[derive(Clone, Debug, PartialEq)]
pub struct SelfAttentionSpec {
    /// Name of the module, such as `model.layers.0.self_attn`.
    pub module: String,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of KV heads.
    pub n_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Rotated elements of a head.
    pub rotary_dim: usize,
    /// The sliding window: query i attends to key j while i - j < window.
    pub window: Option<usize>,
    /// RMS norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Epsilon of the norms of queries and keys.
    pub norm_eps: f64,
    /// Projections to queries, keys and values, in this order.
    pub qkv: [LinearSpec; 3],
    /// The output projection.
    pub o: LinearSpec,
}

impl Config {
    /// Returns the specification of layer `layer_idx`'s attention.
    pub(crate) fn self_attention(&self, layer_idx: usize, window: Option<usize>) -> SelfAttentionSpec {
        let t = &self.typed;
        let module = format!("{}.self_attn", layer_name(layer_idx));
        let q = DimSize { dim: Dim::Heads, len: t.n_heads * t.head_dim };
        let kv = DimSize { dim: Dim::KvHeads, len: t.n_kv_heads * t.head_dim };
        let linear = |name: &str, shape, bias| LinearSpec::new(format!("{module}.{name}"), shape, bias);
        SelfAttentionSpec {
            n_heads: t.n_heads,
            n_kv_heads: t.n_kv_heads,
            head_dim: t.head_dim,
            rotary_dim: t.rotary_dim,
            window,
            qk_norm: t.qk_norm,
            norm_eps: t.rms_norm_eps,
            qkv: [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
                .map(|(name, out)| linear(name, [out, self.embed()], t.qkv_bias)),
            o: linear("o_proj", [self.embed(), q], t.o_bias),
            module,
        }
    }
}

impl SelfAttentionSpec {
    /// Returns the names of the query norm and the key norm (QK norm).
    pub(super) fn qk_norms(&self) -> [String; 2] {
        ["q_norm", "k_norm"].map(|norm| format!("{}.{norm}.weight", self.module))
    }
}
