//! Resources that are smaller than a run needs: device memory, host RAM of a GPU, or disk for offloaded activations.

use std::fmt;

use candlewick_ops::DeviceKind;
use serde::Serialize;

use super::{Capacity, Estimate, format_bytes};

/// A resource that a run uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// The memory of the device that computes.
    Device,
    /// The RAM of a GPU's host.
    Host,
    /// The disk of the folder for temporary files, which holds offloaded activations.
    #[serde(rename = "parking")]
    OffloadDisk,
}

/// A resource that is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Shortage {
    /// The resource.
    pub of: Resource,
    /// The bytes that a run needs.
    pub needed_bytes: u64,
    /// The bytes that are free for the run.
    pub free_bytes: u64,
}

impl Estimate {
    /// Returns the resources that are smaller than a run needs, as far as they are known; empty if it fits.
    pub fn shortages(&self, capacity: &Capacity) -> Vec<Shortage> {
        let on_disk = if capacity.compute_device == DeviceKind::Cpu { self.offloaded } else { 0 };
        let compared = [
            (Resource::Device, self.peak_bytes(), capacity.bytes),
            (Resource::Host, self.host.unwrap_or(0), capacity.host),
            (Resource::OffloadDisk, on_disk, capacity.offload_disk),
        ];
        let short = |(of, needed_bytes, free): (Resource, u64, Option<u64>)| {
            let free_bytes = free.filter(|free| needed_bytes > *free)?;
            Some(Shortage { of, needed_bytes, free_bytes })
        };
        compared.into_iter().filter_map(short).collect()
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.of {
            Resource::Device => "memory",
            Resource::Host => "host RAM",
            Resource::OffloadDisk => "free disk for offloaded activations (TMPDIR sets the folder)",
        };
        write!(f, "{} of {} of {what}", format_bytes(self.needed_bytes), format_bytes(self.free_bytes))
    }
}
