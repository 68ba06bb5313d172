//! Operations on flat buffers: clear, copy, sum of squares, number of zeros.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use crate::device::on_device;
use crate::floats::check_dtype;
use crate::span::span;
use crate::storage::{host, same_storage, update};

/// Sets a contiguous view to zero in place.
pub fn zero_(x: &Tensor) -> Result<()> {
    let _span = span("zero_", "");
    check_dtype("zero_", "the tensor", x.dtype())?;
    on_device!("zero_", x, {
        cpu => update(x, "zero_", |x| {
            cpu::zero(x);
            Ok(())
        }),
        cuda => cuda::zero(x),
    })
}

/// Copies `src` into the contiguous view `dst`, rounded to its dtype.
///
/// Float views may share one buffer. Byte views must be in two buffers.
pub fn copy_into(dst: &Tensor, src: &Tensor) -> Result<()> {
    let _span = span("copy_into", "");
    if [dst, src].map(Tensor::dtype) == [DType::U8; 2] && dst.elem_count() == src.elem_count() {
        return dst.flatten_all()?.slice_set(&src.flatten_all()?, 0, 0);
    }
    check_dtype("copy_into", "the destination", dst.dtype())?;
    check_dtype("copy_into", "the source", src.dtype())?;
    if dst.elem_count() != src.elem_count() {
        bail!("copy_into: {:?} does not fit into {:?}", src.dims(), dst.dims())
    }
    let src = match same_storage(dst, src) {
        true => src.detach().force_contiguous()?,
        false => src.detach().contiguous()?,
    };
    on_device!("copy_into", dst, {
        cpu => {
            let src = host("copy_into", &src)?;
            let src = src.floats()?;
            update(dst, "copy_into", |dst| {
                cpu::copy(dst, src);
                Ok(())
            })
        },
        cuda => cuda::copy(dst, &src),
    })
}

/// Returns the sum of squares of all elements, an f64 scalar on x's device.
///
/// The order of the sum does not depend on the number of threads. Read several results at once to wait for a GPU only
/// once.
pub fn sum_of_squares(x: &Tensor) -> Result<Tensor> {
    let _span = span("sum_of_squares", "");
    check_dtype("sum_of_squares", "the tensor", x.dtype())?;
    let x = x.detach().contiguous()?;
    on_device!("sum_of_squares", x, {
        cpu => Tensor::new(cpu::sum_of_squares(host("sum_of_squares", &x)?.floats()?), x.device()),
        cuda => cuda::sum_of_squares(&x),
    })
}

/// Returns the number of elements equal to zero, an f64 scalar on x's device.
pub fn count_zeros(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "count_zeros";
    let _span = span(OP, "");
    check_dtype(OP, "the tensor", x.dtype())?;
    let x = x.detach().contiguous()?;
    on_device!(OP, x, {
        cpu => Tensor::new(cpu::count_zeros(host(OP, &x)?.floats()?), x.device()),
        cuda => cuda::count_zeros(&x),
    })
}
