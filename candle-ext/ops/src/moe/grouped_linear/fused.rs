//! `grouped_linear` by our kernels on CUDA: `grouped.cuh`, and `grouped_mma.cuh` on tensor cores. Sizes of groups stay on the
//! device.

use candle_core::{DType, Result, Tensor};

use super::call::OP;
use crate::cuda::gemm::grouped::GroupedOutput;
use crate::cuda::{Arg, Blocks, DeviceAddress, Out, address, gpu, same_dtype, suffix};
use crate::gemm::Accumulate;
use crate::moe::KERNELS;
use crate::weight_matmul::Dims;

/// Rows of an output tile.
const ROWS: usize = 64;

/// Kernels that multiply.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Arithmetic {
    /// f32 on CUDA cores.
    Plain,
    /// Tensor cores (mma.sync), for 16-bit rows of multiples of eight elements, aligned to 16 bytes.
    Mma,
}

impl Arithmetic {
    fn of(dtype: DType, widths: [usize; 2], addresses: &[DeviceAddress]) -> Self {
        let is_wide = widths.iter().all(|width| width.is_multiple_of(8)) && addresses.iter().all(|at| at % 16 == 0);
        if dtype != DType::F32 && is_wide { Self::Mma } else { Self::Plain }
    }

    fn prefix(self) -> &'static str {
        match self {
            Self::Plain => "grouped",
            Self::Mma => "grouped_mma",
        }
    }

    /// Returns the columns of an output tile.
    fn columns(self) -> usize {
        match self {
            Self::Plain => 64,
            Self::Mma => 128,
        }
    }

    fn blocks(self, grid: [usize; 3]) -> Blocks {
        match self {
            Self::Plain => Blocks { grid, threads: 256, shared_bytes: 0 },
            // Two stages of 64 terms of 64 rows and 128 columns.
            Self::Mma => Blocks { grid, threads: 128, shared_bytes: 2 * 64 * (64 + 128) * 2 },
        }
    }
}

/// Computes y or dx by our kernels: a [n, terms] times the weights of its groups, into [n, columns].
pub(super) fn multiply(output: GroupedOutput, a: &Tensor, w: &Tensor, offsets: &Tensor, dims: Dims) -> Result<Tensor> {
    same_dtype(OP, a, w)?;
    let (on, e) = (gpu(OP, a)?, offsets.elem_count() - 1);
    let (name, [n, columns, terms]) = match output {
        GroupedOutput::Y => ("forward", [dims.t, dims.n, dims.k]),
        _ => ("grad_x", [dims.t, dims.k, dims.n]),
    };
    let y = Out::new(on, a.dtype(), n * columns)?;
    let addresses = [address(OP, a)?, address(OP, w)?, address(OP, offsets)?, y.address];
    let sizes = [n, e, columns, terms].map(|size| Arg::I32(size as i32));
    let args = [&addresses.map(Arg::Address)[..], &sizes].concat();
    let arithmetic = Arithmetic::of(a.dtype(), [columns, terms], &[addresses[0], addresses[1], addresses[3]]);
    let name = format!("{}_{name}_{}", arithmetic.prefix(), suffix(OP, a.dtype())?);
    // Each group, and the rows after the last, may have one tile that is not full.
    let blocks = arithmetic.blocks([n / ROWS + e + 1, columns.div_ceil(arithmetic.columns()), 1]);
    // SAFETY: a has n rows of `terms` elements, w a matrix of terms * columns elements per group, y n rows; offsets [e + 1]
    // are at most n.
    unsafe { KERNELS.launch_blocks(on, &name, blocks, &args)? };
    Ok(y.into_tensor((n, columns)))
}

/// Computes dw by our kernels.
pub(super) fn grad_w(
    dy: &Tensor,
    x: &Tensor,
    offsets: &Tensor,
    (dw, accumulate): (&Tensor, Accumulate),
    dims: Dims,
) -> Result<()> {
    let (on, e) = (gpu(OP, x)?, offsets.elem_count() - 1);
    let addresses = [address(OP, dy)?, address(OP, x)?, address(OP, offsets)?, address(OP, dw)?];
    let overwrites = i32::from(accumulate == Accumulate::Overwrite);
    let sizes = [Arg::I32(dims.n as i32), Arg::I32(dims.k as i32), Arg::I32(overwrites)];
    let args = [&addresses.map(Arg::Address)[..], &sizes].concat();
    let arithmetic = Arithmetic::of(x.dtype(), [dims.n, dims.k], &[addresses[0], addresses[1], addresses[3]]);
    let (prefix, dtypes) = (arithmetic.prefix(), [suffix(OP, x.dtype())?, suffix(OP, dw.dtype())?]);
    let name = format!("{prefix}_grad_w_{}_{}", dtypes[0], dtypes[1]);
    let blocks = arithmetic.blocks([dims.k.div_ceil(arithmetic.columns()), dims.n.div_ceil(ROWS), e]);
    // SAFETY: dy and x have t rows of n and k elements, dw n * k elements per group.
    unsafe { KERNELS.launch_blocks(on, &name, blocks, &args) }
}
