//! Selections of a micro-batch, summed over layers.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::balance_factors;

/// Sums of expert selections over the layers of each micro-batch of a step, for
/// [`RouterLoss::TransformersLoadBalancing`](crate::RouterLoss::TransformersLoadBalancing).
///
/// They are complete before the first backward of a micro-batch. A pipeline stage passes its sums to the next stage, and gets
/// those of all stages with the gradient.
#[derive(Debug)]
pub struct ExpertCountsSummedOverLayers {
    n_experts: usize,
    top_k: usize,
    /// Sum over layers, f32 [e], by micro-batch.
    sums: RefCell<HashMap<usize, Tensor>>,
    /// Layers and micro-batches whose counts were added.
    added: RefCell<HashSet<(usize, usize)>>,
}

impl ExpertCountsSummedOverLayers {
    /// Creates sums for routers that select `top_k` of `n_experts` experts.
    pub fn new(n_experts: usize, top_k: usize) -> Self {
        Self { n_experts, top_k, sums: RefCell::default(), added: RefCell::default() }
    }

    /// Adds the counts of a layer, f32 [e]. Only the first call for a layer and micro-batch computes and adds them.
    pub(crate) fn add(
        &self,
        micro_idx: usize,
        layer_idx: usize,
        counts: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        if !self.added.borrow_mut().insert((layer_idx, micro_idx)) {
            return Ok(());
        }
        let counts = counts()?;
        let mut sums = self.sums.borrow_mut();
        let sum = sums.get(&micro_idx).map_or(Ok(counts.clone()), |sum| sum + &counts)?;
        sums.insert(micro_idx, sum);
        Ok(())
    }

    /// Replaces the sums of a micro-batch by those of another pipeline stage, f32 [e].
    pub fn set(&self, micro_idx: usize, sums_e: Tensor) {
        self.sums.borrow_mut().insert(micro_idx, sums_e);
    }

    /// Returns the sums of a micro-batch, f32 [e]; zeros before a layer with experts.
    pub fn get(&self, micro_idx: usize, device: &Device) -> Result<Tensor> {
        match self.sums.borrow().get(&micro_idx) {
            Some(sums) => Ok(sums.clone()),
            None => Tensor::zeros(self.n_experts, DType::F32, device),
        }
    }

    /// Returns the number of experts of a layer.
    pub fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// Returns e * k * (fraction of the selections of each expert), f32 [e]: transformers' mean tokens per expert, times e.
    pub fn factors(&self, micro_idx: usize) -> Result<Tensor> {
        let sums = self.sums.borrow();
        let sums_e = sums.get(&micro_idx).expect("a layer with this loss has added its counts");
        balance_factors(&sums_e.unsqueeze(0)?)?.squeeze(0)?.affine(self.top_k as f64, 0.0)
    }
}
