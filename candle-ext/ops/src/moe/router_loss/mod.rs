//! Auxiliary losses of routers, as sums over tokens; the caller divides.
//!
//! t tokens, e experts

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
mod inputs;

use candle_core::{DType, Result, Tensor, WithDType, bail};

use super::expert_counts::{TokenSequences, check_sequences};
use super::router::{RouterStatistics, ScoreFunction, check_logits};
use crate::cost::{Cost, F32_BYTES};
use crate::device::on_device;
use crate::recording::record;
use crate::span::span;
use crate::storage::host;
use cpu::{Balance, TokenGrad, ZLoss};
use inputs::BalanceInputs;

/// Computes sum_e(counts_e * sum_t(p[t, e])), an f32 scalar, for logits [t, e] in f32 or f64.
///
/// p is the softmax of a token's logits, or its sigmoid-like scores divided by their sum. `statistics` are those of the logits, so
/// only backward reads these. The counts, f32 [e], get no gradient: they count the tokens per expert of a top-k of p, without
/// bias, groups or capacity.
///
/// Megatron-LM's loss (Switch Transformer, equation 4) is e / (k * t^2) times this sum.
pub fn load_balancing_loss(logits: &Tensor, statistics: &RouterStatistics, counts: &Tensor) -> Result<Tensor> {
    const OP: &str = "load_balancing_loss";
    let _span = span(OP, "forward");
    let e = check_logits(OP, logits)?;
    statistics.check(OP, e)?;
    if counts.dtype() != DType::F32 || counts.dims() != [e] {
        bail!("{OP}: want f32 counts [{e}], got {:?} {:?}", counts.dtype(), counts.dims())
    }
    let (counts, source) = (counts.contiguous()?, logits.contiguous()?);
    let loss = on_device!(OP, source, {
        cpu => {
            let (sums, counts) = (host(OP, &statistics.sums)?, host(OP, &counts)?);
            let products = sums.slice::<f64>()?.iter().zip(counts.slice::<f32>()?).map(|(sum, n)| sum * f64::from(*n));
            Tensor::new(products.sum::<f64>() as f32, source.device())?
        },
        cuda => cuda::balance_loss(&statistics.sums, &counts)?,
    });
    let inputs = BalanceInputs { counts, sequences: None, score: statistics.score };
    Ok(record(OP, [logits.into()], loss, move |dy, _| Ok([Some(inputs.grad(OP, &source, dy)?)])))
}

/// Computes [`load_balancing_loss`] with the counts of each token's sequence, f32 [s, e].
pub fn sequence_load_balancing_loss(
    logits: &Tensor,
    counts: &Tensor,
    sequences: TokenSequences<'_>,
    score: ScoreFunction,
) -> Result<Tensor> {
    const OP: &str = "sequence_load_balancing_loss";
    let e = check_logits(OP, logits)?;
    let TokenSequences { of_tokens, n_sequences } = sequences;
    check_sequences(OP, Some(of_tokens), logits.dims()[0])?;
    if counts.dtype() != DType::F32 || counts.dims() != [n_sequences, e] {
        bail!("{OP}: want f32 counts [{n_sequences}, {e}], got {:?} {:?}", counts.dtype(), counts.dims())
    }
    let (counts, sequences) = (counts.contiguous()?, Some(of_tokens.contiguous()?));
    balance_loss(OP, logits, BalanceInputs { counts, sequences, score })
}

fn balance_loss(op: &'static str, logits: &Tensor, inputs: BalanceInputs) -> Result<Tensor> {
    let _span = span(op, "forward");
    let source = logits.contiguous()?;
    let loss = on_device!(op, source, {
        cpu => inputs.with_balance(op, |balance| sum(op, balance, &source))?,
        cuda => cuda::sum(&source, &inputs)?,
    });
    Ok(record(op, [logits.into()], loss, move |dy, _| Ok([Some(inputs.grad(op, &source, dy)?)])))
}

impl BalanceInputs {
    /// Returns the gradient of the logits for the upstream gradient `dy`, a scalar.
    fn grad(&self, op: &str, logits: &Tensor, dy: &Tensor) -> Result<Tensor> {
        on_device!(op, logits, {
            cpu => self.with_balance(op, |balance| grad(op, balance, logits, dy)),
            cuda => cuda::backward(logits, Some(self), dy),
        })
    }
}

/// Returns e * (fraction of the selections of each expert), by sequence, for counts f32 [s, e]: the counts of
/// [`load_balancing_loss`] in the loss of Switch Transformer.
pub fn balance_factors(counts: &Tensor) -> Result<Tensor> {
    const OP: &str = "balance_factors";
    let &[_, e] = counts.dims() else { bail!("{OP}: want f32 counts [s, e], got {:?}", counts.dims()) };
    let counts = counts.contiguous()?;
    on_device!(OP, counts, {
        cpu => {
            let of_row = |row: &[f32]| {
                let total = row.iter().sum::<f32>().max(1.0);
                row.iter().map(|count| count / total * e as f32).collect::<Vec<_>>()
            };
            let factors = host(OP, &counts)?.slice::<f32>()?.chunks(e.max(1)).flat_map(of_row).collect();
            Tensor::from_vec(factors, counts.shape(), counts.device())
        },
        cuda => cuda::balance_factors(&counts),
    })
}

/// Computes sum_t(p[t, e]) of each expert, f32 [e], for logits [t, e] in f32 or f64 and their statistics.
///
/// p is that of [`load_balancing_loss`], which is the dot product of these sums and the counts. Use them if the counts are known
/// only before backward.
pub fn expert_score_sums(logits: &Tensor, statistics: &RouterStatistics) -> Result<Tensor> {
    const OP: &str = "expert_score_sums";
    let _span = span(OP, "forward");
    let e = check_logits(OP, logits)?;
    statistics.check(OP, e)?;
    let (source, score) = (logits.contiguous()?, statistics.score);
    Ok(record(OP, [logits.into()], statistics.score_sums()?, move |dy, _| {
        let (one, counts) = (Tensor::new(1f32, dy.device())?, dy.reshape(e)?);
        Ok([Some(BalanceInputs { counts, sequences: None, score }.grad(OP, &source, &one)?)])
    }))
}

/// Computes sum_t(logsumexp(logits_t)^2), an f32 scalar, for logits [t, e] in f32 or f64 and their statistics (ST-MoE,
/// equation 5).
pub fn router_z_loss(logits: &Tensor, statistics: &RouterStatistics) -> Result<Tensor> {
    const OP: &str = "router_z_loss";
    let _span = span(OP, "forward");
    statistics.check(OP, check_logits(OP, logits)?)?;
    let source = logits.contiguous()?;
    Ok(record(OP, [logits.into()], statistics.lse_squares()?, move |dy, _| {
        on_device!(OP, source, {
            cpu => Ok([Some(grad(OP, &ZLoss, &source, dy)?)]),
            cuda => Ok([Some(cuda::backward(&source, None, dy)?)]),
        })
    }))
}

/// Returns the cost of a loss for `n_tokens` tokens, beyond the logits that the router saves: their gradient.
pub fn router_loss_cost(n_tokens: u64, n_experts: u64) -> Cost {
    Cost { scratch_bytes: n_tokens * n_experts * F32_BYTES, ..Cost::default() }
}

fn sum(op: &str, loss: &Balance<'_>, logits: &Tensor) -> Result<Tensor> {
    let source = host(op, logits)?;
    let e = logits.dims()[1];
    let sum = match logits.dtype() {
        DType::F64 => cpu::sum::<f64>(loss, source.slice()?, e),
        _ => cpu::sum::<f32>(loss, source.slice()?, e),
    };
    Tensor::new(sum as f32, logits.device())
}

fn grad(op: &str, loss: &impl TokenGrad, logits: &Tensor, dy: &Tensor) -> Result<Tensor> {
    match logits.dtype() {
        DType::F64 => grad_in::<f64>(op, loss, logits, dy),
        _ => grad_in::<f32>(op, loss, logits, dy),
    }
}

fn grad_in<T: WithDType>(op: &str, loss: &impl TokenGrad, logits: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let source = host(op, logits)?;
    let (e, upstream) = (logits.dims()[1], f64::from(host(op, dy)?.slice::<f32>()?[0]));
    Tensor::from_vec(cpu::backward::<T>(loss, source.slice()?, e, upstream), logits.shape(), logits.device())
}
