//! Self-attention.
//!
//! Dimensions: t tokens (packed), d hidden size, h query heads, g KV heads, k head size

use candle_core::{D, Result, Tensor};
use candlewick_ops::{self as ops, AttentionSpec, NormCall, QkNorms, QkvHeads};

use super::spec::SelfAttentionSpec;
use crate::mixer::Mixer;
use crate::{AttentionCall, ForwardContext, Linear, QkNorm, WeightLookup, norm::Norm};

/// Causal self-attention over the heads of this rank, which may be a subset under tensor parallelism.
pub(super) struct SelfAttention {
    layer_idx: usize,
    head_dim: usize,
    window: Option<usize>,
    qkv: [Linear; 3],
    qk_norm: QkNorm,
    qk_norms: Option<[Norm; 2]>,
    o: Linear,
}

impl Mixer for SelfAttention {
    fn forward(&self, normed_td: Tensor, context: &ForwardContext) -> Result<Tensor> {
        let x_td = context.parallel_ops.tokens.copy_to_tp(&normed_td)?;
        drop(normed_td);
        let qkv = self.qkv(&x_td, context)?;
        drop(x_td);
        self.attend(qkv, context)
    }

    fn forward_of_norm(&self, norm: NormCall<'_>, context: &ForwardContext) -> Result<Option<Tensor>> {
        self.qkv_of_norm(norm, context)?.map(|qkv| self.attend(qkv, context)).transpose()
    }
}

impl SelfAttention {
    /// Builds the layer from the parameters that `get` returns by name.
    pub(super) fn build(spec: &SelfAttentionSpec, layer_idx: usize, get: &mut WeightLookup) -> Result<Self> {
        let [q, k, v] = &spec.qkv;
        let qkv = [Linear::build(q, get)?, Linear::build(k, get)?, Linear::build(v, get)?];
        let qk_norms = match spec.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead | QkNorm::AllHeads => {
                let [q, k] = spec.qk_norms();
                Some([get(&q)?, get(&k)?].map(|weight| Norm { weight, eps: spec.norm_eps }))
            }
        };
        let (head_dim, window, qk_norm) = (spec.head_dim, spec.window, spec.qk_norm);
        Ok(Self { layer_idx, head_dim, window, qkv, qk_norm, qk_norms, o: Linear::build(&spec.o, get)? })
    }

    /// Computes attention and the output projection.
    fn attend(&self, [q_thk, k_tgk, v_tgk]: [Tensor; 3], context: &ForwardContext) -> Result<Tensor> {
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
        let y_thk = context.parallel_ops.sequence.attention(&call)?;
        let y_td = ops::reshape(&y_thk, (y_thk.dim(0)?, n_out))?;
        let dropout = context.dropout().map(|dropout| dropout.in_columns(context.parallel_ops.tokens.input_shard()));
        context.parallel_ops.tokens.reduce_from_tp(&self.o.forward(&y_td, dropout.as_ref())?)
    }

    /// Returns queries and keys with their norms and RoPE applied, and values. Adjacent weights need a single matmul.
    fn qkv(&self, x_td: &Tensor, context: &ForwardContext) -> Result<[Tensor; 3]> {
        let dropout = context.dropout();
        let joined = match self.qk_norm {
            // Its rows are the heads of one projection.
            QkNorm::AllHeads => None,
            QkNorm::None | QkNorm::PerHead => Linear::forward_joined(&self.qkv, x_td, dropout.as_ref())?,
        };
        let Some(qkv) = joined else {
            return self.heads(self.qkv.each_ref(), |layer| layer.forward(x_td, dropout.as_ref()), context);
        };
        let [n_q, n_kv, _] = self.qkv.each_ref().map(|projection| projection.n_outputs() / self.head_dim);
        let heads = QkvHeads { n_q, n_kv, dim: self.head_dim };
        let norms = self.qk_norms.as_ref().map(|[q, k]| QkNorms { weights: [&q.weight, &k.weight], eps: q.eps });
        ops::split_qkv(&qkv, heads, norms, context.cos, context.sin)
    }

    /// Returns [`qkv`](Self::qkv) of a norm that is quantized as it is computed; `None` if it must be computed first.
    fn qkv_of_norm(&self, norm: NormCall<'_>, context: &ForwardContext) -> Result<Option<[Tensor; 3]>> {
        let reads_norm = !context.parallel_ops.tokens.exchanges_inputs();
        let Some(linears) = Linear::without_adapters(self.qkv.each_ref()).filter(|_| reads_norm) else {
            return Ok(None);
        };
        let Some((_, outputs)) = ops::fp8_normed_linears(norm, linears)? else { return Ok(None) };
        self.heads(outputs, Ok, context).map(Some)
    }

    /// Returns queries and keys [t, h, k] with their norm and RoPE applied, and values. `project` returns the outputs [t, h * k].
    fn heads<P>(
        &self,
        [q, k, v]: [P; 3],
        project: impl Fn(P) -> Result<Tensor>,
        context: &ForwardContext,
    ) -> Result<[Tensor; 3]> {
        let [q_norm, k_norm] = self.qk_norms.as_ref().map_or([None; 2], |norms| norms.each_ref().map(Some));
        Ok([
            self.rotated_heads(project(q)?, q_norm, context)?,
            self.rotated_heads(project(k)?, k_norm, context)?,
            self.split_heads(&project(v)?)?,
        ])
    }

    /// Splits [t, h * k] into heads [t, h, k], applies the QK norm if there is one, and RoPE.
    fn rotated_heads(&self, y: Tensor, norm: Option<&Norm>, context: &ForwardContext) -> Result<Tensor> {
        let y_thk = match (norm, self.qk_norm) {
            (Some(norm), QkNorm::AllHeads) => self.split_heads(&norm.forward(&y)?)?,
            (Some(Norm { weight, eps }), _) => {
                return ops::rms_norm_rope(&self.split_heads(&y)?, weight, *eps, context.cos, context.sin);
            }
            (None, _) => self.split_heads(&y)?,
        };
        ops::rope(&y_thk, context.cos, context.sin)
    }

    /// Splits [t, h * k] into heads [t, h, k].
    fn split_heads(&self, y: &Tensor) -> Result<Tensor> {
        ops::reshape(y, (y.dim(0)?, y.dim(D::Minus1)? / self.head_dim, self.head_dim))
    }
}
