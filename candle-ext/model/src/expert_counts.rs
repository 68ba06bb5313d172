//! Load of experts: the number of tokens that the routers assigned to each.

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_core::{DType, Result, Tensor};
use candlewick_ops::{ExpertAssignment, Routing};

/// Sums of expert selections over forward passes, by layer. Padding does not count.
#[derive(Debug, Default)]
pub struct ExpertCounts {
    layers: RefCell<BTreeMap<usize, Tensor>>,
}

impl ExpertCounts {
    /// Adds the selections of a forward pass, f32 [e].
    pub(crate) fn add(&self, layer_idx: usize, counts_e: &Tensor) -> Result<()> {
        let mut layers = self.layers.borrow_mut();
        let sum = match layers.get(&layer_idx) {
            Some(sum) => (sum + counts_e)?,
            None => counts_e.clone(),
        };
        layers.insert(layer_idx, sum);
        Ok(())
    }

    /// Returns the selections of each layer that computed, f32 [e] by layer index.
    pub fn into_layers(self) -> BTreeMap<usize, Tensor> {
        self.layers.into_inner()
    }
}

/// Returns the number of selections of each expert, f32 [e], over `valid_rows`, or over all rows.
pub(crate) fn counts(routing: &Routing, valid_rows: Option<&Tensor>) -> Result<Tensor> {
    let assignment = &routing.assignment;
    match valid_rows {
        None => assignment.counts(),
        Some(rows) if rows.elem_count() == 0 => {
            Tensor::zeros(assignment.n_experts(), DType::F32, assignment.experts.device())
        }
        Some(rows) => {
            ExpertAssignment::new(&assignment.experts.index_select(rows, 0)?, assignment.n_experts())?.counts()
        }
    }
}
