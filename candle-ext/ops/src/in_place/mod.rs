//! What an optimizer's loop does to flat buffers besides the update: clear, copy, measure.

mod cpu;

use candle_core::{Result, Tensor, bail};

use crate::floats::check_dtype;
use crate::storage::{host, same_storage, update};

/// Sets a contiguous view to zero in place.
pub fn zero_(x: &Tensor) -> Result<()> {
    check_dtype("zero_", "the tensor", x.dtype())?;
    update(x, "zero_", |x| {
        cpu::zero(x);
        Ok(())
    })
}

/// Copies `src` into the contiguous view `dst`, rounding to its dtype. Both may view one buffer.
pub fn copy_into(dst: &Tensor, src: &Tensor) -> Result<()> {
    check_dtype("copy_into", "the destination", dst.dtype())?;
    check_dtype("copy_into", "the source", src.dtype())?;
    if dst.elem_count() != src.elem_count() {
        bail!("copy_into: {:?} does not fit into {:?}", src.dims(), dst.dims())
    }
    let src = match same_storage(dst, src) {
        true => src.detach().force_contiguous()?,
        false => src.detach().contiguous()?,
    };
    let src = host("copy_into", &src)?;
    let src = src.floats()?;
    update(dst, "copy_into", |dst| {
        cpu::copy(dst, src);
        Ok(())
    })
}

/// The sum of squares of all elements, in f64 and in an order that no thread count changes.
pub fn sum_of_squares(x: &Tensor) -> Result<f64> {
    check_dtype("sum_of_squares", "the tensor", x.dtype())?;
    let x = x.detach().contiguous()?;
    let x = host("sum_of_squares", &x)?;
    Ok(cpu::sum_of_squares(x.floats()?))
}
