//! Access to the elements of a contiguous CPU tensor, for reading or in-place updates.

use std::cell::Cell;
use std::ops::Range;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Shape, Storage, StorageRef, Tensor, WithDType, bail};

use crate::floats::{Floats, FloatsMut};

/// Read lock on a tensor's elements.
pub(crate) struct Host<'a> {
    storage: StorageRef<'a>,
    range: Range<usize>,
}

/// Locks a contiguous CPU tensor for reading.
pub(crate) fn host<'a>(op: &str, tensor: &'a Tensor) -> Result<Host<'a>> {
    let (storage, layout) = tensor.storage_and_layout();
    let range = contiguous(op, layout)?;
    if !matches!(*storage, Storage::Cpu(_)) {
        bail!("{op}: there is no kernel for {:?}", tensor.device().location())
    }
    Ok(Host { storage, range })
}

impl Host<'_> {
    pub(crate) fn floats(&self) -> Result<Floats<'_>> {
        Floats::of(self.cpu()?, self.range.clone())
    }

    pub(crate) fn slice<T: WithDType>(&self) -> Result<&[T]> {
        Ok(&self.cpu()?.as_slice::<T>()?[self.range.clone()])
    }

    fn cpu(&self) -> Result<&CpuStorage> {
        match &*self.storage {
            Storage::Cpu(storage) => Ok(storage),
            _ => bail!("the tensor is not on the CPU"),
        }
    }
}

/// Locks a contiguous CPU tensor for writing and calls `change` with its elements.
pub(crate) fn update(
    tensor: &Tensor,
    op: &'static str,
    change: impl FnOnce(FloatsMut<'_>) -> Result<()>,
) -> Result<()> {
    tensor.inplace_op1(&Update { op, change: Cell::new(Some(change)) })
}

/// Returns true if both share one allocation. Locking both would then deadlock.
pub(crate) fn same_storage(a: &Tensor, b: &Tensor) -> bool {
    let address = |t: &Tensor| std::ptr::from_ref(&*t.storage_and_layout().0).addr();
    address(a) == address(b)
}

/// Creates an untracked tensor from a kernel's output.
pub(crate) fn tensor(out: impl Into<Storage>, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(out.into(), shape, BackpropOp::none(), false)
}

struct Update<F> {
    op: &'static str,
    /// candle passes `&self`; the change runs once.
    change: Cell<Option<F>>,
}

impl<F: FnOnce(FloatsMut<'_>) -> Result<()>> InplaceOp1 for Update<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let range = contiguous(self.op, layout)?;
        let elements = FloatsMut::of(storage, range)?;
        match self.change.take() {
            Some(change) => change(elements),
            None => bail!("{}: an update cannot be run a second time", self.op),
        }
    }
}

fn contiguous(op: &str, layout: &Layout) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => {
            bail!("{op}: want a contiguous tensor, got shape {:?} with strides {:?}", layout.dims(), layout.stride())
        }
    }
}
