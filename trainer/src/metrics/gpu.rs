//! GPU memory and energy from NVML, of all processes, as in nvidia-smi.

use std::cell::Cell;
use std::fmt;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use serde::{Deserialize, Serialize};

/// The memory of the run's GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemory {
    /// Bytes in use; 0 if the device does not report it.
    pub gpu_used_bytes: u64,
    /// Total bytes.
    pub gpu_total_bytes: u64,
}

/// A source of GPU measurements by UUID.
trait GpuQuery: fmt::Debug {
    fn memory(&self, uuid: &str) -> Result<GpuMemory, NvmlError>;
    /// Returns the energy in millijoules since the driver was loaded.
    fn energy(&self, uuid: &str) -> Result<u64, NvmlError>;
}

impl GpuQuery for Nvml {
    fn memory(&self, uuid: &str) -> Result<GpuMemory, NvmlError> {
        let info = self.device_by_uuid(uuid)?.memory_info()?;
        Ok(GpuMemory { gpu_used_bytes: info.used, gpu_total_bytes: info.total })
    }

    fn energy(&self, uuid: &str) -> Result<u64, NvmlError> {
        self.device_by_uuid(uuid)?.total_energy_consumption()
    }
}

/// Monitors the memory and the energy of one GPU.
#[derive(Debug)]
pub struct GpuMonitor {
    gpus: Box<dyn GpuQuery>,
    uuid: String,
    has_warned: Cell<bool>,
    /// The last reading of the energy counter, in millijoules.
    energy: Cell<Option<u64>>,
}

impl GpuMonitor {
    /// Opens NVML for the GPU with CUDA's index `ordinal`. Returns `None` if there is no such GPU, or with a warning if
    /// NVML is unavailable.
    pub fn open(ordinal: usize) -> Option<Self> {
        // CUDA's order depends on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, NVML's does not. So match the UUIDs.
        let uuid = candlewick_ops::gpu_uuid(ordinal)?;
        match Nvml::init() {
            Ok(nvml) => Some(Self::new(nvml, uuid)),
            Err(error) => {
                tracing::warn!("GPU memory is not recorded: failed to initialize NVML: {error}");
                None
            }
        }
    }

    fn new(gpus: impl GpuQuery + 'static, uuid: String) -> Self {
        let energy = Cell::new(gpus.energy(&uuid).ok());
        Self { gpus: Box::new(gpus), uuid, has_warned: Cell::new(false), energy }
    }

    /// Returns the energy in joules since the last call, or since the monitor was opened. Returns `None` if the GPU does
    /// not report it: GPUs before Volta and MIG instances do not.
    pub fn energy(&self) -> Option<f64> {
        let now = self.gpus.energy(&self.uuid).ok();
        let before = self.energy.replace(now);
        Some(now?.checked_sub(before?)? as f64 / 1e3)
    }

    /// Reads the current memory. If the device does not report it, returns 0 and warns once.
    pub fn memory(&self) -> GpuMemory {
        // A MIG instance has a UUID with another prefix.
        let part = |error| self.gpus.memory(&self.uuid.replacen("GPU", "MIG", 1)).map_err(|_| error);
        self.gpus.memory(&self.uuid).or_else(part).unwrap_or_else(|error| {
            if !self.has_warned.replace(true) {
                tracing::warn!("the GPU does not report its memory: {error}");
            }
            GpuMemory::default()
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    /// The GPUs of a machine in NVML's order.
    #[derive(Clone, Debug)]
    struct Machine(Vec<(&'static str, Option<GpuMemory>)>);

    /// A GPU whose energy counter has these readings, in turn.
    #[derive(Debug)]
    struct EnergyCounter(Mutex<Vec<Option<u64>>>);

    impl GpuQuery for EnergyCounter {
        fn memory(&self, _: &str) -> Result<GpuMemory, NvmlError> {
            Err(NvmlError::NotSupported)
        }

        fn energy(&self, _: &str) -> Result<u64, NvmlError> {
            self.0.lock().unwrap().remove(0).ok_or(NvmlError::NotSupported)
        }
    }

    impl Machine {
        /// Returns a monitor of CUDA's device `ordinal` under CUDA_VISIBLE_DEVICES `visible`.
        fn monitor(&self, visible: &str, ordinal: usize) -> GpuMonitor {
            let place: usize = visible.split(',').nth(ordinal).unwrap().parse().unwrap();
            GpuMonitor::new(self.clone(), self.0[place].0.replace("MIG", "GPU"))
        }
    }

    impl GpuQuery for Machine {
        fn memory(&self, uuid: &str) -> Result<GpuMemory, NvmlError> {
            let gpu = self.0.iter().find(|(name, _)| *name == uuid).ok_or(NvmlError::NotFound)?;
            gpu.1.ok_or(NvmlError::NotSupported)
        }

        fn energy(&self, _: &str) -> Result<u64, NvmlError> {
            Err(NvmlError::NotSupported)
        }
    }

    fn machine() -> Machine {
        let used = |gpu_used_bytes| Some(GpuMemory { gpu_used_bytes, gpu_total_bytes: 80 });
        Machine(vec![
            ("GPU-a", used(10)),
            ("GPU-b", used(11)),
            ("MIG-c", used(12)),
            ("GPU-d", used(13)),
            ("GPU-e", None),
        ])
    }

    #[test]
    fn the_monitored_gpu_is_the_one_that_cuda_uses() {
        let used = |visible, ordinal| machine().monitor(visible, ordinal).memory().gpu_used_bytes;
        assert_eq!([used("3,1", 0), used("3,1", 1)], [13, 11]);
        assert_eq!(used("2", 0), 12);
    }

    #[test]
    fn energy_is_counted_between_calls() {
        // A driver that restarts sets its counter back.
        let readings = [Some(5_000), Some(6_500), Some(6_600), Some(100), Some(350), None, Some(900), Some(1_000)];
        let monitor = GpuMonitor::new(EnergyCounter(Mutex::new(readings.to_vec())), "GPU-a".to_owned());
        let joules: Vec<Option<f64>> = readings[1..].iter().map(|_| monitor.energy()).collect();
        assert_eq!(joules, [Some(1.5), Some(0.1), None, Some(0.25), None, None, Some(0.1)]);
    }

    #[test]
    fn unreported_memory_is_0_with_one_warning() {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_writer({
            let log = log.clone();
            move || log.clone()
        });
        tracing::subscriber::with_default(subscriber.finish(), || {
            let monitor = machine().monitor("1,4", 1);
            assert_eq!([monitor.memory(), monitor.memory()], [GpuMemory::default(); 2]);
        });
        let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        assert_eq!(log.matches("does not report its memory").count(), 1, "{log}");
        assert!(log.contains(&NvmlError::NotSupported.to_string()), "{log}");
    }

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(text);
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}
