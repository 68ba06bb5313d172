//! Selections of a step over all micro-batches and ranks.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::{Result, Tensor};

/// Sums of expert selections over the micro-batches of a step so far, as Megatron-LM's `global_tokens_per_expert`.
///
/// A layer that is recomputed reads the sum of its first forward.
#[derive(Debug, Default)]
pub struct GlobalExpertCounts {
    /// Sum over the micro-batches so far, by layer.
    running: RefCell<HashMap<usize, Tensor>>,
    /// Sum at the first forward of a layer and micro-batch.
    at: RefCell<HashMap<(usize, usize), Tensor>>,
}

impl GlobalExpertCounts {
    /// Returns the sum up to a micro-batch, f32 [1, e]. The first call for a layer and micro-batch adds `counts`.
    pub(crate) fn up_to(
        &self,
        micro_idx: usize,
        layer_idx: usize,
        counts: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Tensor> {
        if let Some(sum) = self.at.borrow().get(&(layer_idx, micro_idx)) {
            return Ok(sum.clone());
        }
        let counts = counts()?;
        let sum = match self.running.borrow().get(&layer_idx) {
            Some(sum) => (sum + counts)?,
            None => counts,
        };
        self.running.borrow_mut().insert(layer_idx, sum.clone());
        self.at.borrow_mut().insert((layer_idx, micro_idx), sum.clone());
        Ok(sum)
    }
}
