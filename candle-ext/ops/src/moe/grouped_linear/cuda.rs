//! `grouped_linear` on CUDA: launches of `grouped.cuh`, and of `grouped_mma.cuh` on tensor cores; or cuBLASLt's grouped
//! GEMM. Sizes of groups stay on the device.

use candle_core::{DType, Result, Tensor, bail};

use super::call::GroupedGemmImpl;
use crate::cuda::gemm::grouped::{GroupedArrays, GroupedGemm, GroupedOutput};
use crate::cuda::{Arg, Blocks, DeviceAddress, Gpu, Out, address, gpu, same_dtype, suffix};
use crate::gemm::Accumulate;
use crate::moe::KERNELS;
use crate::weight_matmul::Dims;

const OP: &str = "grouped_linear";
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

/// Computes y = x w^T from x, or dx = dy w from dy, group by group.
pub(super) fn multiply(
    output: GroupedOutput,
    from: &Tensor,
    w: &Tensor,
    offsets: &Tensor,
    dims: Dims,
    implementation: GroupedGemmImpl,
) -> Result<Tensor> {
    match (implementation, output) {
        (GroupedGemmImpl::Cublas, _) => multiply_by_cublas(output, from, w, offsets, dims),
        (GroupedGemmImpl::Fused, GroupedOutput::Y) => {
            multiply_by_kernel("forward", from, w, offsets, [dims.t, dims.n, dims.k])
        }
        (GroupedGemmImpl::Fused, _) => multiply_by_kernel("grad_x", from, w, offsets, [dims.t, dims.k, dims.n]),
    }
}

/// Multiplies a [n, terms] with the weights of its groups, into [n, columns].
fn multiply_by_kernel(name: &str, a: &Tensor, w: &Tensor, offsets: &Tensor, sizes: [usize; 3]) -> Result<Tensor> {
    same_dtype(OP, a, w)?;
    let (on, e) = (gpu(OP, a)?, offsets.elem_count() - 1);
    let [n, columns, terms] = sizes;
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

/// Computes dw = [dw +] dy^T x of each group.
pub(super) fn grad_w(
    dy: &Tensor,
    x: &Tensor,
    offsets: &Tensor,
    (dw, accumulate): (&Tensor, Accumulate),
    dims: Dims,
    implementation: GroupedGemmImpl,
) -> Result<()> {
    if implementation == GroupedGemmImpl::Cublas {
        return grad_w_by_cublas(dy, x, offsets, (dw, accumulate), dims);
    }
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

/// Rows that a block of `zero_rest` zeroes.
const ZEROED_ROWS: usize = 64;
/// Bytes of a word that the kernels zero.
const WORD: usize = 8;

/// Buffers that [`GroupedArrays`] points to.
struct ArrayBuffers {
    _kept: [Out; 3],
    arrays: GroupedArrays,
}

/// Addresses and dtypes of x, y and w in a grouped GEMM.
struct Operands {
    addresses: [DeviceAddress; 3],
    dtype: DType,
    w_dtype: DType,
}

impl Operands {
    /// Fails unless cuBLASLt's grouped GEMM supports the operands.
    fn check(&self, dims: Dims) -> Result<()> {
        let why = match self.dtype {
            DType::BF16 | DType::F16 if !dims.n.is_multiple_of(8) || !dims.k.is_multiple_of(8) => {
                format!("sizes must be multiples of 8, not {} and {}", dims.k, dims.n)
            }
            DType::BF16 | DType::F16 if self.addresses.iter().any(|at| at % 16 != 0) => {
                "tensors must be aligned to 16 bytes".to_string()
            }
            DType::BF16 | DType::F16 => return Ok(()),
            other => format!("the dtype must be bf16 or f16, not {other:?}"),
        };
        bail!("{OP}: cublas is requested but unusable: {why}; choose `experts_implementation: fused`")
    }

    /// Writes the arrays that describe the groups.
    fn arrays(&self, on: Gpu, offsets: &Tensor, dims: Dims, adds: bool) -> Result<ArrayBuffers> {
        let e = offsets.elem_count() - 1;
        // Each run of addresses is aligned to 16 bytes.
        let stride = e.next_multiple_of(2);
        let buffers =
            [Out::new(on, DType::I64, 3 * stride)?, Out::new(on, DType::U32, 3 * e)?, Out::new(on, DType::F32, 2)?];
        let [addresses, sizes, factors] = [0, 1, 2].map(|i: usize| buffers[i].address);
        let row_bytes = |n: usize| Arg::I64((n * self.dtype.size_in_bytes()) as i64);
        let args = [
            Arg::U64(self.addresses[0]),
            Arg::U64(self.addresses[1]),
            Arg::U64(self.addresses[2]),
            Arg::Address(address(OP, offsets)?),
            Arg::Address(addresses),
            Arg::Address(sizes),
            Arg::Address(factors),
            row_bytes(dims.k),
            row_bytes(dims.n),
            Arg::I64((dims.n * dims.k * self.w_dtype.size_in_bytes()) as i64),
            Arg::I32(dims.k as i32),
            Arg::I32(dims.n as i32),
            Arg::I32(e as i32),
            Arg::I32(stride as i32),
            Arg::F32(if adds { 1.0 } else { 0.0 }),
        ];
        // SAFETY: offsets are [e + 1], and the arrays have 3 runs of `stride` or e elements and 2 factors.
        unsafe { KERNELS.launch(on, "grouped_arrays", [e.div_ceil(256), 1, 1], 256, &args)? };
        let run = |of: DeviceAddress, i: usize, bytes: usize| of + (i * bytes) as u64;
        let arrays = GroupedArrays {
            x: run(addresses, 0, 8 * stride),
            y: run(addresses, 1, 8 * stride),
            w: run(addresses, 2, 8 * stride),
            n_in: run(sizes, 0, 4 * e),
            n_out: run(sizes, 1, 4 * e),
            n_rows: run(sizes, 2, 4 * e),
            alpha: factors,
            beta: run(factors, 1, 4),
        };
        Ok(ArrayBuffers { _kept: buffers, arrays })
    }
}

/// Computes y from x, or x from y, by cuBLASLt.
fn multiply_by_cublas(
    output: GroupedOutput,
    from: &Tensor,
    w: &Tensor,
    offsets: &Tensor,
    dims: Dims,
) -> Result<Tensor> {
    same_dtype(OP, from, w)?;
    let (on, e, dtype) = (gpu(OP, from)?, offsets.elem_count() - 1, from.dtype());
    let columns = if output == GroupedOutput::Y { dims.n } else { dims.k };
    let to = Out::new(on, dtype, dims.t * columns)?;
    if dims.t == 0 {
        return Ok(to.into_tensor((0, columns)));
    }
    let [x, y] = match output {
        GroupedOutput::Y => [address(OP, from)?, to.address],
        _ => [to.address, address(OP, from)?],
    };
    let operands = Operands { addresses: [x, y, address(OP, w)?], dtype, w_dtype: dtype };
    operands.check(dims)?;
    let buffers = operands.arrays(on, offsets, dims, false)?;
    let (n, n_in, n_out, arrays) = (dims.t, dims.k, dims.n, buffers.arrays);
    let gemm = GroupedGemm { output, adds: false, dtype, output_dtype: dtype, e, n, n_in, n_out, arrays };
    let words = columns * dtype.size_in_bytes() / WORD;
    let sizes = [n, e, words].map(|size| Arg::I32(size as i32));
    let args = [&[Arg::Address(address(OP, offsets)?), Arg::Address(to.address)][..], &sizes].concat();
    // SAFETY: x and y have n rows, w a matrix per group, and the arrays describe them. Rows are multiples of 16 bytes.
    unsafe {
        gemm.run(on)?;
        KERNELS.launch(on, "zero_rest", [n.div_ceil(ZEROED_ROWS), 1, 1], 256, &args)?;
    }
    Ok(to.into_tensor((n, columns)))
}

/// Computes dw by cuBLASLt.
fn grad_w_by_cublas(
    dy: &Tensor,
    x: &Tensor,
    offsets: &Tensor,
    (dw, accumulate): (&Tensor, Accumulate),
    dims: Dims,
) -> Result<()> {
    let (on, e) = (gpu(OP, x)?, offsets.elem_count() - 1);
    let (dtype, w_dtype, adds) = (x.dtype(), dw.dtype(), accumulate == Accumulate::Add);
    let operands = Operands { addresses: [address(OP, x)?, address(OP, dy)?, address(OP, dw)?], dtype, w_dtype };
    operands.check(dims)?;
    let buffers = operands.arrays(on, offsets, dims, adds)?;
    let (n, n_in, n_out, arrays) = (dims.t, dims.k, dims.n, buffers.arrays);
    let gemm = GroupedGemm { output: GroupedOutput::W, adds, dtype, output_dtype: w_dtype, e, n, n_in, n_out, arrays };
    let words = n_in * n_out * w_dtype.size_in_bytes() / WORD;
    let args = [Arg::Address(address(OP, offsets)?), Arg::Address(operands.addresses[2]), Arg::I64(words as i64)];
    // SAFETY: x and dy have n rows, dw a matrix per group, and the arrays describe them.
    unsafe {
        gemm.run(on)?;
        match adds {
            true => Ok(()),
            false => KERNELS.launch(on, "zero_empty_groups", [words.div_ceil(256).min(64), e, 1], 256, &args),
        }
    }
}
