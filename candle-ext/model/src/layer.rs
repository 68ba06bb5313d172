//! Specification of a decoder layer, from which the layer is built and memory and FLOPs are estimated.

use crate::linear_spec::layer_name;
use crate::{
    AdapterSpec, Config, Dim, DimSize, ExpertAdapterSpec, ExpertMatrixSpec, LinearSpec, MoeSpec, ParamScope, ParamSpec,
    QkNorm, SwiGluSpec,
};

/// One decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)).
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Index of the layer.
    pub layer_idx: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f64,
    /// Token-mixing sublayer (attention).
    pub mixer: MixerSpec,
    /// MLP sublayer.
    pub mlp: MlpSpec,
}

/// Kind of the token-mixing sublayer.
#[derive(Clone, Debug, PartialEq)]
pub enum MixerSpec {
    /// Softmax attention.
    Attention(SelfAttentionSpec),
}

/// Causal self-attention with RoPE and grouped KV heads (GQA).
#[derive(Clone, Debug, PartialEq)]
pub struct SelfAttentionSpec {
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
    /// Projections to queries, keys and values, in this order.
    pub qkv: [LinearSpec; 3],
    /// The output projection.
    pub o: LinearSpec,
}

/// Kind of the MLP sublayer.
#[derive(Clone, Debug, PartialEq)]
pub enum MlpSpec {
    /// down(silu(gate(x)) * up(x)).
    SwiGlu(Box<SwiGluSpec>),
    /// Mixture of experts.
    Moe(Box<MoeSpec>),
}

impl Config {
    /// Returns the specification of layer `layer_idx` without LoRA. Later layers have the shape of the
    /// last.
    pub fn layer(&self, layer_idx: usize) -> LayerSpec {
        let like = layer_idx.min(self.n_layers().saturating_sub(1));
        LayerSpec {
            layer_idx,
            hidden_size: self.typed.hidden_size,
            norm_eps: self.typed.rms_norm_eps,
            mixer: MixerSpec::Attention(self.self_attention(layer_idx, self.window(like))),
            mlp: match self.moe_of_layer(like) {
                Some(moe) => MlpSpec::Moe(Box::new(self.moe_spec(moe, layer_idx))),
                None => {
                    let name = format!("{}.mlp", layer_name(layer_idx));
                    MlpSpec::SwiGlu(Box::new(self.swiglu(&name, self.typed.intermediate_size)))
                }
            },
        }
    }

    fn self_attention(&self, layer_idx: usize, window: Option<usize>) -> SelfAttentionSpec {
        let t = &self.typed;
        let q = DimSize { dim: Dim::Heads, len: t.n_heads * t.head_dim };
        let kv = DimSize { dim: Dim::KvHeads, len: t.n_kv_heads * t.head_dim };
        let linear = |name: &str, [out, input]: [DimSize; 2], bias| {
            LinearSpec::new(format!("{}.self_attn.{name}", layer_name(layer_idx)), [out, input], bias)
        };
        SelfAttentionSpec {
            n_heads: t.n_heads,
            n_kv_heads: t.n_kv_heads,
            head_dim: t.head_dim,
            rotary_dim: t.rotary_dim,
            window,
            qk_norm: t.qk_norm,
            qkv: [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
                .map(|(name, out)| linear(name, [out, self.embed()], t.qkv_bias)),
            o: linear("o_proj", [self.embed(), q], t.o_bias),
        }
    }
}

impl LayerSpec {
    /// Returns the Hugging Face module name, such as `model.layers.0`.
    pub fn name(&self) -> String {
        layer_name(self.layer_idx)
    }

    /// Returns the number of routed experts; `None` for a dense MLP.
    pub fn n_experts(&self) -> Option<usize> {
        match &self.mlp {
            MlpSpec::SwiGlu(_) => None,
            MlpSpec::Moe(moe) => Some(moe.n_experts),
        }
    }

    /// Returns the name of the router's expert bias; `None` without one.
    pub fn expert_bias_name(&self) -> Option<String> {
        match &self.mlp {
            MlpSpec::Moe(moe) if moe.expert_bias => Some(moe.expert_bias_name()),
            _ => None,
        }
    }

    /// Returns the linear layers in forward order.
    pub fn linears(&self) -> impl Iterator<Item = &LinearSpec> {
        self.mixer.linears().chain(self.mlp.linears())
    }

    /// Returns the linear layers in forward order.
    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut LinearSpec> {
        let MixerSpec::Attention(attention) = &mut self.mixer;
        let of_mixer = attention.qkv.iter_mut().chain([&mut attention.o]);
        let mlp = match &mut self.mlp {
            MlpSpec::SwiGlu(mlp) => Some(&mut **mlp),
            MlpSpec::Moe(moe) => moe.shared_expert.as_mut().map(|shared| &mut shared.mlp),
        };
        of_mixer.chain(mlp.into_iter().flat_map(|mlp| mlp.gate_up.iter_mut().chain([&mut mlp.down])))
    }

    /// Returns the LoRA adapters: of linear layers, the shared expert's gate, the router and the experts.
    pub fn adapters(&self) -> impl Iterator<Item = &AdapterSpec> {
        let linears = self.linears().chain(self.shared_expert_gate()).chain(self.router());
        linears
            .filter_map(|linear| linear.adapter.as_ref())
            .chain(self.expert_adapters().map(|adapter| &adapter.adapter))
    }

    /// Returns the gate of the shared expert; `None` without one.
    pub fn shared_expert_gate(&self) -> Option<&LinearSpec> {
        if let MlpSpec::Moe(moe) = &self.mlp { moe.shared_expert_gate() } else { None }
    }

    /// Returns the router; `None` for a dense layer.
    pub fn router(&self) -> Option<&LinearSpec> {
        if let MlpSpec::Moe(moe) = &self.mlp { Some(&moe.router_weight) } else { None }
    }

    /// Returns the LoRA adapters of the routed experts.
    pub fn expert_adapters(&self) -> impl Iterator<Item = &ExpertAdapterSpec> {
        self.expert_matrices().flat_map(|matrix| &matrix.adapters)
    }

    /// Returns the matrices of the routed experts; none for a dense layer.
    pub fn expert_matrices(&self) -> impl Iterator<Item = &ExpertMatrixSpec> {
        let moe = if let MlpSpec::Moe(moe) = &self.mlp { Some(&**moe) } else { None };
        moe.into_iter().flat_map(MoeSpec::expert_matrices)
    }

    /// Returns the name of the norm before the mixer.
    pub(crate) fn input_norm(&self) -> String {
        format!("{}.input_layernorm.weight", self.name())
    }

    /// Returns the name of the norm before the MLP.
    pub(crate) fn mlp_norm(&self) -> String {
        format!("{}.post_attention_layernorm.weight", self.name())
    }

    /// Returns the names of the query norm and the key norm (QK norm).
    pub(crate) fn qk_norms(&self) -> [String; 2] {
        ["q_norm", "k_norm"].map(|norm| format!("{}.self_attn.{norm}.weight", self.name()))
    }

    /// Returns the parameters. Matrices are initialized with standard deviation `std`.
    pub(crate) fn params(&self, std: f64) -> Vec<ParamSpec> {
        let embed = DimSize { dim: Dim::Embed, len: self.hidden_size };
        let mut params = vec![ParamSpec::norm(self.input_norm(), embed, ParamScope::ResidualStream)];
        params.extend(self.linears().flat_map(|linear| linear.params(std)));
        let MixerSpec::Attention(attention) = &self.mixer;
        let widths = match attention.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some([DimSize { dim: Dim::HeadDim, len: attention.head_dim }; 2]),
            QkNorm::AllHeads => Some([attention.qkv[0].out, attention.qkv[1].out]),
        };
        let names_and_widths = self.qk_norms().into_iter().zip(widths.into_iter().flatten());
        params.extend(names_and_widths.map(|(name, width)| ParamSpec::norm(name, width, ParamScope::Sublayer)));
        params.push(ParamSpec::norm(self.mlp_norm(), embed, ParamScope::ResidualStream));
        if let MlpSpec::Moe(moe) = &self.mlp {
            params.extend(moe.params(std));
        }
        params
    }
}

impl MixerSpec {
    /// Returns the linear layers in forward order.
    pub fn linears(&self) -> impl Iterator<Item = &LinearSpec> {
        let Self::Attention(attention) = self;
        attention.qkv.iter().chain([&attention.o])
    }
}

impl MlpSpec {
    /// Returns the MLP of a dense layer, or the shared expert of an MoE layer.
    pub fn swiglu(&self) -> Option<&SwiGluSpec> {
        match self {
            Self::SwiGlu(mlp) => Some(mlp),
            Self::Moe(moe) => moe.shared_expert.as_ref().map(|shared| &shared.mlp),
        }
    }

    /// Returns the linear layers that adapters may target, in forward order: of an MoE layer those of the shared expert.
    pub fn linears(&self) -> impl Iterator<Item = &LinearSpec> {
        self.swiglu().into_iter().flat_map(|mlp| mlp.gate_up.iter().chain([&mlp.down]))
    }

    /// Returns the number of weight elements that a token is multiplied with: all of a dense MLP; of a mixture of experts
    /// the router, the selected experts and the shared expert.
    pub fn n_active_weights(&self) -> usize {
        let dense: usize = self.linears().map(LinearSpec::n_weights).sum();
        dense + if let Self::Moe(moe) = self { moe.n_active_routed_weights() } else { 0 }
    }
}
