//! Grouped GEMM on CUDA by cuBLASLt or CUTLASS: one matmul per group of rows, with all sizes on the device.
//!
//! x [n, in] and y [n, out] have rows sorted by group; w [e * out, in] has one matrix per group.

use candle_core::DType;

use crate::cuda::arg::DeviceAddress;
use crate::grouped_tile::{GroupedTile, TileUse};

/// Operand that a grouped GEMM computes from the other two, group by group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GroupedOutput {
    /// y = x w^T.
    Y,
    /// x = y w.
    X,
    /// w = y^T x, or w += y^T x. Groups without rows keep their matrix, or leave it undefined.
    W,
}

impl GroupedOutput {
    /// Returns the use of the tiles that compute this operand.
    pub(crate) fn tile_use(self) -> TileUse {
        match self {
            Self::Y | Self::X => TileUse::Multiply,
            Self::W => TileUse::GradW,
        }
    }

    /// Returns left operand, right operand and output, given x, y and w.
    pub(crate) fn in_order<T: Copy>(self, [x, y, w]: [T; 3]) -> [T; 3] {
        match self {
            Self::Y => [x, w, y],
            Self::X => [y, w, x],
            Self::W => [y, x, w],
        }
    }
}

/// A grouped GEMM. Groups are summed in f32, if the library has such an algorithm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupedGemm {
    pub(crate) output: GroupedOutput,
    /// True to add to w instead of overwriting it.
    pub(crate) adds: bool,
    /// Dtype of the inputs.
    pub(crate) dtype: DType,
    pub(crate) output_dtype: DType,
    /// Number of groups.
    pub(crate) e: usize,
    /// Rows of all groups, or more.
    pub(crate) n: usize,
    pub(crate) n_in: usize,
    pub(crate) n_out: usize,
    pub(crate) arrays: GroupedArrays,
}

/// Addresses of arrays on the device that describe the groups: of each operand's address per group, and of sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupedArrays {
    /// u64 [e] each, aligned to 16 bytes.
    pub(crate) x: DeviceAddress,
    pub(crate) y: DeviceAddress,
    pub(crate) w: DeviceAddress,
    /// i32 [e] each: in, out, and the number of rows.
    pub(crate) n_in: DeviceAddress,
    pub(crate) n_out: DeviceAddress,
    pub(crate) n_rows: DeviceAddress,
    /// f32: 1, and 1 or 0 as `adds`.
    pub(crate) alpha: DeviceAddress,
    pub(crate) beta: DeviceAddress,
}

/// A grouped GEMM of bf16 operands by CUTLASS.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupedProblems {
    pub(crate) output: GroupedOutput,
    /// True to add to w instead of overwriting it.
    pub(crate) adds: bool,
    pub(crate) output_dtype: DType,
    /// Number of groups.
    pub(crate) e: usize,
    pub(crate) tile: &'static GroupedTile,
    pub(crate) arrays: ProblemArrays,
}

/// Addresses of arrays on the device that describe the groups of [`GroupedProblems`]. Left operand, right operand and output
/// are in this order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProblemArrays {
    /// i32 [e, 3]: rows, columns and terms.
    pub(crate) sizes: DeviceAddress,
    /// u64 [e] each, aligned to 16 bytes.
    pub(crate) addresses: [DeviceAddress; 3],
    /// i64 [e] each: elements between rows in memory.
    pub(crate) strides: [DeviceAddress; 3],
}

/// Key of an algorithm of cuBLASLt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg(feature = "cuda")]
pub(super) struct GroupedKey {
    output: GroupedOutput,
    dtypes: [DType; 2],
    e: usize,
    /// Average rows of a group, as a power of two: they change from step to step.
    pub(super) n_average: usize,
    n_in: usize,
    n_out: usize,
}

#[cfg(feature = "cuda")]
impl GroupedKey {
    pub(super) fn of(gemm: &GroupedGemm) -> Self {
        let GroupedGemm { output, dtype, output_dtype, e, n, n_in, n_out, .. } = *gemm;
        let n_average = n.div_ceil(e).next_power_of_two();
        Self { output, dtypes: [dtype, output_dtype], e, n_average, n_in, n_out }
    }
}
