//! Asynchronous copies through pinned memory, ordered by the device's compute stream. Offload has [a stream of its
//! own](super::offload).

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError, PinnedHostSlice, result};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, Device, Error, Result, Shape, Storage, Tensor, WithDType};

use super::{address, driver};

/// Smallest buffer in bytes: a page.
const SMALLEST: usize = 4096;
/// Size in bytes from which buffers are multiples of it. Smaller ones are powers of two.
const LARGE: usize = 2 << 20;

/// Address of a stream's handle, which identifies it.
type StreamId = usize;

/// Free buffers by stream and size, in the order in which their copies began. The stream runs copies in order: if the
/// first buffer of a size is in use, all are.
type Pool = HashMap<StreamId, BTreeMap<usize, VecDeque<Staging>>>;

/// Pool of free pinned buffers.
static POOL: LazyLock<Mutex<Pool>> = LazyLock::new(Mutex::default);

/// Most cached tables: a few for each batch in flight.
const MAX_TABLES: usize = 8;

thread_local! {
    /// Cached tables, latest last.
    static TABLES: RefCell<VecDeque<Table>> = const { RefCell::new(VecDeque::new()) };
}

/// Uploaded values, and the resulting tensor.
struct Table {
    bytes: Vec<u8>,
    on_device: Tensor,
}

/// Pinned staging buffer.
struct Staging {
    stream: StreamId,
    bytes: PinnedHostSlice<u8>,
    /// Last copy from or to the buffer.
    copy: Option<Arc<CudaEvent>>,
}

impl Staging {
    /// Takes a free buffer of at least `n_bytes` and at most about twice that, or allocates one. `stream` runs its copies.
    fn take(stream: &CudaStream, n_bytes: usize) -> std::result::Result<Self, DriverError> {
        let n_bytes = buffer_size(n_bytes);
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        let id = stream.cu_stream().addr();
        let buffers = pool.entry(id).or_default();
        if let Some(staging) = Self::pop_ready(buffers.range_mut(n_bytes..=2 * n_bytes)) {
            return Ok(staging);
        }
        // It replaces one of a similar size. Otherwise batches of ever larger sizes would leave buffers of each size.
        drop(Self::pop_ready(buffers.range_mut(LARGE.max(n_bytes / 2)..n_bytes.max(LARGE)).rev()));
        // SAFETY: the taker writes a buffer before it is read. Without the write-combined flag the host can also read
        // it fast.
        let bytes = unsafe { stream.context().alloc_pinned_with_flags(n_bytes, 0)? };
        Ok(Self { stream: id, bytes, copy: None })
    }

    /// Takes a buffer without a copy in flight out of the first size that has one.
    fn pop_ready<'a>(mut sizes: impl Iterator<Item = (&'a usize, &'a mut VecDeque<Self>)>) -> Option<Self> {
        sizes.find(|(_, free)| free.front().is_some_and(Self::is_ready)).and_then(|(_, free)| free.pop_front())
    }

    fn is_ready(&self) -> bool {
        self.copy.as_ref().is_none_or(|copy| copy.is_complete())
    }

    fn mark(&mut self, stream: &CudaStream) -> std::result::Result<(), DriverError> {
        self.copy = Some(Arc::new(stream.record_event(None)?));
        Ok(())
    }

    fn give_back(self) {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        pool.entry(self.stream).or_default().entry(self.bytes.len()).or_default().push_back(self);
    }
}

/// Returns the size of a buffer for that many bytes.
fn buffer_size(n_bytes: usize) -> usize {
    let power = n_bytes.next_power_of_two().max(SMALLEST);
    if power > LARGE { n_bytes.next_multiple_of(LARGE) } else { power }
}

/// Uploads values; see [`crate::transfer::upload`].
pub(crate) fn upload<T: WithDType>(values: &[T], shape: Shape, device: &CudaDevice) -> Result<Tensor> {
    let storage = driver::alloc(device, T::DTYPE, values.len())?;
    let to = driver::base("upload", &storage)?;
    let bytes = bytes_of(values);
    if !bytes.is_empty() {
        send(bytes, to, device).map_err(cuda_failed("upload"))?;
    }
    Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
}

/// Uploads a table; see [`crate::transfer::upload_table`].
pub(crate) fn upload_table<T: WithDType>(values: &[T], shape: Shape, device: &CudaDevice) -> Result<Tensor> {
    let is_it = |table: &Table| {
        let Table { bytes, on_device } = table;
        let is_here = matches!(on_device.device(), Device::Cuda(other) if other.id() == device.id());
        is_here && on_device.dtype() == T::DTYPE && on_device.shape() == &shape && bytes == bytes_of(values)
    };
    TABLES.with_borrow_mut(|tables| {
        if let Some(known) = tables.iter().rev().find(|table| is_it(table)) {
            return Ok(known.on_device.clone());
        }
        let on_device = upload(values, shape.clone(), device)?;
        if tables.len() == MAX_TABLES {
            tables.pop_front();
        }
        tables.push_back(Table { bytes: bytes_of(values).to_vec(), on_device: on_device.clone() });
        Ok(on_device)
    })
}

fn bytes_of<T: WithDType>(values: &[T]) -> &[u8] {
    // SAFETY: numbers have no padding, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
}

/// Copies bytes into a device tensor; see [`crate::transfer::upload_into`].
pub(crate) fn upload_into(dst: &Tensor, bytes: &[u8], device: &CudaDevice) -> Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let to = address("upload_into", dst)?;
    send(bytes, to, device).map_err(cuda_failed("upload_into"))
}

fn send(bytes: &[u8], to: super::DeviceAddress, device: &CudaDevice) -> std::result::Result<(), DriverError> {
    let stream = device.cuda_stream();
    stream.context().bind_to_thread()?;
    let mut staging = Staging::take(&stream, bytes.len())?;
    staging.bytes.as_mut_slice()?[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: the device memory at `to` is large enough; the buffer is not written again before the copy is done.
    unsafe { result::memcpy_htod_async(to, &staging.bytes.as_slice()?[..bytes.len()], stream.cu_stream())? };
    staging.mark(&stream)?;
    staging.give_back();
    Ok(())
}

/// Event that keeps the time at which the stream reached it.
pub(crate) struct StreamEvent(CudaEvent);

impl StreamEvent {
    pub(crate) fn record(device: &CudaDevice) -> Result<Self> {
        let event = device.cuda_stream().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        Ok(Self(event.map_err(cuda_failed("device timestamp"))?))
    }

    pub(crate) fn since(&self, earlier: &Self) -> Result<Duration> {
        let milliseconds = earlier.0.elapsed_ms(&self.0).map_err(cuda_failed("device timestamp"))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

/// Copy from device to host in flight.
pub(crate) struct Readback {
    staging: ManuallyDrop<Staging>,
    n_bytes: usize,
}

impl Readback {
    pub(crate) fn start(x: &Tensor, device: &CudaDevice) -> Result<Self> {
        Self::on_stream(x, &device.cuda_stream())
    }

    /// Starts to copy a contiguous tensor on `stream`.
    pub(super) fn on_stream(x: &Tensor, stream: &CudaStream) -> Result<Self> {
        let n_bytes = x.elem_count() * x.dtype().size_in_bytes();
        let from = address("readout", x)?;
        Self::copy(from, n_bytes, stream).map_err(cuda_failed("device readback"))
    }

    fn copy(from: super::DeviceAddress, n_bytes: usize, stream: &CudaStream) -> std::result::Result<Self, DriverError> {
        stream.context().bind_to_thread()?;
        let mut staging = Staging::take(stream, n_bytes)?;
        let to = &mut staging.bytes.as_mut_slice()?[..n_bytes];
        // SAFETY: there are n_bytes at `from`, and the buffer is kept until the copy is done.
        unsafe { result::memcpy_dtoh_async(to, from, stream.cu_stream())? };
        staging.mark(stream)?;
        Ok(Self { staging: ManuallyDrop::new(staging), n_bytes })
    }

    /// Starts to copy the bytes back to the device, to `to`, on the same stream. There the second copy follows the first.
    pub(super) fn send_back(
        &mut self,
        to: super::DeviceAddress,
        stream: &CudaStream,
    ) -> std::result::Result<(), DriverError> {
        stream.context().bind_to_thread()?;
        let bytes = &self.staging.bytes.as_slice()?[..self.n_bytes];
        // SAFETY: the device memory at `to` is large enough; the buffer returns to the pool with this copy's event.
        unsafe { result::memcpy_htod_async(to, bytes, stream.cu_stream())? };
        self.staging.mark(stream)
    }

    /// Returns the event after the last copy.
    pub(super) fn done(&self) -> Arc<CudaEvent> {
        Arc::clone(self.staging.copy.as_ref().expect("a copy has started"))
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.staging.is_ready()
    }

    pub(super) fn wait_for_bytes(&self) -> Result<&[u8]> {
        if let Some(copy) = &self.staging.copy {
            copy.synchronize().map_err(cuda_failed("device readback"))?;
        }
        Ok(&self.staging.bytes.as_slice().map_err(cuda_failed("device readback"))?[..self.n_bytes])
    }

    pub(crate) fn wait(self) -> Result<Vec<f32>> {
        let bytes = self.wait_for_bytes()?;
        Ok(bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect())
    }
}

impl Drop for Readback {
    fn drop(&mut self) {
        // SAFETY: it is not used afterwards.
        unsafe { ManuallyDrop::take(&mut self.staging) }.give_back();
    }
}

/// Returns a function that adds the name of a failed operation to an error of CUDA.
pub(super) fn cuda_failed(operation: &'static str) -> impl FnOnce(DriverError) -> Error {
    move |error| Error::Msg(format!("{operation}: CUDA failed: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_buffer_has_at_most_two_mib_more_than_its_values() {
        let sizes = [1, 4097, (1 << 20) + 1, (2 << 20) + 1, (33 << 20) + 5].map(buffer_size);
        assert_eq!(sizes, [4096, 8192, 2 << 20, 4 << 20, 34 << 20]);
    }
}
