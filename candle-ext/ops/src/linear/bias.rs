//! Gradient of a bias.

use candle_core::{Result, Tensor};

use super::cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::cuda;
use crate::device::on_device;
use crate::storage::host;
use crate::weight::GradSink;

/// Adds db, the sum of dy over tokens, to the gradient of a bias.
pub(crate) fn add_grad_bias(dy: &Tensor, sink: &GradSink) -> Result<()> {
    on_device!("linear", dy, {
        cpu => {
            let dy = host("linear", dy)?;
            let dy = dy.floats()?;
            sink.add("linear", |db| cpu::add_grad_bias(dy, db))
        },
        cuda => cuda::add_grad_bias(dy, &sink.grad()?),
    })
}
