//! The kind of memory that a run computes in.

use candlewick_ops::DeviceKind;

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// This machine's processor, in its RAM.
    Cpu,
    /// A GPU, in its own memory.
    Gpu,
}

impl Place {
    /// Returns the kind of device, as ops' costs name it.
    pub(super) fn kind(self) -> DeviceKind {
        match self {
            Self::Cpu => DeviceKind::Cpu,
            Self::Gpu => DeviceKind::Gpu,
        }
    }
}
