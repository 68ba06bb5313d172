//! SwiGLU MLP of linear layers without bias: `linear`, `swiglu` and `linear`, or their fusion in FP8.

use candle_core::{Result, Tensor};

use crate::fp8::fp8_swiglu_mlp;
use crate::linear::{OutputDtype, linear};
use crate::swiglu::{swiglu, swiglu_joined};
use crate::weight::Weight;

/// Computes down(silu(gate(x)) * up(x)), with the weights of gate, up and down.
pub fn swiglu_mlp(x: &Tensor, weights: [&Weight; 3]) -> Result<Tensor> {
    if let Some(y) = fp8_swiglu_mlp(x, weights)? {
        return Ok(y);
    }
    let [gate, up, down] = weights;
    let multiply = |x: &Tensor, w: &Weight| linear(x, w, None, OutputDtype::SameAsInput);
    let gated = match Weight::joined(&[gate, up], x) {
        Some(joined) => swiglu_joined(&multiply(x, &joined)?)?,
        None => swiglu(&multiply(x, gate)?, &multiply(x, up)?)?,
    };
    multiply(&gated, down)
}
