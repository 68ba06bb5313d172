//! A linear layer as a value: its weight, bias and adapter are found once, when the layer is built.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, OutputDtype, Weight};

use crate::{LinearSpec, dropout::DropoutScope, lora::Lora};

/// y = x W^T + b, plus what the adapter adds.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Weight>,
    adapter: Option<Adapter>,
}

/// A trained change of a frozen linear layer.
#[derive(Clone, Debug)]
pub enum Adapter {
    /// Low-rank adaptation.
    Lora(Lora),
}

impl Linear {
    /// Builds the layer from the parameters that `get` returns by name.
    pub(crate) fn build(spec: &LinearSpec, get: &mut impl FnMut(&str) -> Result<Weight>) -> Result<Self> {
        Ok(Self {
            weight: get(&spec.weight_name())?,
            bias: spec.bias.then(|| get(&spec.bias_name())).transpose()?,
            adapter: spec.adapter.as_ref().map(|adapter| Lora::build(adapter, get).map(Adapter::Lora)).transpose()?,
        })
    }

    /// Computes [.., inputs] -> [.., outputs]. Adapters drop no inputs without a dropout scope.
    pub(crate) fn forward(&self, x: &Tensor, dropout: Option<&DropoutScope>) -> Result<Tensor> {
        let base = ops::linear(x, &self.weight, self.bias.as_ref(), OutputDtype::SameAsInput)?;
        match &self.adapter {
            None => Ok(base),
            Some(adapter) => adapter.add_to(&base, x, dropout),
        }
    }

    /// Returns the number of outputs on this rank.
    pub(crate) fn n_outputs(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Joins the weights of layers into one, if one matmul with `x` is as good and the layers have neither bias nor adapter.
    pub(crate) fn joined(layers: &[Self], x: &Tensor) -> Option<Weight> {
        let is_plain = |layer: &&Self| layer.bias.is_none() && layer.adapter.is_none();
        let weights = layers.iter().map(|layer| Some(layer).filter(is_plain).map(|layer| &layer.weight));
        Weight::joined(&weights.collect::<Option<Vec<_>>>()?, x)
    }
}

impl Adapter {
    /// Adds what the adapter computes from `x` to the output `base` of the frozen layer.
    fn add_to(&self, base: &Tensor, x: &Tensor, dropout: Option<&DropoutScope>) -> Result<Tensor> {
        match self {
            Self::Lora(lora) => lora.add_to(base, x, dropout),
        }
    }
}
