//! Copies through pinned memory: the device fetches or leaves the bytes when its stream comes to it.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::sync::{LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::DeviceId;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError, PinnedHostSlice, result};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Device, Error, Result, Shape, Storage, Tensor, WithDType};

use super::{address, driver};

/// The smallest buffer in bytes: a page.
const SMALLEST: usize = 4096;
/// Buffers up to this size are rounded up to a power of two, larger ones to a multiple of an eighth of one.
const LARGE: usize = 1 << 20;

/// Buffers by device and size, in the order in which their copies began: a stream does them in order, so if the device needs
/// the first one of a size still, it needs all.
type Pool = HashMap<DeviceId, BTreeMap<usize, VecDeque<Staging>>>;

/// Buffers that nobody holds.
static POOL: LazyLock<Mutex<Pool>> = LazyLock::new(Mutex::default);

/// Tables that are remembered: a few for each of the batches that are on their way.
const MAX_TABLES: usize = 8;

thread_local! {
    /// The latest last.
    static TABLES: RefCell<VecDeque<Table>> = const { RefCell::new(VecDeque::new()) };
}

/// What was sent, and what came of it.
struct Table {
    bytes: Vec<u8>,
    on_device: Tensor,
}

/// A pinned buffer.
struct Staging {
    device: DeviceId,
    bytes: PinnedHostSlice<u8>,
    /// The last copy from or to it.
    copy: Option<CudaEvent>,
}

impl Staging {
    /// Takes a buffer of at least so many bytes, and about twice as many at most, that no copy needs any more.
    fn take(device: &CudaDevice, n_bytes: usize) -> std::result::Result<Self, DriverError> {
        let power = n_bytes.next_power_of_two().max(SMALLEST);
        let n_bytes = if power > LARGE { n_bytes.next_multiple_of(power / 8) } else { power };
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = pool.entry(device.id()).or_default().range_mut(n_bytes..=2 * n_bytes);
        let ready = fitting.map(|(_, free)| free).find(|free| free.front().is_some_and(Self::is_ready));
        if let Some(staging) = ready.and_then(VecDeque::pop_front) {
            return Ok(staging);
        }
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
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        pool.entry(self.device).or_default().entry(self.bytes.len()).or_default().push_back(self);
    }
}

/// See [`crate::transfer::upload`].
pub(crate) fn upload<T: WithDType>(values: &[T], shape: Shape, device: &CudaDevice) -> Result<Tensor> {
    let storage = driver::alloc(device, T::DTYPE, values.len())?;
    let to = driver::base("upload", &storage)?;
    let bytes = bytes_of(values);
    if !bytes.is_empty() {
        send(bytes, to, device).map_err(|error| Error::Msg(format!("upload: CUDA failed: {error}")))?;
    }
    Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
}

/// See [`crate::transfer::upload_table`].
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

/// See [`crate::transfer::upload_into`].
pub(crate) fn upload_into(dst: &Tensor, bytes: &[u8], device: &CudaDevice) -> Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let to = address("upload_into", dst)?;
    send(bytes, to, device).map_err(|error| Error::Msg(format!("upload_into: CUDA failed: {error}")))
}

fn send(bytes: &[u8], to: super::Address, device: &CudaDevice) -> std::result::Result<(), DriverError> {
    let stream = device.cuda_stream();
    stream.context().bind_to_thread()?;
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
        let n_bytes = x.elem_count() * x.dtype().size_in_bytes();
        let from = address("readout", x)?;
        Self::copy(from, n_bytes, device).map_err(failed)
    }

    fn copy(from: super::Address, n_bytes: usize, device: &CudaDevice) -> std::result::Result<Self, DriverError> {
        let stream = device.cuda_stream();
        stream.context().bind_to_thread()?;
        let mut staging = Staging::take(device, n_bytes)?;
        let to = &mut staging.bytes.as_mut_slice()?[..n_bytes];
        // SAFETY: there are n_bytes at `from`, and the buffer is held until the copy is done.
        unsafe { result::memcpy_dtoh_async(to, from, stream.cu_stream())? };
        staging.mark(&stream)?;
        Ok(Self { staging: ManuallyDrop::new(staging), n_bytes })
    }

    fn send_back(&mut self, to: super::Address, device: &CudaDevice) -> std::result::Result<(), DriverError> {
        if self.n_bytes == 0 {
            return Ok(());
        }
        let stream = device.cuda_stream();
        stream.context().bind_to_thread()?;
        let bytes = &self.staging.bytes.as_slice()?[..self.n_bytes];
        // SAFETY: the device has room for the bytes at `to`, and the buffer goes back with the mark of this copy.
        unsafe { result::memcpy_htod_async(to, bytes, stream.cu_stream())? };
        self.staging.mark(&stream)
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.staging.is_ready()
    }

    fn wait_for_bytes(&self) -> Result<&[u8]> {
        if let Some(copy) = &self.staging.copy {
            copy.synchronize().map_err(failed)?;
        }
        Ok(&self.staging.bytes.as_slice().map_err(failed)?[..self.n_bytes])
    }

    pub(crate) fn wait(self) -> Result<Vec<f32>> {
        let bytes = self.wait_for_bytes()?;
        Ok(bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect())
    }
}

/// A tensor whose values wait in pinned memory.
pub(crate) struct Pinned {
    readback: Readback,
    shape: Shape,
    dtype: DType,
    device: CudaDevice,
}

impl Pinned {
    pub(crate) fn start(x: &Tensor, device: &CudaDevice) -> Result<Self> {
        let (shape, dtype, device) = (x.shape().clone(), x.dtype(), device.clone());
        Ok(Self { readback: Readback::start(x, &device)?, shape, dtype, device })
    }

    pub(crate) fn into_host(self) -> Result<Tensor> {
        let bytes = self.readback.wait_for_bytes()?;
        crate::bytes::tensor_from_bytes(self.dtype, self.shape.clone(), |host| {
            host.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Both copies are on one stream: the second begins when the first is done, and the host waits for neither.
    pub(crate) fn into_device(mut self) -> Result<Tensor> {
        let storage = driver::alloc(&self.device, self.dtype, self.shape.elem_count())?;
        let to = driver::base("unpark", &storage)?;
        self.readback.send_back(to, &self.device).map_err(failed)?;
        Ok(crate::storage::tensor(Storage::Cuda(storage), self.shape))
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
