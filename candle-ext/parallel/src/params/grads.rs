//! Flat gradient buffer of one parameter group.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{FlatBuffer, GradSink, add, copy_into, zero_};

use super::bytes::of_buffer;
use super::layout::{ParamGroup, PlacedParam};
use super::sharding::{ALIGNMENT, ZeroStage};

/// Gradients of a trainable parameter group.
pub(crate) struct GroupGrads {
    /// Unreduced gradients of this rank, accumulated by backward.
    all: FlatBuffer,
    /// This rank's shard of the reduced gradients: a view of `all` if that is resident.
    own: FlatBuffer,
    /// Gradient sinks of matrices, which ops overwrite in a step's first micro-batch.
    matrices: Vec<GradSink>,
    /// Elements of all other parameters, which start a step as zeros.
    others: Vec<Range<usize>>,
    /// True if gradients accumulate over micro-batches in place and are reduced once a step.
    is_resident: bool,
    n: usize,
    dtype: DType,
    device: Device,
}

impl GroupGrads {
    /// Allocates the gradients of `group` and the sinks of its parameters.
    pub(crate) fn zeros(
        group: &ParamGroup,
        zero_stage: ZeroStage,
        dtype: DType,
        device: &Device,
    ) -> Result<(Self, HashMap<String, GradSink>)> {
        let (n, shard) = (group.numel, &group.shard);
        let is_resident = zero_stage == ZeroStage::One;
        let (all, own) = if is_resident {
            let all = Tensor::zeros(n, dtype, device)?;
            let own = all.narrow(0, shard.start, shard.len())?;
            (FlatBuffer::from_tensor(all), FlatBuffer::from_tensor(own))
        } else {
            (FlatBuffer::unallocated(n, dtype), FlatBuffer::unallocated(shard.len(), dtype))
        };
        let mut sinks = HashMap::new();
        for param in &group.params {
            let sink = GradSink::new(all.view(param.range.start, param.shape())?)?;
            sinks.insert(param.spec.name.clone(), sink);
        }
        // Gradients that are not resident start as zeros in every micro-batch.
        let resident = group.params.iter().filter(|_| is_resident);
        let matrices = resident.filter(|param| param.spec.decay).map(|param| sinks[&param.spec.name].clone()).collect();
        let others = joined(group.params.iter().filter(|param| !param.spec.decay));
        Ok((Self { all, own, matrices, others, is_resident, n, dtype, device: device.clone() }, sinks))
    }

    /// Returns true if gradients accumulate in place and are reduced once a step.
    pub(crate) fn is_resident(&self) -> bool {
        self.is_resident
    }

    /// Clears all gradients; the next backward overwrites them.
    pub(crate) fn clear(&self) -> Result<()> {
        if !self.is_resident {
            self.own.release();
            return Ok(());
        }
        self.matrices.iter().for_each(GradSink::reset);
        let all = self.all.data()?;
        self.others.iter().try_for_each(|range| zero_(&all.narrow(0, range.start, range.len())?))
    }

    /// Zeroes the gradients of matrices that no op has written.
    fn complete(&self) -> Result<()> {
        self.matrices.iter().try_for_each(|matrix| matrix.grad().map(drop))
    }

    /// Allocates the unreduced gradients, if they are not resident.
    pub(crate) fn prepare(&self) -> Result<()> {
        match self.all.is_allocated() {
            true => Ok(()),
            false => self.all.materialize(Tensor::zeros(self.n, self.dtype, &self.device)?),
        }
    }

    /// Returns the unreduced gradients, and frees them if they are not resident.
    pub(crate) fn take_unreduced(&self) -> Result<Tensor> {
        self.complete()?;
        let all = self.all.data()?;
        if !self.is_resident {
            self.all.release();
        }
        Ok(all)
    }

    /// Accumulates this rank's shard of the reduced gradients.
    pub(crate) fn store_reduced(&self, sum: Tensor) -> Result<()> {
        if self.is_resident {
            // A group of one returns its input.
            return if sum.id() == self.all.data()?.id() { Ok(()) } else { copy_into(&self.own.data()?, &sum) };
        }
        match self.own.release() {
            Some(before) => self.own.materialize(add(&before, &sum)?),
            None => self.own.materialize(sum),
        }
    }

    /// Returns this rank's shard of the reduced gradients; zeros if backward wrote none.
    pub(crate) fn reduced(&self) -> Result<Tensor> {
        self.complete()?;
        if !self.own.is_allocated() {
            self.own.materialize(Tensor::zeros(self.own.len(), self.dtype, &self.device)?)?;
        }
        self.own.data()
    }

    /// Returns the bytes of the gradient buffers.
    pub(crate) fn bytes(&self) -> u64 {
        // The shard of a resident buffer is a view of it.
        of_buffer(&self.all) + if self.is_resident { 0 } else { of_buffer(&self.own) }
    }
}

/// Returns the elements of parameters in buffer order. Those of adjacent parameters are one range.
fn joined<'p>(params: impl Iterator<Item = &'p PlacedParam>) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for Range { start, end } in params.map(|param| param.range.clone()) {
        match ranges.last_mut() {
            Some(last) if last.end.next_multiple_of(ALIGNMENT) == start => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    ranges
}
