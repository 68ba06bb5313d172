//! What there is less of than a run needs: of the device's memory, of the RAM of a GPU's host, or of the disk that inputs of
//! blocks are parked on.

use std::fmt;

use serde::Serialize;

use super::compute_device::ComputeDevice;
use super::{Capacity, Estimate, bytes};

/// Something that a run takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// The memory of what computes.
    Device,
    /// The RAM of the machine whose GPU computes.
    Host,
    /// The disk of the folder for temporary files.
    Parking,
}

/// Something that there is too little of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Shortage {
    /// What.
    pub of: Resource,
    /// How much of it a run takes.
    pub needed_bytes: u64,
    /// How much of it there is for the run.
    pub free_bytes: u64,
}

impl Estimate {
    /// Compares what a run takes with what there is, as far as that is known. Nothing is short if it fits.
    pub fn shortages(&self, capacity: &Capacity) -> Vec<Shortage> {
        let in_folder = if capacity.compute_device == ComputeDevice::Cpu { self.parked } else { 0 };
        let compared = [
            (Resource::Device, self.peak_bytes(), capacity.bytes),
            (Resource::Host, self.host.unwrap_or(0), capacity.host),
            (Resource::Parking, in_folder, capacity.parking),
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
            Resource::Host => "RAM of the host",
            Resource::Parking => "free disk for parked inputs (TMPDIR names the folder)",
        };
        write!(f, "{} of {} of {what}", bytes(self.needed_bytes), bytes(self.free_bytes))
    }
}
