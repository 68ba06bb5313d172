//! The kind of device that a run computes on.

use candlewick_ops::DeviceKind;

/// The kind of device that a run computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeDevice {
    /// The CPU, which uses the machine's RAM.
    Cpu,
    /// A GPU, which has its own memory.
    Gpu,
}

impl ComputeDevice {
    /// Returns the kind of device in the type of the ops crate.
    pub(super) fn kind(self) -> DeviceKind {
        match self {
            Self::Cpu => DeviceKind::Cpu,
            Self::Gpu => DeviceKind::Gpu,
        }
    }
}
