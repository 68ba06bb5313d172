//! Noise of routers: jitter of the input, and random logits that force a load for benchmarks.
//!
//! Each number is a function of a key and its position, so a recomputed forward draws the same numbers.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use super::router::check_logits;
use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::recording::{recompute_with, record, save};
use crate::span::span;
use crate::storage::{self, host};

/// Range and key of [`input_jitter`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InputJitter {
    /// Half the width of the range of factors, in [0, 1).
    pub eps: f64,
    /// Seed of the factors: equal keys give equal factors.
    pub key: u64,
}

/// Multiplies each element of a router's input [t, d] with a random factor, uniform in [1 - eps, 1 + eps).
///
/// A factor is a function of the key, of the row's token, u32 [t], and of the column. So ranks that split the tokens draw the
/// factors of one rank. This is the multiplicative jitter of the Switch Transformer. Nothing of x is saved for backward.
pub fn input_jitter(x: &Tensor, spec: InputJitter, tokens: &Tensor) -> Result<Tensor> {
    const OP: &str = "input_jitter";
    let _span = span(OP, "forward");
    check_dtype(OP, "the input", x.dtype())?;
    if !(0.0..1.0).contains(&spec.eps) {
        bail!("{OP}: eps must be in [0, 1), got {}", spec.eps)
    }
    if spec.eps == 0.0 {
        return Ok(x.clone());
    }
    if x.rank() != 2 || tokens.dtype() != DType::U32 || tokens.dims() != [x.dims()[0]] {
        let (dims, dtype) = (x.dims(), tokens.dtype());
        bail!("{OP}: want x [t, d] and u32 tokens [t], got {dims:?} and {dtype:?} {:?}", tokens.dims())
    }
    let (x, tokens) = (&x.contiguous()?, tokens.contiguous()?);
    let y = jittered(x, spec, &tokens)?;
    let (saved, of_rows) = (save(x), tokens.clone());
    recompute_with(&y, move || jittered(&saved.get()?, spec, &of_rows));
    Ok(record(OP, [x.into()], y, move |dy, _| Ok([Some(jittered(dy, spec, &tokens)?)])))
}

/// Replaces logits [t, e] by standard normal numbers, which balances the experts' load on average.
///
/// The gradient passes straight through to the logits, as with Megatron-LM's forced load balancing. Give each rank a
/// key of its own.
pub fn random_logits(logits: &Tensor, key: u64) -> Result<Tensor> {
    const OP: &str = "random_logits";
    check_logits(OP, logits)?;
    let n = logits.elem_count();
    let random = on_device!(OP, logits, {
        cpu => match logits.dtype() {
            DType::F64 => Tensor::from_vec(cpu::normal::<f64>(n, key), logits.shape(), logits.device())?,
            _ => Tensor::from_vec(cpu::normal::<f32>(n, key), logits.shape(), logits.device())?,
        },
        cuda => cuda::add_normal(&logits.contiguous()?, cuda::Normal { per_column: false, factor: 0.0, std: 1.0, key })?,
    });
    Ok(straight_through(OP, logits, random))
}

/// Adds `std` times a standard normal number per expert to the logits [t, e], which skews the experts' load.
///
/// The gradient passes to the logits unchanged. Ranks with the same key share the skew.
pub fn biased_logits(logits: &Tensor, std: f64, key: u64) -> Result<Tensor> {
    const OP: &str = "biased_logits";
    let e = check_logits(OP, logits)?;
    let source = logits.contiguous()?;
    let biased = on_device!(OP, logits, {
        cpu => {
            let rows = host(OP, &source)?;
            match logits.dtype() {
                DType::F64 => {
                    Tensor::from_vec(cpu::biased::<f64>(rows.slice()?, e, std, key), logits.shape(), logits.device())?
                }
                _ => Tensor::from_vec(cpu::biased::<f32>(rows.slice()?, e, std, key), logits.shape(), logits.device())?,
            }
        },
        cuda => cuda::add_normal(&source, cuda::Normal { per_column: true, factor: 1.0, std, key })?,
    });
    Ok(straight_through(OP, logits, biased))
}

/// Records `y` as an output of `x` whose gradient is that of `x`.
fn straight_through(op: &'static str, x: &Tensor, y: Tensor) -> Tensor {
    record(op, [x.into()], y, |dy, _| Ok([Some(dy.clone())]))
}

fn jittered(x: &Tensor, InputJitter { eps, key }: InputJitter, tokens: &Tensor) -> Result<Tensor> {
    const OP: &str = "input_jitter";
    let shape = x.shape().clone();
    on_device!(OP, x, {
        cpu => {
            let mut y = FloatBuf::unwritten(x.dtype(), x.elem_count())?;
            let (x, tokens, d) = (host(OP, x)?, host(OP, tokens)?, x.dims()[1]);
            cpu::jitter(x.floats()?, y.view(), cpu::Jitter { eps, key, tokens: tokens.slice()?, d });
            Ok(storage::tensor(y, shape))
        },
        cuda => cuda::jitter(x, eps, key, tokens),
    })
}
