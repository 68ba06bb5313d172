//! The GPUs of this machine, or those of `stand-in`.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{Device, Tensor};
use candlewick_comm::Collective;
use libloading::Library;

use crate::mapped::MappedGroup;

/// How many there are; no fewer than `CANDLEWICK_TEST_GPUS`.
pub(crate) fn n_gpus() -> usize {
    // SAFETY: the driver's library may be loaded by any program. Without it the driver's functions panic.
    let driver = unsafe { Library::new("libcuda.so.1") };
    let n = if driver.is_err() { 0 } else { CudaContext::device_count().unwrap_or(0) as usize };
    let wanted = std::env::var("CANDLEWICK_TEST_GPUS").map_or(0, |n| n.parse().unwrap());
    assert!(n >= wanted, "{n} GPUs, and {wanted} are wanted");
    n
}

/// Opens one as a run does: what everything but NCCL does is on one stream, and NCCL's part is waited for by events.
pub(crate) fn open(ordinal: usize) -> Device {
    let device = Device::new_cuda_with_stream(ordinal).unwrap();
    if let Device::Cuda(cuda) = &device {
        // SAFETY: as above.
        unsafe { cuda.disable_event_tracking() };
    }
    device
}

/// What the cases see as a group of the CPU, whose tensors all lie on `device`.
pub(crate) fn on(device: &Device, group: Arc<dyn Collective>) -> MappedGroup {
    let device = device.clone();
    let check = {
        let device = device.clone();
        move |y: Tensor| {
            assert!(y.device().same_device(&device), "a result on {:?}", y.device());
            Ok(y.to_device(&Device::Cpu)?)
        }
    };
    MappedGroup::new(group, move |x| Ok(x.to_device(&device)?), check)
}
