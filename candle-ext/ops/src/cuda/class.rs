//! Classes of kernel parameters. build.rs compiles this file as well, to write the classes of every kernel.

/// Class of a kernel parameter: its size, and pointer, integer or float.
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
