//! Metrics that the objective emits in a step.

use candle_core::{DType, Device, Result, Tensor};

use crate::objective::{MetricReduction, MetricSpec};

/// Reduced values of an objective's metrics so far.
pub(super) struct MetricSums<'a> {
    specs: &'a [MetricSpec],
    values: Vec<Option<Tensor>>,
}

impl<'a> MetricSums<'a> {
    pub(super) fn new(specs: &'a [MetricSpec]) -> Self {
        Self { specs, values: vec![None; specs.len()] }
    }

    /// Adds the value of a micro-batch to a metric, by its index.
    pub(super) fn add(&mut self, i: usize, value: Tensor) -> Result<()> {
        self.values[i] = Some(match self.values[i].take() {
            None => value,
            Some(before) if self.specs[i].reduction == MetricReduction::Max => before.maximum(&value)?,
            Some(before) => (before + value)?,
        });
        Ok(())
    }

    /// Returns each metric, f32 [1]: the identity of its reduction if it was not emitted.
    pub(super) fn finish(self, device: &Device) -> Result<Vec<Tensor>> {
        let value = |(spec, value): (&MetricSpec, Option<Tensor>)| match value {
            Some(value) => value.to_dtype(DType::F32)?.reshape(1),
            None if spec.reduction == MetricReduction::Max => Tensor::full(f32::NEG_INFINITY, 1, device),
            None => Tensor::zeros(1, DType::F32, device),
        };
        self.specs.iter().zip(self.values).map(value).collect()
    }
}
