//! Copies of tensors to pinned host memory and back, on a stream of their own, while the compute stream computes.
//!
//! Events order the two streams. A copy waits for the compute submitted before it. Compute waits for a copy before it reads the
//! result, or reuses memory that the copy reads.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::DeviceId;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError};
use candle_core::{CudaDevice, DType, Result, Shape, Storage, Tensor};

use super::driver;
use super::transfer::{Readback, cuda_failed};

/// Most tensors that are kept only because a copy reads them. The compute stream waits for older copies: so a device that
/// computes faster than it copies holds no more of them.
const MAX_SOURCES: usize = 1;

/// Copy streams of all devices. They are never destroyed.
static STREAMS: LazyLock<Mutex<HashMap<DeviceId, CopyStream>>> = LazyLock::new(Mutex::default);

/// Stream of a device for offload.
struct CopyStream {
    stream: Arc<CudaStream>,
    /// Tensors that copies read, oldest first, with the events of these copies.
    sources: VecDeque<(Tensor, Arc<CudaEvent>)>,
}

impl CopyStream {
    /// Calls `f` with the copy stream of a device.
    fn with<T>(device: &CudaDevice, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
        f(match streams.entry(device.id()) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let stream = device.cuda_stream().context().new_stream().map_err(cuda_failed("offload"))?;
                entry.insert(Self { stream, sources: VecDeque::new() })
            }
        })
    }

    /// Makes later copies wait for the compute submitted so far.
    fn wait_for_compute(&self, device: &CudaDevice) -> std::result::Result<(), DriverError> {
        self.stream.wait(&device.cuda_stream().record_event(None)?)
    }

    /// Keeps the tensor that a copy reads until the event `done`.
    fn keep(
        &mut self,
        device: &CudaDevice,
        source: Tensor,
        done: Arc<CudaEvent>,
    ) -> std::result::Result<(), DriverError> {
        self.sources.push_back((source, done));
        self.release(device, MAX_SOURCES)
    }

    /// Releases the oldest sources, all but `n_kept`. Their memory is reused after their copies.
    fn release(&mut self, device: &CudaDevice, n_kept: usize) -> std::result::Result<(), DriverError> {
        while self.sources.len() > n_kept
            && let Some((source, done)) = self.sources.pop_front()
        {
            device.cuda_stream().wait(&done)?;
            drop(source);
        }
        Ok(())
    }

    /// Releases the sources of completed copies.
    fn release_completed(&mut self) {
        while self.sources.front().is_some_and(|(_, done)| done.is_complete()) {
            self.sources.pop_front();
        }
    }
}

/// Tensor whose values were copied to pinned memory.
pub(crate) struct OffloadedTensor {
    /// Copy to the host.
    readback: Readback,
    /// Copy back to the device, if it has started.
    arriving: Option<ArrivingTensor>,
    shape: Shape,
    dtype: DType,
    device: CudaDevice,
}

/// Tensor on the device that a copy writes.
struct ArrivingTensor {
    /// The tensor; `None` when compute has been ordered after the copy.
    tensor: Option<Tensor>,
    done: Arc<CudaEvent>,
    device: CudaDevice,
}

impl OffloadedTensor {
    /// Starts to copy a contiguous tensor, as of all work submitted so far. Do not write to it before the copy is done.
    pub(crate) fn start(x: &Tensor, device: &CudaDevice) -> Result<Self> {
        let readback = CopyStream::with(device, |copies| {
            copies.wait_for_compute(device).map_err(cuda_failed("offload"))?;
            let readback = Readback::on_stream(x, &copies.stream)?;
            copies.keep(device, x.clone(), readback.done()).map_err(cuda_failed("offload"))?;
            Ok(readback)
        })?;
        Ok(Self { readback, arriving: None, shape: x.shape().clone(), dtype: x.dtype(), device: device.clone() })
    }

    pub(crate) fn n_bytes(&self) -> u64 {
        (self.shape.elem_count() * self.dtype.size_in_bytes()) as u64
    }

    /// Waits for the copy and returns the values on the host.
    pub(crate) fn into_host(self) -> Result<Tensor> {
        let bytes = self.readback.wait_for_bytes()?;
        CopyStream::with(&self.device, |copies| {
            copies.release_completed();
            Ok(())
        })?;
        crate::bytes::tensor_from_bytes(self.dtype, self.shape.clone(), |host| {
            host.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Releases the device memory of all tensors that were copied. Later compute waits for the copies; the host does not.
    pub(crate) fn release_sources(&self) -> Result<()> {
        CopyStream::with(&self.device, |copies| copies.release(&self.device, 0).map_err(cuda_failed("offload")))
    }

    /// Starts to copy the values back to the device, unless that has started. The host waits for nothing.
    pub(crate) fn prefetch(&mut self) -> Result<()> {
        if self.arriving.is_none() {
            self.arriving = Some(self.send_back()?);
        }
        Ok(())
    }

    fn send_back(&mut self) -> Result<ArrivingTensor> {
        let (device, n) = (self.device.clone(), self.shape.elem_count());
        // Their memory is free for the values.
        self.release_sources()?;
        let storage = driver::alloc(&device, self.dtype, n)?;
        let to = driver::base("offload", &storage)?;
        let tensor = crate::storage::tensor(Storage::Cuda(storage), self.shape.clone());
        CopyStream::with(&device, |copies| {
            copies.wait_for_compute(&device).map_err(cuda_failed("offload"))?;
            self.readback.send_back(to, &copies.stream).map_err(cuda_failed("offload"))
        })?;
        Ok(ArrivingTensor { tensor: Some(tensor), done: self.readback.done(), device: device.clone() })
    }

    /// Returns the values on the device. Later compute waits for the copy; the host does not.
    pub(crate) fn into_device(mut self) -> Result<Tensor> {
        self.prefetch()?;
        let arriving = self.arriving.take().expect("it was prefetched");
        arriving.wait_on_device()
    }
}

impl ArrivingTensor {
    /// Makes later compute wait for the copy, and returns the tensor.
    fn wait_on_device(mut self) -> Result<Tensor> {
        self.device.cuda_stream().wait(&self.done).map_err(cuda_failed("offload"))?;
        Ok(self.tensor.take().expect("it is taken once"))
    }
}

impl Drop for ArrivingTensor {
    /// The memory of a tensor that was not taken is reused after the copy, too.
    fn drop(&mut self) {
        if self.tensor.is_some() {
            // After a failure of the driver nothing is reused.
            let _ = self.device.cuda_stream().wait(&self.done);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
