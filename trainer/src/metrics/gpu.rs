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

/// How NVML knows a GPU that CUDA numbers among the visible ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Physical {
    /// By its number in the machine.
    Index(u32),
    /// By its name.
    Uuid(String),
}

impl Physical {
    /// Finds the GPU that CUDA calls `ordinal` under this value of CUDA_VISIBLE_DEVICES. As CUDA does, the list ends before
    /// the first entry that makes no sense.
    pub fn find(visible_devices: Option<&str>, ordinal: usize) -> Option<Self> {
        let Some(list) = visible_devices else { return u32::try_from(ordinal).ok().map(Self::Index) };
        list.split(',').map_while(|entry| Self::parse(entry.trim())).nth(ordinal)
    }

    fn parse(entry: &str) -> Option<Self> {
        match entry.parse() {
            Ok(index) => Some(Self::Index(index)),
            Err(_) if entry.starts_with("GPU-") || entry.starts_with("MIG-") => Some(Self::Uuid(entry.to_owned())),
            Err(_) => None,
        }
    }
}

/// Watches one GPU.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub struct GpuMonitor {
    nvml: nvml_wrapper::Nvml,
    gpu: Physical,
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
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let gpu = Physical::find(visible.as_deref(), ordinal)?;
        match nvml_wrapper::Nvml::init() {
            Ok(nvml) => Some(Self { nvml, gpu, has_warned: std::cell::Cell::new(false) }),
            Err(error) => {
                tracing::warn!("GPU memory is not shown: NVML does not start: {error}");
                None
            }
        }
    }

    /// Reads the memory now. What a device does not tell is 0, said once.
    pub fn memory(&self) -> GpuMemory {
        let device = match &self.gpu {
            Physical::Index(index) => self.nvml.device_by_index(*index),
            Physical::Uuid(uuid) => self.nvml.device_by_uuid(uuid.as_str()),
        };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(visible: Option<&str>, ordinal: usize, want: Option<Physical>) {
        assert_eq!(Physical::find(visible, ordinal), want, "{visible:?} {ordinal}");
    }

    #[test]
    fn visible_devices_are_counted_anew() {
        let uuid = || Some(Physical::Uuid("GPU-8932f937".into()));
        check(None, 2, Some(Physical::Index(2)));
        check(Some("3,1"), 0, Some(Physical::Index(3)));
        check(Some("3,1"), 1, Some(Physical::Index(1)));
        check(Some("3,1"), 2, None);
        check(Some(" 3 , GPU-8932f937"), 1, uuid());
        check(Some("0,-1,2"), 1, None);
        check(Some("0,-1,2"), 2, None);
        check(Some(""), 0, None);
    }
}
