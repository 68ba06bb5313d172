//! AdamW with decoupled weight decay over a flat shard.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use crate::device::on_device;
use crate::floats::{FloatsMut, check_dtype};
use crate::storage::{host, same_storage, update};

/// The numbers of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the gradient's running mean.
    pub beta1: f64,
    /// Decay of the squared gradient's running mean.
    pub beta2: f64,
    /// Added to the root of the squared gradient's mean.
    pub eps: f64,
    /// Decoupled decay: the parameter shrinks by lr * weight_decay.
    pub weight_decay: f64,
    /// The number of this update, 1 for the first.
    pub step: usize,
    /// Multiplies the gradient before use, such as the factor that clips its norm.
    pub grad_scale: f64,
}

/// Updates a parameter and its moments in place, in one pass, as `torch.optim.AdamW` does:
///
/// p -= lr wd p; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;
/// p -= lr m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + eps)
///
/// All are contiguous f32 views of equal length, each in a buffer of its own; `compute`, a bf16 or
/// f16 copy of the parameter, is rewritten from it.
pub fn adamw(
    hyper: &AdamW,
    master: &Tensor,
    grad: &Tensor,
    exp_avg: &Tensor,
    exp_avg_sq: &Tensor,
    compute: Option<&Tensor>,
) -> Result<()> {
    check(hyper, [master, grad, exp_avg, exp_avg_sq], compute)?;
    on_device!("adamw", master, {
        cpu => run_cpu(hyper, master, grad, [exp_avg, exp_avg_sq], compute),
        cuda => cuda::run(hyper, master, grad, [exp_avg, exp_avg_sq], compute),
    })
}

fn run_cpu(
    hyper: &AdamW,
    master: &Tensor,
    grad: &Tensor,
    [exp_avg, exp_avg_sq]: [&Tensor; 2],
    compute: Option<&Tensor>,
) -> Result<()> {
    let factors = cpu::Factors::of(hyper);
    let grad = host("adamw", grad)?;
    let grad = grad.slice::<f32>()?;
    update(master, "adamw", |master| {
        update(exp_avg, "adamw", |mean| {
            update(exp_avg_sq, "adamw", |square| {
                let (FloatsMut::F32(master), FloatsMut::F32(mean), FloatsMut::F32(square)) = (master, mean, square)
                else {
                    bail!("adamw: master and moments must be f32")
                };
                let state = cpu::State { master, grad, mean, square };
                match compute {
                    None => cpu::run(&factors, state, None),
                    Some(compute) => {
                        return update(compute, "adamw", |compute| {
                            cpu::run(&factors, state, Some(compute));
                            Ok(())
                        });
                    }
                }
                Ok(())
            })
        })
    })
}

fn check(hyper: &AdamW, state: [&Tensor; 4], compute: Option<&Tensor>) -> Result<()> {
    const NAMES: [&str; 5] = ["master", "grad", "exp_avg", "exp_avg_sq", "compute"];
    if hyper.step == 0 {
        bail!("adamw: the first step has number 1, got 0")
    }
    for (tensor, name) in state.iter().zip(NAMES) {
        if tensor.dtype() != DType::F32 || tensor.elem_count() != state[0].elem_count() {
            bail!(
                "adamw: {name} is {:?} {:?}, want f32 with {} elements",
                tensor.dtype(),
                tensor.dims(),
                state[0].elem_count()
            )
        }
    }
    if let Some(compute) = compute {
        check_dtype("adamw", "the compute copy", compute.dtype())?;
        if compute.elem_count() != state[0].elem_count() {
            bail!("adamw: compute has {} elements, master {}", compute.elem_count(), state[0].elem_count())
        }
    }
    let all: Vec<&Tensor> = state.into_iter().chain(compute).collect();
    for (i, a) in all.iter().enumerate() {
        if let Some(j) = (0..i).find(|&j| same_storage(a, all[j])) {
            bail!("adamw: {} and {} must be in different buffers", NAMES[j], NAMES[i])
        }
    }
    Ok(())
}
