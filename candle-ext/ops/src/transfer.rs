//! From the host to a device and back, without waiting for the device.

use candle_core::{DType, Device, Result, Shape, Tensor, WithDType, bail};

/// Copies values to a device. On a GPU they travel through pinned memory: the call returns at once.
pub fn upload<T: WithDType>(values: &[T], shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => crate::cuda::transfer::upload(values, shape.into(), device),
        _ => Tensor::from_slice(values, shape, device),
    }
}

/// As [`upload`], for a table that every layer of a model wants: the last few are remembered, and not sent again.
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
/// candle reads what it copies from a device (`to_vec1`, `to_scalar` and their like) as soon as the driver returns. The driver
/// may return before it has written pageable memory: so it does where the device uses the host's page tables, on Grace.
pub fn to_host(x: &Tensor) -> Result<Tensor> {
    let here = x.to_device(&Device::Cpu)?;
    x.device().synchronize()?;
    Ok(here)
}

/// Copies a view to the host without the rest of its buffer. A contiguous view of the host's memory is returned as it is.
pub fn to_host_contiguous(x: &Tensor) -> Result<Tensor> {
    match x.device() {
        Device::Cpu => x.contiguous(),
        // candle copies the whole buffer behind a view.
        _ => to_host(&x.force_contiguous()?),
    }
}

/// Numbers on their way from a device.
pub struct DeviceReadback(Way);

enum Way {
    Here(Vec<f32>),
    #[cfg(feature = "cuda")]
    OnCuda(crate::cuda::transfer::Readback),
}

impl DeviceReadback {
    /// Begins to copy f32 [n]: what it holds when all work so far is done.
    pub fn start(x: &Tensor) -> Result<Self> {
        if x.dtype() != DType::F32 || x.rank() != 1 {
            bail!("readout: want f32 [n], got {:?} {:?}", x.dtype(), x.dims())
        }
        Ok(Self(match x.device() {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Way::OnCuda(crate::cuda::transfer::Readback::start(&x.contiguous()?, device)?),
            _ => Way::Here(to_host(x)?.to_vec1()?),
        }))
    }

    /// Tells whether [`DeviceReadback::wait`] returns at once.
    pub fn is_ready(&self) -> bool {
        match &self.0 {
            Way::Here(_) => true,
            #[cfg(feature = "cuda")]
            Way::OnCuda(readback) => readback.is_ready(),
        }
    }

    /// Returns the numbers once they are there.
    pub fn wait(self) -> Result<Vec<f32>> {
        match self.0 {
            Way::Here(values) => Ok(values),
            #[cfg(feature = "cuda")]
            Way::OnCuda(readback) => readback.wait(),
        }
    }
}

/// Copies a CPU tensor into the contiguous view `dst` of a device's tensor of the same format, without waiting for it.
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

/// A tensor's values in the host's memory: for a while, to make room on a device. On the CPU they are there already.
pub struct HostBuffer(Kept);

enum Kept {
    Here(Tensor),
    #[cfg(feature = "cuda")]
    OffCuda(crate::cuda::transfer::Pinned),
}

impl HostBuffer {
    /// Begins to copy `x`, whose memory on the device is free again when all work so far is done.
    pub fn start(x: &Tensor) -> Result<Self> {
        Ok(Self(match x.device() {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Kept::OffCuda(crate::cuda::transfer::Pinned::start(&x.contiguous()?, device)?),
            _ => Kept::Here(x.clone()),
        }))
    }

    /// Returns the values here, once they are.
    pub fn into_host(self) -> Result<Tensor> {
        match self.0 {
            Kept::Here(x) => Ok(x),
            #[cfg(feature = "cuda")]
            Kept::OffCuda(pinned) => pinned.into_host(),
        }
    }

    /// Returns the values on the device that they came from. The device fetches them when it comes to that.
    pub fn into_device(self) -> Result<Tensor> {
        match self.0 {
            Kept::Here(x) => Ok(x),
            #[cfg(feature = "cuda")]
            Kept::OffCuda(pinned) => pinned.into_device(),
        }
    }
}
