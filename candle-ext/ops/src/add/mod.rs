//! Sum of two activations: a residual connection, or gradients of a tensor that two ops read.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::recording::record;
use crate::span::span;
use crate::storage::{self, host};

/// Returns a + b, element by element, computed in f32 and rounded once to a's dtype.
///
/// b has the dtype of a, or is bf16 or f16 if a is f32: a sublayer's output that joins an f32 residual stream. Its gradient is
/// rounded to its dtype.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let _span = span("add", "forward");
    check(a, b)?;
    let (left, right) = (a.contiguous()?, b.contiguous()?);
    let y = on_device!("add", left, {
        cpu => {
            let mut y = FloatBuf::unwritten(a.dtype(), a.elem_count())?;
            let (left, right) = (host("add", &left)?, host("add", &right)?);
            cpu::add(left.floats()?, right.floats()?, y.view());
            storage::tensor(y, a.shape())
        },
        cuda => cuda::add(&left, &right)?,
    });
    Ok(record_sum(a, b, y))
}

/// Records a + b on the tape.
pub(crate) fn record_sum(a: &Tensor, b: &Tensor, sum: Tensor) -> Tensor {
    let dtype_of_b = b.dtype();
    record("add", [a.into(), b.into()], sum, move |dy, _| Ok([Some(dy.clone()), Some(dy.to_dtype(dtype_of_b)?)]))
}

/// Fails unless both tensors have the same shape, and the same dtype or f32 and a narrower one.
pub(crate) fn check(a: &Tensor, b: &Tensor) -> Result<()> {
    check_dtype("add", "the input", a.dtype())?;
    check_dtype("add", "the second input", b.dtype())?;
    if a.shape() != b.shape() || ![b.dtype(), DType::F32].contains(&a.dtype()) {
        bail!("add: one is {:?} {:?}, the other {:?} {:?}", a.dtype(), a.dims(), b.dtype(), b.dims())
    }
    Ok(())
}
