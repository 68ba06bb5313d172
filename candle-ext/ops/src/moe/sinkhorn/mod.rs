//! Sinkhorn balancing of a router's logits.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor};

use super::router::check_logits;
use crate::device::on_device;
use crate::span::span;
use crate::storage::host;

const OP: &str = "sinkhorn";

/// Balances logits, f32 or f64 [t, e]: returns the f32 matrix e^logits with rows and columns scaled to equal sums.
///
/// Rows are scaled to the sum 1 / t and columns to 1 / e, in turn, as in Megatron-LM. The iteration ends when the factors
/// of columns change by at most 1e-4 in the mean. The result chooses experts, see [`route_by`](crate::route_by); it has no gradient.
pub fn sinkhorn(logits: &Tensor) -> Result<Tensor> {
    let _span = span(OP, "forward");
    let e = check_logits(OP, logits)?;
    let source = logits.contiguous()?;
    on_device!(OP, logits, {
        cpu => {
            let source = host(OP, &source)?;
            let balanced = match logits.dtype() {
                DType::F64 => cpu::balanced::<f64>(source.slice()?, e),
                _ => cpu::balanced::<f32>(source.slice()?, e),
            };
            Tensor::from_vec(balanced, logits.shape(), logits.device())
        },
        cuda => cuda::balanced(&source),
    })
}
