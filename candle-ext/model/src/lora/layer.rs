//! LoRA factors of one linear layer.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, Weight};

use super::AdapterSpec;
use crate::{
    WeightLookup,
    dropout::DropoutScope,
    param::{FNV_START, fnv1a},
};

/// A LoRA adapter: scaling * (dropout(x) A^T) B^T.
#[derive(Clone, Debug)]
pub struct Lora {
    a: Weight,
    b: Weight,
    scaling: f64,
    dropout: f64,
    /// Hash of the module's name, which makes dropout masks differ between layers.
    module_hash: u64,
}

impl Lora {
    pub(crate) fn build(spec: &AdapterSpec, get: &mut WeightLookup) -> Result<Self> {
        Ok(Self {
            a: get(&spec.a_name())?,
            b: get(&spec.b_name())?,
            scaling: spec.scaling,
            dropout: spec.dropout,
            module_hash: fnv1a(FNV_START, &spec.module),
        })
    }

    /// Adds the adapter's output for `x` to `base`, in the dtype of `base`: that of x, or f32.
    pub(crate) fn add_to(&self, base: &Tensor, x: &Tensor, dropout: Option<&DropoutScope>) -> Result<Tensor> {
        ops::linear_plus(&self.down(x, dropout)?, &self.b, base)
    }

    /// Adds the adapter's output for `x` to columns of `joined` from `first` on, in place.
    pub(crate) fn add_to_columns(
        &self,
        (joined, first): (&Tensor, usize),
        x: &Tensor,
        dropout: Option<&DropoutScope>,
    ) -> Result<Tensor> {
        ops::linear_plus_columns(&self.down(x, dropout)?, &self.b, joined, first)
    }

    /// Computes scaling * dropout(x) A^T.
    fn down(&self, x: &Tensor, dropout: Option<&DropoutScope>) -> Result<Tensor> {
        let x = match dropout {
            Some(dropout) => dropout.apply(self.module_hash, self.dropout, x)?,
            None => x.clone(),
        };
        // The scaling applies to the smallest tensor, before rounding.
        ops::linear_scaled(&x, &self.a, self.scaling)
    }
}
