//! Copies between host and device that do not wait for the device.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Shape, Tensor, WithDType, bail};

use crate::span::span;

/// Copies values to a device. On a GPU the copy goes through pinned memory and the call returns at once.
pub fn upload<T: WithDType>(values: &[T], shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => crate::cuda::transfer::upload(values, shape.into(), device),
        _ => Tensor::from_slice(values, shape, device),
    }
}

/// Copies values as [`upload`], with a cache of the last few tables, which all layers of a model share.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) fn upload_table<T: WithDType>(values: &[T], shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => crate::cuda::transfer::upload_table(values, shape.into(), device),
        _ => upload(values, shape, device),
    }
}

/// Copies a tensor to the host and waits for the copy.
///
/// candle's `to_vec1`, `to_scalar` and the like read the copy as soon as the driver returns. On Grace, where the device
/// uses the host's page tables, the driver may return before it has written pageable memory.
pub fn to_host(x: &Tensor) -> Result<Tensor> {
    let _span = span("to_host", "");
    let here = x.to_device(&Device::Cpu)?;
    x.device().synchronize()?;
    Ok(here)
}

/// Copies a view to the host without the rest of its buffer. Returns a contiguous view of host memory unchanged.
pub fn to_host_contiguous(x: &Tensor) -> Result<Tensor> {
    match x.device() {
        Device::Cpu => x.contiguous(),
        // candle would copy the view's whole buffer.
        _ => to_host(&x.force_contiguous()?),
    }
}

/// Copy of f32 values from a device to the host, in flight.
pub struct DeviceReadback(ReadbackState);

enum ReadbackState {
    Done(Vec<f32>),
    #[cfg(feature = "cuda")]
    InFlight(crate::cuda::transfer::Readback),
}

impl DeviceReadback {
    /// Starts to copy `x`, f32 [n], as of all work submitted so far.
    pub fn start(x: &Tensor) -> Result<Self> {
        if x.dtype() != DType::F32 || x.rank() != 1 {
            bail!("device readback: want f32 [n], got {:?} {:?}", x.dtype(), x.dims())
        }
        Ok(Self(match x.device() {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                ReadbackState::InFlight(crate::cuda::transfer::Readback::start(&x.contiguous()?, device)?)
            }
            _ => ReadbackState::Done(to_host(x)?.to_vec1()?),
        }))
    }

    /// Returns true if [`DeviceReadback::wait`] would return at once.
    pub fn is_ready(&self) -> bool {
        match &self.0 {
            ReadbackState::Done(_) => true,
            #[cfg(feature = "cuda")]
            ReadbackState::InFlight(readback) => readback.is_ready(),
        }
    }

    /// Waits for the copy and returns the values.
    pub fn wait(self) -> Result<Vec<f32>> {
        match self.0 {
            ReadbackState::Done(values) => Ok(values),
            #[cfg(feature = "cuda")]
            ReadbackState::InFlight(readback) => readback.wait(),
        }
    }
}

/// A moment in a device's work: the end of all work submitted so far. On the CPU, the present.
pub struct DeviceTimestamp(Moment);

enum Moment {
    Host(Instant),
    #[cfg(feature = "cuda")]
    OnGpu(crate::cuda::transfer::StreamEvent),
}

impl DeviceTimestamp {
    /// Marks the end of the work submitted to `device` so far. Does not wait for it.
    pub fn now(device: &Device) -> Result<Self> {
        Ok(Self(match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Moment::OnGpu(crate::cuda::transfer::StreamEvent::record(device)?),
            _ => Moment::Host(Instant::now()),
        }))
    }

    /// Returns the time from `earlier`, a moment of the same device. Waits for both.
    pub fn since(&self, earlier: &Self) -> Result<Duration> {
        match (&self.0, &earlier.0) {
            (Moment::Host(end), Moment::Host(start)) => Ok(end.saturating_duration_since(*start)),
            #[cfg(feature = "cuda")]
            (Moment::OnGpu(end), Moment::OnGpu(start)) => end.since(start),
            #[cfg(feature = "cuda")]
            _ => bail!("device timestamps: of two devices"),
        }
    }
}

/// Copies a CPU tensor into the contiguous view `dst` of a device tensor of the same dtype. Does not wait for the copy.
pub fn upload_into(dst: &Tensor, src: &Tensor) -> Result<()> {
    if dst.dtype() != src.dtype() || dst.elem_count() != src.elem_count() {
        let [dst, src] = [dst, src].map(|x| (x.dtype(), x.dims().to_vec()));
        bail!("upload_into: {src:?} is not what {dst:?} holds")
    }
    match dst.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            crate::bytes::with_bytes(src, |src| crate::cuda::transfer::upload_into(dst, src, device))
        }
        _ => crate::in_place::copy_into(dst, src),
    }
}

/// A tensor's values in host memory, offloaded to free device memory. On the CPU nothing is copied.
pub struct HostBuffer(HostValues);

enum HostValues {
    OnHost(Tensor),
    #[cfg(feature = "cuda")]
    Pinned(Box<crate::cuda::offload::OffloadedTensor>),
}

impl HostBuffer {
    /// Starts to copy `x`, while later compute runs. Do not write to `x` before the copy is done. Its memory is kept until then; the
    /// next offloaded tensor makes compute wait for that.
    pub fn start(x: &Tensor) -> Result<Self> {
        Ok(Self(match x.device() {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                HostValues::Pinned(Box::new(crate::cuda::offload::OffloadedTensor::start(&x.contiguous()?, device)?))
            }
            _ => HostValues::OnHost(x.clone()),
        }))
    }

    /// Releases the device memory of the tensor, and of all that were copied before it. Later compute waits for the copies; the
    /// host does not.
    pub fn release_sources(&self) -> Result<()> {
        match &self.0 {
            HostValues::OnHost(_) => Ok(()),
            #[cfg(feature = "cuda")]
            HostValues::Pinned(offloaded) => offloaded.release_sources(),
        }
    }

    /// Waits for the copy and returns the values on the host.
    pub fn into_host(self) -> Result<Tensor> {
        match self.0 {
            HostValues::OnHost(x) => Ok(x),
            #[cfg(feature = "cuda")]
            HostValues::Pinned(offloaded) => offloaded.into_host(),
        }
    }

    /// Returns the number of bytes of the values.
    pub fn n_bytes(&self) -> u64 {
        match &self.0 {
            HostValues::OnHost(x) => (x.elem_count() * x.dtype().size_in_bytes()) as u64,
            #[cfg(feature = "cuda")]
            HostValues::Pinned(offloaded) => offloaded.n_bytes(),
        }
    }

    /// Starts to copy the values back to their original device, while later compute runs. They occupy memory there from now on.
    pub fn prefetch(&mut self) -> Result<()> {
        match &mut self.0 {
            HostValues::OnHost(_) => Ok(()),
            #[cfg(feature = "cuda")]
            HostValues::Pinned(offloaded) => offloaded.prefetch(),
        }
    }

    /// Returns the values on their original device. Later compute waits for the copy; the host does not.
    pub fn into_device(self) -> Result<Tensor> {
        match self.0 {
            HostValues::OnHost(x) => Ok(x),
            #[cfg(feature = "cuda")]
            HostValues::Pinned(offloaded) => offloaded.into_device(),
        }
    }
}
