//! AdamW with decoupled weight decay over a flat shard.

mod args;
mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
mod step;

use candle_core::{DType, Result, bail};

use crate::device::on_device;
use crate::floats::check_dtype;
use crate::span::span;
use crate::storage::{host, same_storage, update};
use args::Factors;
pub use args::{AdamW, AdamWState, ShardPosition, StochasticRounding};
pub use step::AdamWStep;

/// Updates a parameter and its moments in place, in one pass, as `torch.optim.AdamW` does.
///
/// `p -= lr wd p; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;`
/// `p -= lr m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + eps)`
///
/// `step` holds the scaler's decision: the update number n and the factor on the gradient, or that the step is skipped.
/// Arithmetic is f32; bf16 buffers are rounded once, on storing, to the nearest number.
pub fn adamw(hyper: &AdamW, step: &AdamWStep, state: AdamWState) -> Result<()> {
    check(hyper, step, &state)?;
    run(hyper, step, state, None)
}

/// Updates a bf16 parameter as [`adamw`] does, and rounds the parameter stochastically. Moments are rounded to the nearest
/// number.
///
/// Updates that are too small for bf16 are then not lost on average. A result that bf16 represents is stored exactly.
pub fn adamw_stochastic(
    hyper: &AdamW,
    step: &AdamWStep,
    state: AdamWState,
    rounding: &StochasticRounding,
) -> Result<()> {
    check(hyper, step, &state)?;
    if state.master.dtype() != DType::BF16 {
        bail!("adamw: stochastic rounding is for a master in BF16, got {:?}", state.master.dtype())
    }
    let ShardPosition { row_len, columns, .. } = &rounding.position;
    if columns.is_empty() || columns.end > *row_len {
        bail!("adamw: want columns of a row of {row_len} elements, got {columns:?}")
    }
    run(hyper, step, state, Some(rounding))
}

fn run(hyper: &AdamW, step: &AdamWStep, state: AdamWState, rounding: Option<&StochasticRounding>) -> Result<()> {
    let _span = span("adamw", "");
    on_device!("adamw", state.master, {
        cpu => run_cpu(hyper, step, state, rounding),
        cuda => cuda::run(hyper, (step.scaler, &step.corrections), state, rounding),
    })
}

fn run_cpu(hyper: &AdamW, step: &AdamWStep, state: AdamWState, rounding: Option<&StochasticRounding>) -> Result<()> {
    let Some(factors) = step.factors()? else { return Ok(()) };
    let by = cpu::AdamWUpdate::of(Factors::of(hyper), factors, rounding);
    let grad = host("adamw", state.grad)?;
    let grad = grad.floats()?;
    update(state.master, "adamw", |master| {
        update(state.exp_avg, "adamw", |mean| {
            update(state.exp_avg_sq, "adamw", |square| {
                let buffers = cpu::Buffers { master, grad, mean, square };
                match state.compute {
                    None => cpu::run(&by, buffers, None),
                    Some(compute) => {
                        return update(compute, "adamw", |compute| {
                            cpu::run(&by, buffers, Some(compute));
                            Ok(())
                        });
                    }
                }
                Ok(())
            })
        })
    })
}

fn check(hyper: &AdamW, step: &AdamWStep, state: &AdamWState) -> Result<()> {
    if step.betas != [hyper.beta1, hyper.beta2] {
        bail!("adamw: the step's bias corrections are of betas {:?}, the update's are {hyper:?}", step.betas)
    }
    let AdamWState { master, grad, exp_avg, exp_avg_sq, compute } = *state;
    let n = master.elem_count();
    let named = [("master", master), ("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)];
    let all = || named.into_iter().chain(compute.map(|compute| ("compute", compute)));
    for (name, tensor) in all() {
        if tensor.elem_count() != n {
            bail!("adamw: {name} has {} elements, master {n}", tensor.elem_count())
        }
    }
    for [(name, tensor), (other, twin)] in [[named[0], named[1]], [named[2], named[3]]] {
        let (dtype, twins) = (tensor.dtype(), twin.dtype());
        if !matches!(dtype, DType::F32 | DType::BF16) || dtype != twins {
            bail!("adamw: {name} is {dtype:?} and {other} {twins:?}, want both f32 or both bf16")
        }
    }
    if let Some(compute) = compute {
        check_dtype("adamw", "the compute copy", compute.dtype())?;
        if master.dtype() != DType::F32 {
            bail!("adamw: a master in {:?} is its own compute copy", master.dtype())
        }
    }
    for (i, (name, tensor)) in all().enumerate() {
        if let Some((other, _)) = all().take(i).find(|(_, other)| same_storage(tensor, other)) {
            bail!("adamw: {other} and {name} must be in different buffers")
        }
    }
    Ok(())
}
