//! The in-place operations on CUDA: launches of `kernel.cu`.

use candle_core::{DType, Result, Tensor};

use crate::cuda::{Arg, FLAT_THREADS, Out, address, columns, gpu, kernels, suffix};

kernels!("in_place");

/// Elements per thread, approximately.
const PER_THREAD: usize = 8;
/// Blocks of a sum. Fixed, so that the order of the sum does not depend on the device. An H100 runs all of them at
/// once.
const PARTS: usize = columns::BLOCKS;

/// Sets x to 0.
pub(super) fn zero(x: &Tensor) -> Result<()> {
    let n = x.elem_count() * x.dtype().size_in_bytes() / 2;
    let args = [Arg::Address(address("zero_", x)?), Arg::I64(n as i64)];
    // SAFETY: x has n elements of two bytes.
    unsafe { KERNELS.launch_flat(gpu("zero_", x)?, "zero_16_bits", n, PER_THREAD, &args) }
}

/// Copies src to dst, rounded to dst's dtype.
pub(super) fn copy(dst: &Tensor, src: &Tensor) -> Result<()> {
    const OP: &str = "copy_into";
    let n = dst.elem_count();
    let args = [Arg::Address(address(OP, src)?), Arg::Address(address(OP, dst)?), Arg::I64(n as i64)];
    let name = format!("copy_{}_{}", suffix(OP, src.dtype())?, suffix(OP, dst.dtype())?);
    // SAFETY: both have n elements, each in the dtype of the kernel's name; they do not overlap.
    unsafe { KERNELS.launch_flat(gpu(OP, dst)?, &name, n, PER_THREAD, &args) }
}

/// Returns the sum of squares, an f64 scalar.
pub(super) fn sum_of_squares(x: &Tensor) -> Result<Tensor> {
    sum("sum_of_squares", "sum_squares", x)
}

/// Returns the number of zeros, an f64 scalar.
pub(super) fn count_zeros(x: &Tensor) -> Result<Tensor> {
    sum("count_zeros", "count_zeros", x)
}

/// Sums a term of each element with `kernel`.
fn sum(op: &'static str, kernel: &str, x: &Tensor) -> Result<Tensor> {
    let on = gpu(op, x)?;
    let n = x.elem_count();
    let n_parts = n.div_ceil(PER_THREAD * FLAT_THREADS).clamp(1, PARTS);
    let (parts, total) = (Out::new(on, DType::F64, n_parts)?, Out::new(on, DType::F64, 1)?);
    let args = [Arg::Address(address(op, x)?), Arg::Address(parts.address), Arg::I64(n as i64)];
    let name = format!("{kernel}_{}", suffix(op, x.dtype())?);
    // SAFETY: x has n elements; `parts` has one element per block.
    unsafe { KERNELS.launch(on, &name, [n_parts, 1, 1], FLAT_THREADS, &args)? };
    let args = [Arg::Address(parts.address), Arg::Address(total.address), Arg::I32(n_parts as i32)];
    // SAFETY: parts has n_parts elements, total one.
    unsafe { KERNELS.launch(on, "add_parts", [1, 1, 1], FLAT_THREADS, &args)? };
    Ok(total.into_tensor(()))
}
