//! Memory of a device: peak use and out-of-memory errors.

use std::error::Error;

use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::DriverError;

/// Bytes of GPU memory for the context, the kernels and cuBLASLt's workspace. Assumed, not measured.
pub const GPU_CONTEXT_BYTES: u64 = 640 << 20;

/// Bytes of host RAM that CUDA's libraries use. Assumed, not measured.
pub const GPU_HOST_BYTES: u64 = 1536 << 20;

/// Memory of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Peak of the bytes that this process had allocated on the device.
    pub peak_bytes: u64,
    /// Total bytes of the device.
    pub total_bytes: u64,
}

/// Messages by which CUDA, cuBLAS and cuDNN report a failed allocation.
const OUT_OF_MEMORY: [&str; 3] = ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED", "DEVICE_ALLOCATION_FAILED"];

/// Returns the bytes lost to fragmentation in a GPU's memory pool, for `bytes` allocated and freed in a step.
///
/// Assumed, not measured: one sixteenth.
pub fn gpu_pool_slack_bytes(bytes: u64) -> u64 {
    bytes / 16
}

/// Returns true if an error, or one of its causes, is a failed allocation on a device.
///
/// candle and the ops carry the driver's error as text, so the text decides.
pub fn is_out_of_memory(error: &(dyn Error + 'static)) -> bool {
    let text = error.to_string();
    OUT_OF_MEMORY.iter().any(|name| text.contains(name)) || error.source().is_some_and(is_out_of_memory)
}

/// Reads the memory of a device. Returns `None` for the CPU, except inside an emulation with a limit.
pub fn device_memory(device: &Device) -> Option<DeviceMemory> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda(device).ok(),
        #[cfg(feature = "emulate")]
        Device::Cpu => crate::cuda::emulator::memory_limit()
            .map(|limit| DeviceMemory { peak_bytes: (limit.peak)(), total_bytes: limit.total_bytes }),
        _ => None,
    }
}

/// Returns the bytes of a GPU that tensors use now, those of kernels in its queue included. Returns `None` for the CPU.
pub fn device_bytes_in_use(device: &Device) -> Option<u64> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use candle_core::cuda_backend::cudarc::driver::sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
            pool_attribute(device, CU_MEMPOOL_ATTR_USED_MEM_CURRENT).ok()
        }
        _ => None,
    }
}

/// Reads the peak of the pool that all tensors are allocated from.
#[cfg(feature = "cuda")]
fn cuda(device: &candle_core::CudaDevice) -> Result<DeviceMemory, DriverError> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    let peak_bytes = pool_attribute(device, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?;
    let (_, total) = result::mem_get_info()?;
    Ok(DeviceMemory { peak_bytes, total_bytes: total as u64 })
}

#[cfg(feature = "cuda")]
fn pool_attribute(
    device: &candle_core::CudaDevice,
    attribute: candle_core::cuda_backend::cudarc::driver::sys::CUmemPool_attribute,
) -> Result<u64, DriverError> {
    use candle_core::cuda_backend::cudarc::driver::result;
    let stream = device.cuda_stream();
    stream.context().bind_to_thread()?;
    let mut bytes = 0u64;
    // SAFETY: the device is open, and the attribute is a u64.
    unsafe {
        let pool = result::device::get_default_mem_pool(stream.context().cu_device())?;
        result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast())?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_failed_allocation_is_found_among_the_causes_and_nothing_else_is() {
        let driver = candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".into());
        for (error, want) in [
            (driver.context("failed to compute the loss"), true),
            (candle_core::Error::Msg("CUBLAS_STATUS_ALLOC_FAILED".into()), true),
            (candle_core::Error::wrap(io::Error::other("CUDA_ERROR_OUT_OF_MEMORY")), true),
            (candle_core::Error::Msg("DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, \"\")".into()), false),
        ] {
            assert_eq!(is_out_of_memory(&error), want, "{error}");
        }
    }

    #[test]
    fn the_cpu_has_no_device_memory() {
        assert_eq!(device_memory(&Device::Cpu), None);
    }
}
