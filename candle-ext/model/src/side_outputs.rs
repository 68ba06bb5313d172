//! Side outputs of layers: named numbers to which a forward adds.

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_core::{Result, Tensor};

/// Declaration of a layer's side output: numbers that are summed over its forward passes of a step, and over all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerOutputSpec {
    /// Name, which several layers may share.
    pub name: &'static str,
    /// Index of the layer.
    pub layer_idx: usize,
    /// Number of numbers.
    pub n_numbers: usize,
}

/// Sums of side outputs over the forward passes of a step, on this rank.
#[derive(Debug, Default)]
pub struct LayerOutputs {
    sums: RefCell<BTreeMap<(&'static str, usize), Tensor>>,
}

impl LayerOutputs {
    /// Adds to the output `name` of a layer, f32 [n].
    pub(crate) fn add(&self, name: &'static str, layer_idx: usize, values: Tensor) -> Result<()> {
        let mut sums = self.sums.borrow_mut();
        let sum = match sums.get(&(name, layer_idx)) {
            Some(sum) => (sum + values)?,
            None => values,
        };
        sums.insert((name, layer_idx), sum);
        Ok(())
    }

    /// Takes the sums of an output; `None` if no forward added to it.
    pub fn take(&self, spec: &LayerOutputSpec) -> Option<Tensor> {
        self.sums.borrow_mut().remove(&(spec.name, spec.layer_idx))
    }
}
