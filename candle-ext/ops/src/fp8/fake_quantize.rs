//! Linear layer that rounds its operands to FP8 and multiplies them in the dtype of its input.

use candle_core::{DType, Result, Tensor, bail};

use crate::linear::bias::add_grad_bias;
use crate::moe::grouped_linear::{TokensPerCall, grouped_linear};
use crate::recording::record;
use crate::weight::Weight;

/// Computes y = Q(x) Q(w)^T + b, with x [.., k]. The layer is the only expert of a grouped layer.
pub(crate) fn fake_quantized_linear(x: &Tensor, w: &Weight, bias: Option<&Weight>, out_dtype: DType) -> Result<Tensor> {
    if out_dtype != x.dtype() {
        bail!(
            "linear: a layer that rounds to FP8 has an output of the input's dtype {:?}, not {out_dtype:?}",
            x.dtype()
        )
    }
    let mut shape = x.dims().to_vec();
    let n_tokens = shape[..shape.len() - 1].iter().product::<usize>();
    if let Some(last) = shape.last_mut() {
        *last = w.dims()[0];
    }
    let offsets = Tensor::new(&[0, n_tokens as u32], x.device())?;
    let rows = crate::reshape(x, (n_tokens, w.dims()[1]))?;
    let y = crate::reshape(&grouped_linear(&rows, w, &offsets, TokensPerCall::of(n_tokens))?, shape)?;
    bias.map_or(Ok(y.clone()), |bias| add_bias(&y, bias))
}

/// Computes y + b, with y [.., n] and b [n].
fn add_bias(y: &Tensor, bias: &Weight) -> Result<Tensor> {
    let sum = y.detach().broadcast_add(&bias.value()?)?;
    let sink = bias.sink().cloned();
    Ok(record("bias", [y.into(), bias.into()], sum, move |dy, _| {
        sink.as_ref().map_or(Ok(()), |sink| add_grad_bias(dy, sink))?;
        Ok([Some(dy.clone()), None])
    }))
}
