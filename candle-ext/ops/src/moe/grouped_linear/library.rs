//! `grouped_linear` by a library's grouped GEMM on CUDA: cuBLASLt or CUTLASS. A kernel writes sizes and addresses of all
//! groups to arrays on the device.

use candle_core::{DType, Result, Tensor};

use super::call::OP;
use super::operands::GroupedLibrary;
use crate::cuda::gemm::grouped::{GroupedArrays, GroupedGemm, GroupedOutput, GroupedProblems, ProblemArrays};
use crate::cuda::{Arg, DeviceAddress, Gpu, Out, address, gpu, same_dtype};
use crate::gemm::Accumulate;
use crate::grouped_tile::GroupedTile;
use crate::moe::KERNELS;
use crate::weight_matmul::Dims;

/// Rows that a block of `zero_rest` zeroes.
const ZEROED_ROWS: usize = 64;
/// Bytes of a word that the kernels zero.
const WORD: usize = 8;

/// A grouped matmul and the addresses of x, y and w. The rows of x and w are [`Dims::k`] long, those of y [`Dims::n`].
struct Multiplication<'a> {
    on: Gpu<'a>,
    output: GroupedOutput,
    adds: bool,
    offsets: &'a Tensor,
    dims: Dims,
    addresses: [DeviceAddress; 3],
    dtype: DType,
    w_dtype: DType,
}

/// Computes y from x, or x from y.
pub(super) fn multiply(
    by: GroupedLibrary,
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
    let addresses = [x, y, address(OP, w)?];
    Multiplication { on, output, adds: false, offsets, dims, addresses, dtype, w_dtype: dtype }.run(by)?;
    let words = columns * dtype.size_in_bytes() / WORD;
    let sizes = [dims.t, e, words].map(|size| Arg::I32(size as i32));
    let args = [&[Arg::Address(address(OP, offsets)?), Arg::Address(to.address)][..], &sizes].concat();
    // SAFETY: the output has t rows of multiples of 16 bytes.
    unsafe { KERNELS.launch(on, "zero_rest", [dims.t.div_ceil(ZEROED_ROWS), 1, 1], 256, &args)? };
    Ok(to.into_tensor((dims.t, columns)))
}

/// Computes dw = [dw +] dy^T x of each group.
pub(super) fn grad_w(
    by: GroupedLibrary,
    dy: &Tensor,
    x: &Tensor,
    offsets: &Tensor,
    (dw, accumulate): (&Tensor, Accumulate),
    dims: Dims,
) -> Result<()> {
    let (on, e, output) = (gpu(OP, x)?, offsets.elem_count() - 1, GroupedOutput::W);
    let (dtype, w_dtype, adds) = (x.dtype(), dw.dtype(), accumulate == Accumulate::Add);
    let addresses = [address(OP, x)?, address(OP, dy)?, address(OP, dw)?];
    Multiplication { on, output, adds, offsets, dims, addresses, dtype, w_dtype }.run(by)?;
    if adds {
        return Ok(());
    }
    let words = dims.n * dims.k * w_dtype.size_in_bytes() / WORD;
    let args = [Arg::Address(address(OP, offsets)?), Arg::Address(addresses[2]), Arg::I64(words as i64)];
    // SAFETY: dw has a matrix per group.
    unsafe { KERNELS.launch(on, "zero_empty_groups", [words.div_ceil(256).min(64), e, 1], 256, &args) }
}

impl Multiplication<'_> {
    fn run(&self, by: GroupedLibrary) -> Result<()> {
        match by {
            GroupedLibrary::Cublas => self.run_by_cublas(),
            GroupedLibrary::Cutlass(tile) => self.run_by_cutlass(tile),
        }
    }

    fn n_groups(&self) -> usize {
        self.offsets.elem_count() - 1
    }

    /// Returns the addresses between the arrays of the operands: each array is aligned to 16 bytes.
    fn address_stride(&self) -> usize {
        self.n_groups().next_multiple_of(2)
    }

    fn output_dtype(&self) -> DType {
        if self.output == GroupedOutput::W { self.w_dtype } else { self.dtype }
    }

    fn run_by_cublas(&self) -> Result<()> {
        let Self { on, output, adds, dims, dtype, .. } = *self;
        let (e, stride) = (self.n_groups(), self.address_stride());
        let (addresses, sizes) = (Out::new(on, DType::I64, 3 * stride)?, Out::new(on, DType::U32, 3 * e)?);
        let factors = Out::new(on, DType::F32, 2)?;
        let beta = if adds { 1.0 } else { 0.0 };
        self.write_arrays("grouped_arrays", [&addresses, &sizes, &factors], Arg::F32(beta))?;
        let [x, y, w] = runs(&addresses, 8 * stride);
        let [n_in, n_out, n_rows] = runs(&sizes, 4 * e);
        let [alpha, beta, _] = runs(&factors, 4);
        let arrays = GroupedArrays { x, y, w, n_in, n_out, n_rows, alpha, beta };
        let (n, n_in, n_out, output_dtype) = (dims.t, dims.k, dims.n, self.output_dtype());
        let gemm = GroupedGemm { output, adds, dtype, output_dtype, e, n, n_in, n_out, arrays };
        // SAFETY: x and y have t rows, w a matrix per group, and the arrays describe them.
        unsafe { gemm.run(on) }
    }

    fn run_by_cutlass(&self, tile: &'static GroupedTile) -> Result<()> {
        let Self { on, output, adds, .. } = *self;
        let (e, stride) = (self.n_groups(), self.address_stride());
        let (addresses, sizes) = (Out::new(on, DType::I64, 3 * stride)?, Out::new(on, DType::U32, 3 * e)?);
        let strides = Out::new(on, DType::I64, 2 * e)?;
        self.write_arrays("grouped_problems", [&addresses, &sizes, &strides], Arg::I32(output as i32))?;
        let [of_x, of_y, _] = runs(&strides, 8 * e);
        let arrays = ProblemArrays {
            sizes: sizes.address,
            addresses: output.in_order(runs(&addresses, 8 * stride)),
            strides: output.in_order([of_x, of_y, of_x]),
        };
        let problems = GroupedProblems { output, adds, output_dtype: self.output_dtype(), e, tile, arrays };
        // SAFETY: as above.
        unsafe { problems.run(on) }
    }

    /// Launches the kernel that writes the arrays of all groups; `last` is its last argument.
    fn write_arrays(&self, kernel: &str, arrays: [&Out; 3], last: Arg) -> Result<()> {
        let Dims { n, k, .. } = self.dims;
        let row_bytes = |n: usize| Arg::I64((n * self.dtype.size_in_bytes()) as i64);
        let sizes = [k, n, self.n_groups(), self.address_stride()].map(|size| Arg::I32(size as i32));
        let args = [
            &self.addresses.map(Arg::U64)[..],
            &[Arg::Address(address(OP, self.offsets)?)],
            &arrays.map(|array| Arg::Address(array.address)),
            &[row_bytes(k), row_bytes(n), Arg::I64((n * k * self.w_dtype.size_in_bytes()) as i64)],
            &sizes,
            &[last],
        ];
        // SAFETY: offsets are [e + 1]; the arrays have the elements that the kernel writes for e groups.
        unsafe { KERNELS.launch(self.on, kernel, [self.n_groups().div_ceil(256), 1, 1], 256, &args.concat()) }
    }
}

/// Returns the addresses of three consecutive runs of `n_bytes` each.
fn runs(of: &Out, n_bytes: usize) -> [DeviceAddress; 3] {
    [0, 1, 2].map(|i: usize| of.address + (i * n_bytes) as u64)
}
