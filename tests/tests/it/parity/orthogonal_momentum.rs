//! A second kind of optimizer: momentum, orthogonalized by a Newton-Schulz iteration, as in Muon. It needs whole matrices.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use candlewick_ops::{GradScaler, copy_into};
use candlewick_parallel::{
    DecayedParams, MatrixUpdates, OPTIMIZER_KINDS, OptimizerGroup, OptimizerGroups, OptimizerKind, ParamPattern,
    ShardUpdate, SlotDtype, StateSlot, StepUpdates, UpdateNeed,
};

/// Decay rate of the momentum.
const MOMENTUM: f64 = 0.9;
/// Iterations of Newton-Schulz. More would amplify rounding in directions that the gradient hardly has.
const N_ITERATIONS: usize = 2;

/// Momentum with orthogonalized updates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OrthogonalMomentum;

/// A step of [`OrthogonalMomentum`].
struct OrthogonalUpdates<'s> {
    scaler: &'s GradScaler,
}

/// Returns groups in which it updates the projections of the layers, and AdamW all other parameters. The rate of the
/// projections is half that of the others.
pub(crate) fn orthogonal_projections() -> OptimizerGroups {
    of_pattern(r"_proj\.weight$")
}

/// Returns groups in which it updates the parameters with a pattern, and AdamW the others.
pub(crate) fn of_pattern(pattern: &str) -> OptimizerGroups {
    let projections = OptimizerGroup {
        pattern: Some(ParamPattern::parse(pattern).unwrap()),
        kind: Arc::new(OrthogonalMomentum),
        lr_factor: 0.5,
        weight_decay: 0.2,
        decayed: DecayedParams::Matrices,
    };
    let adamw = OPTIMIZER_KINDS[0].with(&[("betas", &[0.9, 0.99]), ("eps", &[1e-4])]).unwrap();
    OptimizerGroups::new(vec![projections], OptimizerGroup::of_all(adamw, 0.1))
}

impl OptimizerKind for OrthogonalMomentum {
    fn name(&self) -> &'static str {
        "orthogonal_momentum"
    }

    fn settings(&self) -> Vec<(&'static str, f64)> {
        vec![("momentum", MOMENTUM)]
    }

    fn slots(&self) -> &'static [StateSlot] {
        &[StateSlot { name: "momentum", dtype: SlotDtype::Configured }]
    }

    fn need(&self) -> UpdateNeed {
        UpdateNeed::WholeMatrices
    }

    fn for_comparison(&self) -> Arc<dyn OptimizerKind> {
        Arc::new(*self)
    }

    fn start_step<'s>(&'s self, scaler: &'s GradScaler) -> Result<StepUpdates<'s>> {
        Ok(StepUpdates::WholeMatrices(Box::new(OrthogonalUpdates { scaler })))
    }
}

impl MatrixUpdates for OrthogonalUpdates<'_> {
    fn gathered(&self, slice: &ShardUpdate<'_>) -> Result<Tensor> {
        let grad = widened(slice.grad)?.broadcast_mul(&self.scaler.grad_scale()?)?;
        let momentum = ((widened(&slice.slots[0])? * MOMENTUM)? + grad)?;
        self.replace(&slice.slots[0], &momentum)?;
        Ok(momentum)
    }

    fn step(&self, whole: &Tensor) -> Result<Tensor> {
        orthogonalized(whole)
    }

    fn apply(&self, slice: &ShardUpdate<'_>, step: &Tensor) -> Result<()> {
        let shrunk = (widened(slice.master)? * (1.0 - slice.lr * slice.weight_decay))?;
        self.replace(slice.master, &(shrunk - (step * slice.lr)?)?)?;
        slice.compute.map_or(Ok(()), |compute| copy_into(compute, slice.master))
    }
}

fn widened(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F32)
}

impl OrthogonalUpdates<'_> {
    /// Writes new values, unless the step is skipped.
    fn replace(&self, old: &Tensor, new: &Tensor) -> Result<()> {
        let applied = self.scaler.applied()?.to_dtype(DType::U8)?.broadcast_as(old.shape())?;
        copy_into(old, &applied.where_cond(new, &widened(old)?)?)
    }
}

/// Returns a matrix with singular values nearer to 1: `x = 1.5 x - 0.5 x x^T x`, from x / |x|.
fn orthogonalized(matrix: &Tensor) -> Result<Tensor> {
    let norm = (matrix.sqr()?.sum_all()?.sqrt()? + 1e-12)?;
    let mut x = matrix.broadcast_div(&norm)?;
    for _ in 0..N_ITERATIONS {
        let cubed = x.matmul(&x.t()?.contiguous()?)?.matmul(&x)?;
        x = ((x * 1.5)? - (cubed * 0.5)?)?;
    }
    Ok(x)
}
