//! A linear layer with its weight, bias and LoRA adapter.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, OutputDtype, Weight};

use crate::{LinearSpec, RouterDtype, WeightLookup, dropout::DropoutScope, lora::Lora};

/// A linear layer: y = x W^T + b, plus the adapter's output.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Weight>,
    adapter: Option<Adapter>,
}

/// A trainable adapter on a frozen linear layer.
#[derive(Clone, Debug)]
pub enum Adapter {
    /// LoRA.
    Lora(Lora),
}

impl Linear {
    /// Builds the layer from the parameters that `get` returns by name.
    pub fn build(spec: &LinearSpec, get: &mut WeightLookup) -> Result<Self> {
        Ok(Self {
            weight: get(&spec.weight_name())?,
            bias: spec.bias.then(|| get(&spec.bias_name())).transpose()?,
            adapter: spec.adapter.as_ref().map(|adapter| Lora::build(adapter, get).map(Adapter::Lora)).transpose()?,
        })
    }

    /// Creates a layer without bias and adapter.
    pub(crate) fn plain(weight: Weight) -> Self {
        Self { weight, bias: None, adapter: None }
    }

    /// Computes [.., in_features] -> [.., out_features]. LoRA dropout applies only with a `dropout` scope.
    pub fn forward(&self, x: &Tensor, dropout: Option<&DropoutScope>) -> Result<Tensor> {
        let base = ops::linear(x, &self.weight, self.bias.as_ref(), OutputDtype::SameAsInput)?;
        match &self.adapter {
            None => Ok(base),
            Some(adapter) => adapter.add_to(&base, x, dropout),
        }
    }

    /// Computes the logits of a router, [.., in_features] -> f32 [.., out_features].
    pub(crate) fn router_logits(
        &self,
        x: &Tensor,
        dtype: RouterDtype,
        dropout: Option<&DropoutScope>,
    ) -> Result<Tensor> {
        assert!(self.bias.is_none(), "routers have no bias");
        let base = match dtype {
            RouterDtype::F32 => ops::linear(x, &self.weight, None, OutputDtype::F32)?,
            RouterDtype::F64 => ops::linear_f64(x, &self.weight)?,
        };
        self.adapter.as_ref().map_or(Ok(base.clone()), |adapter| adapter.add_to(&base, x, dropout))
    }

    /// Returns the number of output features on this rank.
    pub(crate) fn n_outputs(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Returns the weights of layers without bias and adapter; `None` if one has any.
    pub(crate) fn plain_weights<const N: usize>(layers: [&Self; N]) -> Option<[&Weight; N]> {
        let is_plain = |layer: &&Self| layer.bias.is_none() && layer.adapter.is_none();
        layers.iter().all(is_plain).then(|| layers.map(|layer| &layer.weight))
    }

    /// Returns weights and biases of layers without adapters; `None` if one has an adapter.
    pub(crate) fn without_adapters<const N: usize>(layers: [&Self; N]) -> Option<[(&Weight, Option<&Weight>); N]> {
        let has_none = layers.iter().all(|layer| layer.adapter.is_none());
        has_none.then(|| layers.map(|layer| (&layer.weight, layer.bias.as_ref())))
    }

    /// Computes the outputs of several layers, side by side, with one matmul for their weights: [.., in] -> [.., sum of out].
    ///
    /// Returns `None` if the layers have a bias, or if one matmul does not pay for this `x`. On a GPU they may have adapters.
    pub(crate) fn forward_joined(
        layers: &[Self],
        x: &Tensor,
        dropout: Option<&DropoutScope>,
    ) -> Result<Option<Tensor>> {
        let has = |is: fn(&Self) -> bool| layers.iter().any(is);
        if has(|layer| layer.bias.is_some()) || (has(|layer| layer.adapter.is_some()) && !ops::joins_adapters(x)?) {
            return Ok(None);
        }
        let weights: Vec<&Weight> = layers.iter().map(|layer| &layer.weight).collect();
        let Some(weight) = Weight::joined(&weights, x) else { return Ok(None) };
        let mut y = ops::linear(x, &weight, None, OutputDtype::SameAsInput)?;
        let mut first = 0;
        for layer in layers {
            if let Some(Adapter::Lora(lora)) = &layer.adapter {
                y = lora.add_to_columns((&y, first), x, dropout)?;
            }
            first += layer.n_outputs();
        }
        Ok(Some(y))
    }
}

impl Adapter {
    /// Adds the adapter's output for `x` to `base`, the output of the frozen layer.
    fn add_to(&self, base: &Tensor, x: &Tensor, dropout: Option<&DropoutScope>) -> Result<Tensor> {
        match self {
            Self::Lora(lora) => lora.add_to(base, x, dropout),
        }
    }
}
