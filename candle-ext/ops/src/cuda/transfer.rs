//! Copies through pinned memory: the device fetches or leaves the bytes when its stream comes to it.

use std::mem::ManuallyDrop;
use std::sync::{Mutex, PoisonError};

use candle_core::cuda_backend::DeviceId;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError, PinnedHostSlice, result};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Error, Result, Shape, Storage, Tensor, WithDType};

use super::{address, driver};

/// The smallest buffer in bytes: a page.
const SMALLEST: usize = 4096;

/// Buffers that nobody holds. A device may still be reading from some.
static POOL: Mutex<Vec<Staging>> = Mutex::new(Vec::new());

/// A pinned buffer.
struct Staging {
    device: DeviceId,
    bytes: PinnedHostSlice<u8>,
    /// The last copy from or to it.
    copy: Option<CudaEvent>,
}

impl Staging {
    /// Takes a buffer of at least so many bytes that no copy needs any more.
    fn take(device: &CudaDevice, n_bytes: usize) -> std::result::Result<Self, DriverError> {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        let fits =
            |staging: &Self| staging.device == device.id() && staging.bytes.len() >= n_bytes && staging.is_ready();
        if let Some(at) = pool.iter().position(fits) {
            return Ok(pool.swap_remove(at));
        }
        let n_bytes = n_bytes.next_power_of_two().max(SMALLEST);
        // SAFETY: whoever takes a buffer writes what is read from it. No flags: the host may read it fast, too.
        let bytes = unsafe { device.cuda_stream().context().alloc_pinned_with_flags(n_bytes, 0)? };
        Ok(Self { device: device.id(), bytes, copy: None })
    }

    fn is_ready(&self) -> bool {
        self.copy.as_ref().is_none_or(CudaEvent::is_complete)
    }

    fn mark(&mut self, stream: &CudaStream) -> std::result::Result<(), DriverError> {
        self.copy = Some(stream.record_event(None)?);
        Ok(())
    }

    fn give_back(self) {
        POOL.lock().unwrap_or_else(PoisonError::into_inner).push(self);
    }
}

/// See [`crate::transfer::upload`].
pub(crate) fn upload<T: WithDType>(values: &[T], shape: Shape, device: &CudaDevice) -> Result<Tensor> {
    let storage = driver::alloc(device, T::DTYPE, values.len())?;
    let to = driver::base("upload", &storage)?;
    // SAFETY: numbers have no padding, and bytes need no alignment.
    let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
    if !bytes.is_empty() {
        send(bytes, to, device).map_err(|error| Error::Msg(format!("upload: CUDA failed: {error}")))?;
    }
    Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
}

fn send(bytes: &[u8], to: super::Address, device: &CudaDevice) -> std::result::Result<(), DriverError> {
    let stream = device.cuda_stream();
    let mut staging = Staging::take(device, bytes.len())?;
    staging.bytes.as_mut_slice()?[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: the device has room for the bytes at `to`; the buffer is not written again before the copy is done.
    unsafe { result::memcpy_htod_async(to, &staging.bytes.as_slice()?[..bytes.len()], stream.cu_stream())? };
    staging.mark(&stream)?;
    staging.give_back();
    Ok(())
}

/// A copy to the host that has begun.
pub(crate) struct Readback {
    staging: ManuallyDrop<Staging>,
    n_bytes: usize,
}

impl Readback {
    pub(crate) fn start(x: &Tensor, device: &CudaDevice) -> Result<Self> {
        let n_bytes = x.elem_count() * DType::F32.size_in_bytes();
        let from = address("readout", x)?;
        Self::copy(from, n_bytes, device).map_err(failed)
    }

    fn copy(from: super::Address, n_bytes: usize, device: &CudaDevice) -> std::result::Result<Self, DriverError> {
        let stream = device.cuda_stream();
        let mut staging = Staging::take(device, n_bytes)?;
        let to = &mut staging.bytes.as_mut_slice()?[..n_bytes];
        // SAFETY: there are n_bytes at `from`, and the buffer is held until the copy is done.
        unsafe { result::memcpy_dtoh_async(to, from, stream.cu_stream())? };
        staging.mark(&stream)?;
        Ok(Self { staging: ManuallyDrop::new(staging), n_bytes })
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.staging.is_ready()
    }

    pub(crate) fn wait(self) -> Result<Vec<f32>> {
        if let Some(copy) = &self.staging.copy {
            copy.synchronize().map_err(failed)?;
        }
        let bytes = &self.staging.bytes.as_slice().map_err(failed)?[..self.n_bytes];
        Ok(bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect())
    }
}

impl Drop for Readback {
    fn drop(&mut self) {
        // SAFETY: it is not used afterwards.
        unsafe { ManuallyDrop::take(&mut self.staging) }.give_back();
    }
}

fn failed(error: DriverError) -> Error {
    Error::Msg(format!("readout: CUDA failed: {error}"))
}
