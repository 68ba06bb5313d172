//! Experts that a run records, or that replace the routers' selections.

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_core::{Result, Tensor, bail};

/// Experts that replace the routers' selections in a micro-batch, u32 [t, k] by layer, for the rows of this rank.
#[derive(Clone, Debug, Default)]
pub struct ReplayedExperts {
    layers: BTreeMap<usize, Tensor>,
}

/// Experts that the routers select in a step, by micro-batch and layer, before the capacity drops any.
#[derive(Debug, Default)]
pub struct RoutingRecord {
    selected: RefCell<BTreeMap<(usize, usize), Tensor>>,
}

impl ReplayedExperts {
    /// Creates the value from experts u32 [t, k] by layer index.
    pub fn new(layers: BTreeMap<usize, Tensor>) -> Self {
        Self { layers }
    }

    pub(crate) fn of_layer(&self, layer_idx: usize) -> Result<&Tensor> {
        match self.layers.get(&layer_idx) {
            Some(experts) => Ok(experts),
            None => bail!("routing replay: layer {layer_idx} has no experts"),
        }
    }
}

impl RoutingRecord {
    pub(crate) fn add(&self, micro_idx: usize, layer_idx: usize, experts_tk: &Tensor) {
        self.selected.borrow_mut().insert((micro_idx, layer_idx), experts_tk.clone());
    }

    /// Takes the experts, u32 [t, k] by micro-batch and layer.
    pub fn take_selected(&self) -> BTreeMap<(usize, usize), Tensor> {
        self.selected.take()
    }
}
