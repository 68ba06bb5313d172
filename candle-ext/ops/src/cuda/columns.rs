//! Sums over the rows of a matrix: the gradients of norms and biases.

use candle_core::{DType, Result, Tensor, bail};

use super::{Address, Arg, FLAT_THREADS, Gpu, Kernels, Out, address, suffix};

/// Columns of a block, one for each lane of a warp.
const COLUMNS: usize = 32;

/// Parts of the rows whose sums are added one after another: fixed, so that the result is the same every time.
const PARTS: usize = 16;

/// Adds to `total` [n] what `sum_columns` of common.cuh makes of t rows. `name` is the op's kernel that calls it: it takes
/// `inputs`, the sums of parts, t and n. The op also has `add_parts_f32`
/// and `_bf16`.
///
/// # Safety
///
/// The inputs must be what that kernel reads for t rows of n columns.
pub(crate) unsafe fn add_sums(
    kernels: &Kernels,
    on: Gpu,
    name: &str,
    inputs: &[Address],
    [t, n]: [usize; 2],
    total: &Tensor,
) -> Result<()> {
    let (op, total_at) = (kernels.op, address(kernels.op, total)?);
    if total.elem_count() != n {
        bail!("{op}: the gradient has {} elements, want {n}", total.elem_count())
    }
    let parts = Out::new(on, DType::F32, PARTS * n)?;
    let mut args: Vec<Arg> = inputs.iter().map(|input| Arg::Address(*input)).collect();
    args.extend([Arg::Address(parts.address), Arg::I32(t as i32), Arg::I32(n as i32)]);
    // SAFETY: the caller answers for the inputs; there is a row of n for each part.
    unsafe { kernels.launch(on, name, [n.div_ceil(COLUMNS), PARTS, 1], FLAT_THREADS, &args)? };
    let args = [Arg::Address(parts.address), Arg::Address(total_at), Arg::I32(PARTS as i32), Arg::I32(n as i32)];
    let name = format!("add_parts_{}", suffix(op, total.dtype())?);
    // SAFETY: as above; total has n elements of the format in the name.
    unsafe { kernels.launch_flat(on, &name, n, 1, &args) }
}
