//! `grouped_linear` on CUDA: by our kernels, or by a library's grouped GEMM.

use candle_core::{Result, Tensor};

use super::call::{GroupedGemmImpl, OP};
use super::choice::choose;
use super::operands::{GroupedKernel, GroupedOperands};
use super::{fused, library};
use crate::cuda::gemm::grouped::GroupedOutput;
use crate::cuda::{address, gpu};
use crate::gemm::Accumulate;
use crate::weight_matmul::Dims;

/// Computes y = x w^T from x, or dx = dy w from dy, group by group.
pub(super) fn multiply(
    output: GroupedOutput,
    from: &Tensor,
    w: &Tensor,
    offsets: &Tensor,
    dims: Dims,
    implementation: GroupedGemmImpl,
) -> Result<Tensor> {
    let (on, e, addresses) = (gpu(OP, from)?, offsets.elem_count() - 1, [address(OP, from)?, address(OP, w)?]);
    let (dtype, output_dtype) = (from.dtype(), from.dtype());
    let operands = GroupedOperands { output, dtype, output_dtype, e, dims, addresses: &addresses };
    match choose(implementation, on, operands)? {
        GroupedKernel::Library(by) => library::multiply(by, output, from, w, offsets, dims),
        GroupedKernel::Fused => fused::multiply(output, from, w, offsets, dims),
    }
}

/// Computes dw = [dw +] dy^T x of each group.
pub(super) fn grad_w(
    dy: &Tensor,
    x: &Tensor,
    offsets: &Tensor,
    (dw, accumulate): (&Tensor, Accumulate),
    dims: Dims,
    implementation: GroupedGemmImpl,
) -> Result<()> {
    let addresses = [address(OP, dy)?, address(OP, x)?, address(OP, dw)?];
    let operands = GroupedOperands {
        output: GroupedOutput::W,
        dtype: x.dtype(),
        output_dtype: dw.dtype(),
        e: offsets.elem_count() - 1,
        dims,
        addresses: &addresses,
    };
    match choose(implementation, gpu(OP, x)?, operands)? {
        GroupedKernel::Library(by) => library::grad_w(by, dy, x, offsets, (dw, accumulate), dims),
        GroupedKernel::Fused => fused::grad_w(dy, x, offsets, (dw, accumulate), dims),
    }
}
