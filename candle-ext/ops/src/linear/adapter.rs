//! The two matmuls of a LoRA adapter.
//!
//! A GPU applies the scaling and adds the output of the frozen layer within the matmuls. It then launches no kernel between
//! them, and rounds a sum once.

use candle_core::{Result, Tensor, bail};

use super::{OutputDtype, SavedLinear, check, linear};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::{cuda, output_shape};
use crate::add::add;
use crate::device::on_device;
use crate::recording::{no_grad, record};
use crate::scale::scale;
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::storage;
use crate::weight::Weight;
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::weight_matmul::Dims;

/// Computes factor * x w^T, with x [.., k], w [n, k] and y [.., n]. The sum and the factor are f32; the result is rounded once,
/// to x's dtype.
pub fn linear_scaled(x: &Tensor, w: &Weight, factor: f64) -> Result<Tensor> {
    on_device!("linear", x, {
        cpu => scale(&linear(x, w, None, OutputDtype::F32)?, factor, x.dtype()),
        cuda => {
            let (dims, input) = (check_factor(x, w)?, x.contiguous()?);
            let terms = cuda::GemmTerms { factor: factor as f32, ..cuda::GemmTerms::NONE };
            let y = cuda::forward(&input, &w.stored()?.dense(x.dtype())?, terms, x.dtype(), dims)?;
            let saved = SavedLinear { factor: factor as f32, ..SavedLinear::new(x, &input, w, None, dims) };
            let y = storage::tensor(y.into_storage(), output_shape(x, dims));
            Ok(record("linear", [x.into(), w.into()], y, move |dy, context| Ok([saved.backward(dy, context)?, None])))
        },
    })
}

/// Computes base + x w^T, with x [.., k], w [n, k] and base [.., n] in the dtype of x or in f32, which the result has.
///
/// A CPU rounds the matmul to that dtype before it adds.
pub fn linear_plus(x: &Tensor, w: &Weight, base: &Tensor) -> Result<Tensor> {
    on_device!("linear", x, {
        cpu => {
            let output = if base.dtype() == x.dtype() { OutputDtype::SameAsInput } else { OutputDtype::F32 };
            add(base, &linear(x, w, None, output)?)
        },
        cuda => {
            let (dims, input, addend) = (check_factor(x, w)?, x.contiguous()?, base.contiguous()?);
            let shape = output_shape(x, dims);
            if base.dims() != shape {
                bail!("linear: want an addend {shape:?}, got {:?}", base.dims())
            }
            let terms = cuda::GemmTerms { plus: Some(&addend), ..cuda::GemmTerms::NONE };
            let y = cuda::forward(&input, &w.stored()?.dense(x.dtype())?, terms, base.dtype(), dims)?;
            let saved = SavedLinear::new(x, &input, w, None, dims);
            let y = storage::tensor(y.into_storage(), shape);
            Ok(record("linear", [x.into(), w.into(), base.into()], y, move |dy, context| {
                Ok([saved.backward(dy, context)?, None, Some(dy.clone())])
            }))
        },
    })
}

/// Returns true if layers with adapters are joined on the device of x: a GPU adds the adapters' outputs to columns of the joined
/// output.
pub fn joins_adapters(x: &Tensor) -> Result<bool> {
    Ok(on_device!("linear", x, {
        cpu => false,
        cuda => true,
    }))
}

/// Adds x w^T, with x [t, k] and w [n, k], to n columns of `base` [t, ..] from column `first` on, and returns the sum. It takes the
/// memory of `base`, which no other op may read.
///
/// The bits equal those of [`linear_plus`] for these columns.
pub fn linear_plus_columns(x: &Tensor, w: &Weight, base: &Tensor, first: usize) -> Result<Tensor> {
    let (dims, input) = (check("linear", x, w, None)?, x.contiguous()?);
    let fits = |(t, width): (usize, usize)| t == dims.t && first + dims.n <= width;
    if !base.dims2().is_ok_and(fits) || base.dtype() != x.dtype() {
        let got = (base.dtype(), base.dims());
        bail!("linear: want {} columns from {first} on of {} rows of {:?}, got {got:?}", dims.n, dims.t, x.dtype())
    }
    on_device!("linear", x, {
        cpu => {
            let terms = no_grad(|| linear(&input, w, None, OutputDtype::SameAsInput))?;
            let sums = add(&base.narrow(1, first, dims.n)?.contiguous()?, &terms)?;
            base.slice_set(&sums, 1, first)?;
        },
        cuda => {
            check_factor(x, w)?;
            cuda::add_to_columns(&input, &w.stored()?.dense(x.dtype())?, (base, first), dims)?;
        },
    });
    let saved = SavedLinear::new(x, &input, w, None, dims);
    // A new tensor without memory of its own.
    let y = base.reshape(base.shape())?;
    Ok(record("linear", [x.into(), w.into(), base.into()], y, move |dy, context| {
        let columns = dy.narrow(1, first, dims.n)?;
        let columns = on_device!("linear", dy, {
            cpu => columns.contiguous()?,
            cuda => columns,
        });
        Ok([saved.backward(&columns, context)?, None, Some(dy.clone())])
    }))
}

/// Returns the sizes of a matmul. Fails if the weight does not fit the input, or multiplies in FP8, which factors of adapters
/// never do.
#[cfg(any(feature = "cuda", feature = "emulate"))]
fn check_factor(x: &Tensor, w: &Weight) -> Result<Dims> {
    if w.fp8().is_some() {
        bail!("linear: a factor of an adapter cannot multiply in FP8")
    }
    check("linear", x, w, None)
}
