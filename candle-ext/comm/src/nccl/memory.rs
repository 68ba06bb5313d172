//! Device addresses of tensors, and uninitialized tensors.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DeviceRepr};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Error, Result, Storage, Tensor, bail};

use crate::element::with_type;

/// Device address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DevicePointer(u64);

impl DevicePointer {
    /// Returns the address `n_bytes` further on.
    pub(super) fn after(self, n_bytes: usize) -> Self {
        Self(self.0 + n_bytes as u64)
    }

    pub(super) fn read(self) -> *const c_void {
        self.0 as *const c_void
    }

    pub(super) fn write(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

/// Returns the address of a contiguous tensor's first element.
pub(super) fn address(x: &Tensor) -> Result<DevicePointer> {
    let (storage, layout) = x.storage_and_layout();
    let Some((start, _)) = layout.contiguous_offsets() else { bail!("expected a contiguous tensor") };
    let Storage::Cuda(storage) = &*storage else { bail!("expected a tensor on a GPU") };
    let base = with_type!(storage.dtype(), T => base::<T>(storage)?);
    Ok(DevicePointer(base + (start * x.dtype().size_in_bytes()) as u64))
}

/// Copies a tensor to the host on `stream`, without waiting for the tensor's own stream.
pub(super) fn read_words(stream: &Arc<CudaStream>, x: &Tensor) -> Result<Vec<i64>> {
    let (storage, _) = x.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("expected a tensor on a GPU") };
    let words = stream.clone_dtoh(storage.as_cuda_slice::<i64>()?).map_err(Error::wrap)?;
    stream.synchronize().map_err(Error::wrap)?;
    Ok(words)
}

fn base<T: CudaDType + DeviceRepr>(storage: &CudaStorage) -> Result<u64> {
    let slice = storage.as_cuda_slice::<T>()?;
    Ok(slice.device_ptr(slice.stream()).0)
}

/// Returns an uninitialized tensor. Write its elements before they are read.
pub(super) fn empty(device: &CudaDevice, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let n = shape.iter().product();
    let storage = with_type!(dtype, T => fresh::<T>(device, n)?);
    Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
}

fn fresh<T: CudaDType + DeviceRepr>(device: &CudaDevice, n: usize) -> Result<CudaStorage> {
    // SAFETY: nothing reads the elements before NCCL has written them, as `empty` demands.
    let slice = unsafe { device.alloc::<T>(n.max(1))? };
    Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
}
