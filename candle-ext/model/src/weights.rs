//! The weights of one unit at hand: name -> value and gradient sink, with the adapters that sit on its linear layers.

use std::collections::HashMap;

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, Dropout, Precision, Weight};

use crate::{
    Adapter, Unit,
    param::{FNV_START, fnv1a},
};

/// Name -> weight for one unit: what it owns and what it borrows.
#[derive(Clone)]
pub struct Weights {
    weights: HashMap<String, Weight>,
    adapters: HashMap<String, Adapter>,
}

impl Weights {
    /// Gathers the weights of `unit`; every one it owns or borrows must be among `weights`.
    pub fn new(unit: &Unit, weights: impl IntoIterator<Item = (String, Weight)>) -> Result<Self> {
        let weights: HashMap<_, _> = weights.into_iter().collect();
        let names = unit.params.iter().map(|p| &p.name).chain(unit.shared.iter().map(|s| &s.name));
        if let Some(missing) = names.into_iter().find(|name| !weights.contains_key(*name)) {
            candle_core::bail!("the weights of {} lack `{missing}`", unit.name);
        }
        let adapters = unit.adapters.iter().map(|a| (a.module.clone(), a.clone())).collect();
        Ok(Self { weights, adapters })
    }

    /// Returns the weight called `name`.
    pub fn get(&self, name: &str) -> Result<&Weight> {
        match self.weights.get(name) {
            Some(weight) => Ok(weight),
            None => candle_core::bail!("there is no weight `{name}` in this unit"),
        }
    }

    /// y = x W^T + b, plus scaling * (dropout(x) A^T) B^T where the module has an adapter. Without a key nothing is
    /// dropped.
    pub fn linear(&self, module: &str, x: &Tensor, dropout_key: Option<u64>) -> Result<Tensor> {
        let part = |name: &str| self.weights.get(&format!("{module}.{name}"));
        let base = ops::linear(x, self.get(&format!("{module}.weight"))?, part("bias"), Precision::Compute)?;
        let Some(adapter) = self.adapters.get(module) else { return Ok(base) };
        let x = match dropout_key {
            Some(key) => {
                let key = ops::derive_key(key, fnv1a(FNV_START, module));
                ops::dropout(x, Dropout { p: adapter.dropout, key })?
            }
            None => x.clone(),
        };
        // Scaled while it is small and unrounded.
        let down = ops::linear(&x, self.get(&format!("{module}.lora_A.weight"))?, None, Precision::Full)?;
        let down = ops::scale(&down, adapter.scaling, x.dtype())?;
        let up = ops::linear(&down, self.get(&format!("{module}.lora_B.weight"))?, None, Precision::Compute)?;
        ops::add(&base, &up)
    }
}
