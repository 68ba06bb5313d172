//! Inverted dropout whose mask is a function of a key, so that a recomputed forward drops the same elements.

mod cpu;

use candle_core::{Result, Tensor, bail};

use crate::floats::{FloatBuf, check_dtype};
use crate::storage::{self, host};
use crate::tape::record;

/// Which elements are dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The probability that an element becomes zero, in [0, 1).
    pub p: f64,
    /// Chooses the mask: the same key, the same mask.
    pub key: u64,
}

/// y = x mask / (1 - p), any shape: each element is dropped by itself with probability p. Nothing of x is kept for
/// backward; the mask is drawn again.
pub fn dropout(x: &Tensor, spec: Dropout) -> Result<Tensor> {
    check_dtype("dropout", "the input", x.dtype())?;
    if !(0.0..1.0).contains(&spec.p) {
        bail!("dropout: want a probability in [0, 1), got {}", spec.p)
    }
    if spec.p == 0.0 {
        return Ok(x.clone());
    }
    let y = masked(&x.detach().contiguous()?, spec)?;
    record("dropout", [x], (y.into_storage(), x.shape().clone()), move |_, dy| {
        Ok([Some(storage::tensor(masked(dy, spec)?, dy.shape()))])
    })
}

/// Gives each part of a key's world a key of its own: of a seed a key a step, of that one a micro-batch, and so on.
pub fn derive_key(key: u64, part: u64) -> u64 {
    cpu::random(key, part)
}

fn masked(x: &Tensor, spec: Dropout) -> Result<FloatBuf> {
    let mut y = FloatBuf::zeros(x.dtype(), x.elem_count())?;
    cpu::apply(host("dropout", x)?.floats()?, y.view(), spec);
    Ok(y)
}
