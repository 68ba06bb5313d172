//! A decoder layer, and the parallel operations that it calls.
//!
//! Dimensions: t tokens (packed), d hidden size, h query heads, g KV heads, k head size, f MLP intermediate size

use candle_core::{D, Result, Tensor};
use candlewick_ops::{
    self as ops, AttentionChoice, AttentionSpec, ColumnShard, CuSeqlens, OutputDtype, QkvHeads, RowRanges, Weight,
};

use crate::moe::Moe;
use crate::{
    ExpertCall, ExpertCounts, LayerSpec, Linear, MixerSpec, MlpSpec, QkNorm, RouterLoss, SelfAttentionSpec, SwiGluSpec,
    dropout::DropoutScope, norm::Norm,
};

/// Arguments of one layer's attention: t tokens, h query heads, g KV heads, k head size.
#[derive(Clone, Copy)]
pub struct AttentionCall<'a> {
    /// Index of the layer.
    pub layer_idx: usize,
    /// Queries [t, h, k].
    pub q: &'a Tensor,
    /// Keys [t, g, k].
    pub k: &'a Tensor,
    /// Values [t, g, k].
    pub v: &'a Tensor,
    /// Sequence boundaries.
    pub seqs: &'a CuSeqlens,
    /// Scale, mask and kernel.
    pub spec: &'a AttentionSpec,
}

/// Collectives and attention of a layer under parallelism. The default methods are those of one device.
pub trait ParallelOps {
    /// Looks up embeddings: u32 token ids [t] -> [t, d]. The row of token `padding` gets no gradient.
    fn embedding(&self, ids: &Tensor, table: &Weight, padding: Option<u32>) -> Result<Tensor> {
        ops::embedding(ids, table, padding)
    }

    /// Prepares the input of attention or of the MLP: [t, d] -> [t, d]. Under sequence parallelism it all-gathers the
    /// tokens.
    fn copy_to_tp(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }

    /// Returns the number of ranks that split the residual stream along the sequence; 1 without sequence parallelism.
    fn sequence_parallel_size(&self) -> usize {
        1
    }

    /// Returns the input columns of the row-parallel output projection that this rank holds.
    fn input_shard(&self) -> ColumnShard {
        ColumnShard::ALL
    }

    /// Reduces the output of attention or of the MLP over the tensor parallel ranks: [t, d] -> [t, d].
    fn reduce_from_tp(&self, y: &Tensor) -> Result<Tensor> {
        Ok(y.clone())
    }

    /// Computes attention: q [t, h, k], k and v [t, g, k] -> [t, h, k].
    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        let AttentionCall { q, k, v, seqs, spec, .. } = *call;
        ops::attention(q, k, v, seqs, spec)
    }

    /// Computes the routed experts of an MoE layer: [t, d] -> [t, d].
    fn experts(&self, call: &ExpertCall) -> Result<Tensor> {
        call.compute()
    }

    /// Sums a tensor without gradient over the ranks that split a micro-batch's tokens.
    fn sum_over_micro_batch(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }
}

/// The operations of an unsharded model on one device, without a KV cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleDevice;

impl ParallelOps for SingleDevice {}

/// Tiling of a layer's MLP over the tokens (ArcticTraining's `tiled_mlp`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TiledMlp {
    /// All tokens at once. Activations are saved for backward.
    #[default]
    Off,
    /// Tiles of about hidden_size tokens each. Backward recomputes each tile's activations.
    On,
}

/// Inputs of a forward pass that all layers share.
#[derive(Clone, Copy)]
pub struct ForwardContext<'a> {
    /// Cosines of the rotary angles, f32 [t, k/2].
    pub cos: &'a Tensor,
    /// Sines of the rotary angles, f32 [t, k/2].
    pub sin: &'a Tensor,
    /// Boundaries of the packed sequences.
    pub seqs: &'a CuSeqlens,
    /// Seed of dropout masks; `None` disables dropout.
    pub dropout_key: Option<u64>,
    /// Rows of the micro-batch that this rank computes.
    pub rows: &'a RowRanges,
    /// Attention implementation.
    pub attention: AttentionChoice,
    /// Tiling of the MLP over the tokens.
    pub tiled_mlp: TiledMlp,
    /// Auxiliary losses of the routers.
    pub router_losses: &'a [RouterLoss],
    /// Rows of the residual stream that are no padding, u32 [n]; `None` for all. Router losses count these alone.
    pub valid_rows: Option<&'a Tensor>,
    /// Sums of expert selections; `None` if they are not wanted.
    pub expert_counts: Option<&'a ExpertCounts>,
    /// Collectives and attention of this rank.
    pub parallel_ops: &'a dyn ParallelOps,
}

impl ForwardContext<'_> {
    fn dropout(&self) -> Option<DropoutScope> {
        self.dropout_key.map(|key| DropoutScope::new(key, self.rows))
    }
}

/// A decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)).
pub struct Layer {
    input_norm: Norm,
    mixer: Mixer,
    mlp_norm: Norm,
    mlp: Mlp,
}

/// A token-mixing sublayer.
enum Mixer {
    Attention(SelfAttention),
}

/// Causal self-attention over the heads of this rank, which may be a subset under tensor parallelism.
struct SelfAttention {
    layer_idx: usize,
    head_dim: usize,
    window: Option<usize>,
    qkv: [Linear; 3],
    qk_norm: QkNorm,
    qk_norms: Option<[Norm; 2]>,
    o: Linear,
}

/// A sublayer that acts on each token separately.
enum Mlp {
    SwiGlu(SwiGlu),
    Moe(Moe),
}

#[derive(Clone)]
pub(crate) struct SwiGlu {
    gate_up: [Linear; 2],
    down: Linear,
}

impl Layer {
    /// Builds the layer from the parameters that `get` returns by name.
    pub(crate) fn build(spec: &LayerSpec, get: &mut impl FnMut(&str) -> Result<Weight>) -> Result<Self> {
        let MixerSpec::Attention(attention) = &spec.mixer;
        Ok(Self {
            input_norm: Norm { weight: get(&spec.input_norm())?, eps: spec.norm_eps },
            mixer: Mixer::Attention(SelfAttention::build(spec, attention, get)?),
            mlp_norm: Norm { weight: get(&spec.mlp_norm())?, eps: spec.norm_eps },
            mlp: match &spec.mlp {
                MlpSpec::SwiGlu(mlp) => Mlp::SwiGlu(SwiGlu::build(mlp, get)?),
                MlpSpec::Moe(moe) => Mlp::Moe(Moe::build(moe, spec.layer_idx, get)?),
            },
        })
    }

    /// Computes [t, d] -> [t, d].
    pub(crate) fn forward(&self, x_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let Mixer::Attention(attention) = &self.mixer;
        let mixed_td = attention.forward(&self.input_norm.forward(x_td)?, context)?;
        let Norm { weight, eps } = &self.mlp_norm;
        let (x_td, normed_td) = ops::add_rms_norm(x_td, &mixed_td, weight, *eps)?;
        ops::add(&x_td, &self.mlp.forward(&normed_td, context)?)
    }
}

impl SelfAttention {
    fn build(
        layer: &LayerSpec,
        spec: &SelfAttentionSpec,
        get: &mut impl FnMut(&str) -> Result<Weight>,
    ) -> Result<Self> {
        let [q, k, v] = &spec.qkv;
        let qkv = [Linear::build(q, get)?, Linear::build(k, get)?, Linear::build(v, get)?];
        let qk_norms = match spec.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead | QkNorm::AllHeads => {
                let [q, k] = layer.qk_norms();
                Some([get(&q)?, get(&k)?].map(|weight| Norm { weight, eps: layer.norm_eps }))
            }
        };
        let (layer_idx, head_dim, window) = (layer.layer_idx, spec.head_dim, spec.window);
        let qk_norm = spec.qk_norm;
        Ok(Self { layer_idx, head_dim, window, qkv, qk_norm, qk_norms, o: Linear::build(&spec.o, get)? })
    }

    fn forward(&self, x_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let x_td = &context.parallel_ops.copy_to_tp(x_td)?;
        let [q_thk, k_tgk, v_tgk] = self.qkv(x_td, context)?;
        let spec = AttentionSpec {
            scale: (self.head_dim as f64).powf(-0.5) as f32,
            causal: true,
            window: self.window,
            choice: context.attention,
        };
        let n_out = q_thk.dim(1)? * q_thk.dim(2)?;
        let call = AttentionCall {
            layer_idx: self.layer_idx,
            q: &q_thk,
            k: &k_tgk,
            v: &v_tgk,
            seqs: context.seqs,
            spec: &spec,
        };
        let y_thk = context.parallel_ops.attention(&call)?;
        let y_td = ops::reshape(&y_thk, (x_td.dim(0)?, n_out))?;
        let dropout = context.dropout().map(|dropout| dropout.in_columns(context.parallel_ops.input_shard()));
        context.parallel_ops.reduce_from_tp(&self.o.forward(&y_td, dropout.as_ref())?)
    }

    /// Returns queries and keys with RoPE applied, and values. Adjacent weights need a single matmul.
    fn qkv(&self, x_td: &Tensor, context: &ForwardContext) -> Result<[Tensor; 3]> {
        let joined = if self.qk_norms.is_some() { None } else { Linear::joined(&self.qkv, x_td) };
        let Some(joined) = joined else {
            let [q, k, v] = &self.qkv;
            let [q_norm, k_norm] = self.qk_norms.as_ref().map_or([None; 2], |norms| norms.each_ref().map(Some));
            return Ok([
                self.rotated_heads(q, q_norm, x_td, context)?,
                self.rotated_heads(k, k_norm, x_td, context)?,
                self.heads(v, x_td, context)?,
            ]);
        };
        let [n_q, n_kv, _] = self.qkv.each_ref().map(|projection| projection.n_outputs() / self.head_dim);
        let heads = QkvHeads { n_q, n_kv, dim: self.head_dim };
        ops::split_qkv(&ops::linear(x_td, &joined, None, OutputDtype::SameAsInput)?, heads, context.cos, context.sin)
    }

    /// Projects to heads [t, h, k], applies the QK norm if there is one, and RoPE.
    fn rotated_heads(
        &self,
        projection: &Linear,
        norm: Option<&Norm>,
        x_td: &Tensor,
        context: &ForwardContext,
    ) -> Result<Tensor> {
        let x_thk = match (norm, self.qk_norm) {
            (Some(norm), QkNorm::AllHeads) => {
                let x = projection.forward(x_td, context.dropout().as_ref())?;
                self.split_heads(&norm.forward(&x)?)?
            }
            (Some(norm), _) => norm.forward(&self.heads(projection, x_td, context)?)?,
            (None, _) => self.heads(projection, x_td, context)?,
        };
        ops::rope(&x_thk, context.cos, context.sin)
    }

    /// Projects to heads [t, h, k].
    fn heads(&self, projection: &Linear, x_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        self.split_heads(&projection.forward(x_td, context.dropout().as_ref())?)
    }

    /// Splits [t, h * k] into heads [t, h, k].
    fn split_heads(&self, y: &Tensor) -> Result<Tensor> {
        ops::reshape(y, (y.dim(0)?, y.dim(D::Minus1)? / self.head_dim, self.head_dim))
    }
}

impl Mlp {
    fn forward(&self, x_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        match self {
            Self::SwiGlu(mlp) => mlp.forward_sublayer(x_td, context),
            Self::Moe(moe) => moe.forward(x_td, context),
        }
    }
}

impl SwiGlu {
    pub(crate) fn build(spec: &SwiGluSpec, get: &mut impl FnMut(&str) -> Result<Weight>) -> Result<Self> {
        let [gate, up] = &spec.gate_up;
        let gate_up = [Linear::build(gate, get)?, Linear::build(up, get)?];
        Ok(Self { gate_up, down: Linear::build(&spec.down, get)? })
    }

    /// Computes [t, d] -> [t, d] between the collectives of a sublayer, in tiles as the context sets.
    pub(crate) fn forward_sublayer(&self, x_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let (dropout, columns) = (context.dropout(), context.parallel_ops.input_shard());
        let x_td = &context.parallel_ops.copy_to_tp(x_td)?;
        let y_td = match context.tiled_mlp {
            TiledMlp::Off => self.forward(x_td, dropout.as_ref(), columns)?,
            TiledMlp::On => {
                let mlp = self.clone();
                ops::tiled(x_td, ops::tile_rows(x_td.dim(0)?, x_td.dim(1)?), move |x_td, first_row| {
                    let dropout = dropout.as_ref().map(|dropout| dropout.at_row(first_row));
                    mlp.forward(x_td, dropout.as_ref(), columns)
                })?
            }
        };
        context.parallel_ops.reduce_from_tp(&y_td)
    }

    /// Computes [t, d] -> [t, d]. `columns` are those of the down projection's input on this rank.
    fn forward(&self, x_td: &Tensor, dropout: Option<&DropoutScope>, columns: ColumnShard) -> Result<Tensor> {
        let gated_tf = match Linear::joined(&self.gate_up, x_td) {
            Some(joined) => ops::swiglu_joined(&ops::linear(x_td, &joined, None, OutputDtype::SameAsInput)?)?,
            None => {
                let [gate, up] = &self.gate_up;
                ops::swiglu(&gate.forward(x_td, dropout)?, &up.forward(x_td, dropout)?)?
            }
        };
        self.down.forward(&gated_tf, dropout.map(|dropout| dropout.in_columns(columns)).as_ref())
    }
}
