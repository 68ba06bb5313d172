//! Causal softmax attention with RoPE.

mod cost;
mod forward;
mod spec;

use candle_core::Result;

use super::{AttentionShape, Mixer, MixerCost, MixerSpec, MixerSplit};
use crate::{
    Dim, DimSize, LayerSizes, LinearFusion, LinearGroup, LinearSpec, ParamScope, ParamSpec, QkNorm, WeightLookup,
};
use forward::SelfAttention;

pub use spec::SelfAttentionSpec;

impl MixerSpec for SelfAttentionSpec {
    fn kind(&self) -> &'static str {
        "attention"
    }

    fn linears(&self) -> Vec<&LinearSpec> {
        self.qkv.iter().chain([&self.o]).collect()
    }

    fn linears_mut(&mut self) -> Vec<&mut LinearSpec> {
        self.qkv.iter_mut().chain([&mut self.o]).collect()
    }

    fn own_params(&self, _: f64) -> Vec<ParamSpec> {
        let widths = match self.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some([DimSize { dim: Dim::HeadDim, len: self.head_dim }; 2]),
            QkNorm::AllHeads => Some([self.qkv[0].out, self.qkv[1].out]),
        };
        let names_and_widths = self.qk_norms().into_iter().zip(widths.into_iter().flatten());
        names_and_widths.map(|(name, width)| ParamSpec::norm(name, width, ParamScope::Sublayer)).collect()
    }

    fn linear_groups(&self) -> Vec<LinearGroup<'_>> {
        let fusion = LinearFusion::SharedInput {
            joined: self.qk_norm != QkNorm::AllHeads && self.qkv.iter().all(LinearSpec::is_plain),
            quantizes_norm: self.qkv.iter().all(|linear| linear.adapter.is_none()),
        };
        vec![LinearGroup { linears: self.qkv.iter().collect(), fusion }, LinearGroup::single(&self.o)]
    }

    fn attention_shape(&self) -> Option<AttentionShape> {
        let Self { n_heads, n_kv_heads, head_dim, window, .. } = *self;
        Some(AttentionShape { n_heads, n_kv_heads, head_dim, window })
    }

    fn refusal(&self, split: MixerSplit) -> Option<String> {
        let norms_all_heads = self.qk_norm == QkNorm::AllHeads && split == MixerSplit::Tensor;
        norms_all_heads.then(|| "the QK norm of this model covers all heads".to_owned())
    }

    fn cost(&self, sizes: &LayerSizes) -> MixerCost {
        cost::cost(self, sizes)
    }

    fn build(&self, layer_idx: usize, get: &mut WeightLookup) -> Result<Box<dyn Mixer>> {
        Ok(Box::new(SelfAttention::build(self, layer_idx, get)?))
    }
}
