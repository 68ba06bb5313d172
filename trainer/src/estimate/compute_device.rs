//! The kind of memory that a run computes in.

use candlewick_ops::DeviceKind;

/// Kind of the device that computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeDevice {
    /// The CPU, in the RAM of this machine.
    Cpu,
    /// A GPU, in its own memory.
    Gpu,
}

impl ComputeDevice {
    /// Returns the kind of device, as ops' costs name it.
    pub(super) fn kind(self) -> DeviceKind {
        match self {
            Self::Cpu => DeviceKind::Cpu,
            Self::Gpu => DeviceKind::Gpu,
        }
    }
}
