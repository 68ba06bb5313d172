//! The autograd tape of one block: forward records it, backward consumes it.

use candle_core::{Result, Tensor, Var};
use candlewick_ops::cotangent;

/// The recorded computation of `y` from `x`. Weight gradients leave through the weights' sinks during backward.
pub(crate) struct Tape {
    x: Var,
    y: Tensor,
}

impl Tape {
    /// Runs `forward` on the leaf `x` and records it.
    pub(crate) fn record(x: Var, forward: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let y = forward(x.as_tensor())?;
        Ok(Self { x, y })
    }

    /// Returns the block's output, cut off from the tape.
    pub(crate) fn output(&self) -> Tensor {
        self.y.detach()
    }

    /// Returns the gradient of the block's input for the gradient `dy` of its output, and frees the tape.
    pub(crate) fn backward(self, dy: &Tensor) -> Result<Tensor> {
        let mut grads = cotangent(&self.y, dy)?.backward()?;
        match grads.remove(self.x.as_tensor()) {
            Some(dx) => Ok(dx),
            None => self.x.zeros_like(),
        }
    }
}
