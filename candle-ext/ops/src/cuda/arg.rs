//! Arguments of a kernel launch.

use super::class::Class;

/// Device address.
pub(crate) type DeviceAddress = u64;

/// Argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg {
    /// A pointer.
    Address(DeviceAddress),
    /// int
    I32(i32),
    /// long long
    I64(i64),
    /// unsigned long long
    U64(u64),
    /// float
    F32(f32),
    /// double
    F64(f64),
}

impl Arg {
    pub(super) fn class(&self) -> Class {
        match self {
            Self::Address(_) => Class::Pointer,
            Self::I32(_) => Class::Int32,
            Self::I64(_) | Self::U64(_) => Class::Int64,
            Self::F32(_) => Class::Float32,
            Self::F64(_) => Class::Float64,
        }
    }
}

/// Launch configuration: grid, block and dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    pub(crate) grid: [usize; 3],
    /// Threads per block, a multiple of 32.
    pub(crate) threads: usize,
    /// Bytes of dynamic shared memory per block; see `dynamic_shared` in ptx.cuh.
    pub(crate) shared_bytes: usize,
}
