//! The memory of a GPU, as NVML tells it: all processes together, like nvidia-smi.

use serde::{Deserialize, Serialize};

/// The memory of the run's GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemory {
    /// What is in use; 0 where the device does not tell.
    pub gpu_used_bytes: u64,
    /// What it has.
    pub gpu_total_bytes: u64,
}

/// Watches one GPU.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub struct GpuMonitor {
    nvml: nvml_wrapper::Nvml,
    uuid: String,
    has_warned: std::cell::Cell<bool>,
}

/// Watches one GPU: none, in a program that was built without CUDA.
#[cfg(not(feature = "cuda"))]
#[derive(Debug)]
pub enum GpuMonitor {}

#[cfg(feature = "cuda")]
impl GpuMonitor {
    /// Opens NVML for the GPU that CUDA calls `ordinal`; `None`, with a warning, where that cannot be done.
    pub fn open(ordinal: usize) -> Option<Self> {
        // CUDA numbers GPUs by CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, NVML by their places: only names are the same.
        let uuid = candlewick_ops::gpu_uuid(ordinal)?;
        match nvml_wrapper::Nvml::init() {
            Ok(nvml) => Some(Self { nvml, uuid, has_warned: std::cell::Cell::new(false) }),
            Err(error) => {
                tracing::warn!("GPU memory is not shown: NVML does not start: {error}");
                None
            }
        }
    }

    /// Reads the memory now. What a device does not tell is 0, said once.
    pub fn memory(&self) -> GpuMemory {
        // A part of a GPU that is several has a name of its own kind.
        let part = || self.nvml.device_by_uuid(self.uuid.replacen("GPU", "MIG", 1));
        let device = self.nvml.device_by_uuid(self.uuid.as_str()).or_else(|_| part());
        match device.and_then(|device| device.memory_info()) {
            Ok(info) => GpuMemory { gpu_used_bytes: info.used, gpu_total_bytes: info.total },
            Err(error) => {
                if !self.has_warned.replace(true) {
                    tracing::warn!("the GPU does not tell its memory: {error}");
                }
                GpuMemory::default()
            }
        }
    }
}

#[cfg(not(feature = "cuda"))]
impl GpuMonitor {
    /// There is no GPU to watch.
    pub fn open(_ordinal: usize) -> Option<Self> {
        None
    }

    /// Never called: there is no monitor.
    pub fn memory(&self) -> GpuMemory {
        match *self {}
    }
}
