//! y = x / sqrt(mean(x^2) + eps) * w over the last dim.
//!
//! t rows (all leading dims), d elements

mod cpu;

use candle_core::{Result, Tensor, bail};

use crate::floats::{FloatBuf, check_dtype};
use crate::storage::{self, host};
use crate::tape::record;
use crate::weight::Weight;

/// y = x / sqrt(mean(x^2) + eps) * w over the last dim, in x's dtype. Accumulates in f32.
///
/// The normalised x is rounded to x's dtype before it meets w, as transformers does it.
/// With n = x r and r = 1 / sqrt(mean(x^2) + eps): dw += sum(dy n), dx = r (g - n mean(g n)) for
/// g = dy w.
pub fn rms_norm(x: &Tensor, w: &Weight, eps: f64) -> Result<Tensor> {
    let d = check(x, w)?;
    let input = x.detach().contiguous()?;
    let mut y = FloatBuf::zeros(x.dtype(), x.elem_count())?;
    {
        let (x, w) = (host("rms_norm", &input)?, host("rms_norm", w.value())?);
        cpu::forward(x.floats()?, w.floats()?, y.view(), d, eps as f32);
    }
    let (weight, wants_dx) = (w.clone(), x.track_op());
    let out = (y.into_storage(), x.shape().clone());
    record("rms_norm", [x, w.anchor()], out, move |_, dy| {
        let dx = backward(&input, &weight, dy, wants_dx, eps as f32)?;
        Ok([dx, None])
    })
}

fn backward(input: &Tensor, weight: &Weight, dy: &Tensor, wants_dx: bool, eps: f32) -> Result<Option<Tensor>> {
    let (x, w) = (host("rms_norm", input)?, host("rms_norm", weight.value())?);
    let dy = host("rms_norm", dy)?;
    let (x, w, dy) = (x.floats()?, w.floats()?, dy.floats()?);
    if let Some(sink) = weight.sink() {
        sink.add("rms_norm", |dw| cpu::add_grad_w(x, dy, dw, eps))?;
    }
    if !wants_dx {
        return Ok(None);
    }
    let mut dx = FloatBuf::zeros(input.dtype(), input.elem_count())?;
    cpu::grad_x(x, w, dy, dx.view(), eps);
    Ok(Some(storage::tensor(dx, input.shape())))
}

fn check(x: &Tensor, w: &Weight) -> Result<usize> {
    check_dtype("rms_norm", "the input", x.dtype())?;
    check_dtype("rms_norm", "the weight", w.value().dtype())?;
    let Some(&d) = x.dims().last().filter(|&&d| d > 0) else {
        bail!("rms_norm: want an input [.., d], got {:?}", x.dims())
    };
    w.check("rms_norm", &[d])?;
    Ok(d)
}
