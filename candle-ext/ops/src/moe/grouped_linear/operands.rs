//! Operands of a grouped matmul on a GPU, and the implementations that compute it.

use candle_core::DType;

use crate::cuda::DeviceAddress;
use crate::cuda::gemm::grouped::GroupedOutput;
use crate::grouped_tile::GroupedTile;
use crate::weight_matmul::Dims;

/// Implementation that computes one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupedKernel {
    Fused,
    Library(GroupedLibrary),
}

/// Library with a grouped GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupedLibrary {
    Cublas,
    /// CUTLASS with this output tile.
    Cutlass(&'static GroupedTile),
}

/// Dtypes and sizes of a grouped matmul, and addresses of its operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupedOperands<'a> {
    pub(super) output: GroupedOutput,
    /// Dtype of x and y.
    pub(super) dtype: DType,
    pub(super) output_dtype: DType,
    /// Number of groups.
    pub(super) e: usize,
    pub(super) dims: Dims,
    pub(super) addresses: &'a [DeviceAddress],
}
