//! The classes of kernel parameters. build.rs compiles this file, too: it writes the classes of every kernel.

/// A parameter of a kernel as a launch passes it: by size, and by pointer, integer or float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Pointer,
    /// int, unsigned
    Int32,
    /// long long, unsigned long long
    Int64,
    Float32,
    Float64,
}
