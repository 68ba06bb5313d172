//! GPUs of this machine, or simulated ones of `stand-in`.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{Device, Tensor};
use candlewick_comm::Collective;
use libloading::Library;

use crate::mapped::MappedGroup;

/// Returns the number of GPUs. Panics if it is less than `CANDLEWICK_TEST_GPUS`.
pub(crate) fn n_gpus() -> usize {
    // SAFETY: the initializers of the driver's library have no preconditions. Without the library, cudarc panics.
    let driver = unsafe { Library::new("libcuda.so.1") };
    let n = if driver.is_err() { 0 } else { CudaContext::device_count().unwrap_or(0) as usize };
    let wanted = std::env::var("CANDLEWICK_TEST_GPUS").map_or(0, |n| n.parse().unwrap());
    assert!(n >= wanted, "found {n} GPUs, CANDLEWICK_TEST_GPUS requires {wanted}");
    n
}

/// Opens a GPU as a training run does: one compute stream, which events order with NCCL's streams.
pub(crate) fn open(ordinal: usize) -> Device {
    let device = Device::new_cuda_with_stream(ordinal).unwrap();
    if let Device::Cuda(cuda) = &device {
        // SAFETY: all compute runs on one stream.
        unsafe { cuda.disable_event_tracking() };
    }
    device
}

/// Wraps a group so that the cases pass CPU tensors and the group gets tensors on `device`.
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
