//! The memory of a device: by the device's name, or the free bytes.

use candlewick_ops::{DeviceChoice, DeviceKind, gpu_unavailable_reason};

use super::free_ram::free_ram;
use crate::checkpoint::free_bytes;
use crate::metrics::GpuMonitor;
use crate::recipe::parse_number;

const MIB: u64 = 1 << 20;

/// GPUs by name, with the memory that nvidia-smi reports.
const GPUS: [(&str, u64); 9] = [
    ("a100-40g", 40_960 * MIB),
    ("a100-80g", 81_920 * MIB),
    ("a10g", 23_028 * MIB),
    ("h100-80g", 81_559 * MIB),
    ("h200", 143_771 * MIB),
    ("l4", 23_034 * MIB),
    ("l40s", 46_068 * MIB),
    ("rtx-4090", 24_564 * MIB),
    ("t4", 15_360 * MIB),
];

/// The memory that an estimate is compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The kind of device that computes.
    pub compute_device: DeviceKind,
    /// The memory that a run may use; `None` if it is not known.
    pub bytes: Option<u64>,
    /// All the memory of a GPU, in use or free; `None` if it is not known.
    pub gpu_bytes: Option<u64>,
    /// Its name in messages.
    pub name: String,
    /// The bytes of host RAM that a GPU run may use; `None` if the host is unknown.
    pub host: Option<u64>,
    /// The free bytes of disk for offloaded activations; `None` if the folder is not on this machine.
    pub offload_disk: Option<u64>,
}

impl Capacity {
    /// Returns the capacity of an idle device with `bytes` of memory; host RAM and disk are unknown.
    pub fn of(compute_device: DeviceKind, bytes: Option<u64>, name: String) -> Self {
        let gpu_bytes = bytes.filter(|_| compute_device == DeviceKind::Gpu);
        Self { compute_device, bytes, gpu_bytes, name, host: None, offload_disk: None }
    }

    /// Returns the memory that is free now on the device of a run with `device`.
    pub fn now(device: DeviceChoice) -> Self {
        let gpu = match device {
            DeviceChoice::Cpu => None,
            DeviceChoice::Auto => gpu_unavailable_reason().is_none().then_some(0),
            DeviceChoice::Cuda(ordinal) => Some(ordinal),
        };
        match gpu {
            Some(ordinal) => {
                let memory = GpuMonitor::open(ordinal).map(|monitor| monitor.memory());
                let free = memory.map(|memory| memory.gpu_total_bytes.saturating_sub(memory.gpu_used_bytes));
                let bytes = free.filter(|free| *free > 0);
                let gpu_bytes = memory.map(|memory| memory.gpu_total_bytes).filter(|total| *total > 0);
                let now = Self::of(DeviceKind::Gpu, bytes, format!("cuda:{ordinal}, free now"));
                Self { host: free_ram(), gpu_bytes, ..now }
            }
            None => {
                let offload_disk = free_bytes(&std::env::temp_dir()).ok();
                Self { offload_disk, ..Self::of(DeviceKind::Cpu, free_ram(), "this machine's RAM, free now".into()) }
            }
        }
    }

    /// Returns the capacity of one of `n_here` processes on a machine. They divide RAM and disk; each has its own GPU.
    #[must_use]
    pub fn of_one(self, n_here: usize) -> Self {
        let divided = |bytes: Option<u64>| bytes.map(|bytes| bytes / n_here.max(1) as u64);
        let bytes = if self.compute_device == DeviceKind::Cpu { divided(self.bytes) } else { self.bytes };
        Self { bytes, host: divided(self.host), offload_disk: divided(self.offload_disk), ..self }
    }

    /// Returns this capacity less 10% headroom for the data and other programs.
    #[must_use]
    pub fn usable(&self) -> Self {
        Self { bytes: self.bytes.map(usable), host: self.host.map(usable), ..self.clone() }
    }

    /// Parses the name of a device, or a number of bytes for the kind of `device`.
    pub fn parse(text: &str, device: DeviceChoice) -> Result<Self, String> {
        if let Some((name, bytes)) = GPUS.iter().find(|(name, _)| *name == text) {
            return Ok(Self::of(DeviceKind::Gpu, Some(*bytes), (*name).to_owned()));
        }
        if let Ok(device) = text.parse() {
            return Ok(Self::now(device));
        }
        match parse_bytes(text) {
            Some(bytes) => {
                let compute_device =
                    if matches!(device, DeviceChoice::Cuda(_)) { DeviceKind::Gpu } else { DeviceKind::Cpu };
                Ok(Self::of(compute_device, Some(bytes), "--device".into()))
            }
            None => {
                let names: Vec<&str> = GPUS.iter().map(|(name, _)| *name).collect();
                Err(format!("expected cpu, cuda, {} or bytes such as 24GiB, found `{text}`", names.join(", ")))
            }
        }
    }
}

/// Returns 90% of the free bytes: 10% is headroom for the data and other programs.
pub fn usable(free: u64) -> u64 {
    free - free / 10
}

/// Parses a number of bytes above 0: `24GiB`, `24Gi`, `24GB`, `24G` or `24`.
pub fn parse_bytes(text: &str) -> Option<u64> {
    const UNITS: [(&str, u32); 4] = [("K", 1), ("M", 2), ("G", 3), ("T", 4)];
    let text = text.strip_suffix('B').unwrap_or(text);
    let (text, base) = text.strip_suffix('i').map_or((text, 1000.0), |text| (text, 1024.0));
    let unit = UNITS.iter().find_map(|(unit, power)| Some((text.strip_suffix(unit)?, *power)));
    let (number, factor) = unit.map_or((text, 1.0), |(number, power)| (number, f64::powi(base, power as i32)));
    parse_number(number).map(|number| (number * factor) as u64).filter(|bytes| *bytes > 0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, device: DeviceChoice, compute_device: DeviceKind, bytes: u64) {
        let capacity = Capacity::parse(text, device).unwrap();
        assert_eq!((capacity.compute_device, capacity.bytes), (compute_device, Some(bytes)), "{text}");
    }

    #[test]
    fn a_device_has_a_name_or_bytes() {
        check("h100-80g", DeviceChoice::Cpu, DeviceKind::Gpu, 81_559 << 20);
        for (text, bytes) in [("24GiB", 24 << 30), ("24Gi", 24 << 30), ("24GB", 24_000_000_000), ("1048576", 1 << 20)] {
            check(text, DeviceChoice::Auto, DeviceKind::Cpu, bytes);
            check(text, DeviceChoice::Cuda(1), DeviceKind::Gpu, bytes);
        }
        assert_eq!(Capacity::parse("cpu", DeviceChoice::Cuda(0)).unwrap().compute_device, DeviceKind::Cpu);
        for wrong in ["h100", "0", "-1", "GiB", ""] {
            let error = Capacity::parse(wrong, DeviceChoice::Auto).unwrap_err();
            assert!(error.contains("h100-80g"), "{error}");
        }
    }
}
