//! Numbers of AdamW that all updates of a step share.

use candle_core::{Result, Tensor};

use super::args::AdamW;
use crate::device::on_device;
use crate::grad_scaler::GradScaler;
use crate::storage::host;

/// The scaler's decision about a step, with AdamW's bias corrections for it. Computed on the device, without a wait.
pub struct AdamWStep<'a> {
    pub(super) scaler: &'a GradScaler,
    /// Decay rates beta1 and beta2.
    pub(super) betas: [f64; 2],
    /// c = sqrt(1 - beta2^n) and c / (1 - beta1^n) for update n, f32 [2]. Unused values if the step is skipped.
    pub(super) corrections: Tensor,
}

/// Factors of an update on the CPU.
#[derive(Clone, Copy)]
pub(super) struct StepFactors {
    /// Factor on the gradient: unscaling times clipping.
    pub(super) grad_scale: f32,
    /// c = sqrt(1 - beta2^n) for update n.
    pub(super) root: f32,
    /// c / (1 - beta1^n) for update n.
    pub(super) correction: f32,
}

impl<'a> AdamWStep<'a> {
    /// Computes the bias corrections of the update that `scaler` has decided on, for updates with the betas of `hyper`.
    pub fn new(hyper: &AdamW, scaler: &'a GradScaler) -> Result<Self> {
        let betas = [hyper.beta1, hyper.beta2];
        let corrections = on_device!("adamw", scaler.state(), {
            cpu => {
                let number = scaler.applied_update()?.map_or(0.0, |update| update.number);
                Tensor::new(&bias_corrections(betas, number), scaler.state().device())
            },
            cuda => super::cuda::bias_corrections(scaler, betas),
        })?;
        Ok(Self { scaler, betas, corrections })
    }

    /// Returns the factors of the update; `None` if the step is skipped. CPU only.
    pub(super) fn factors(&self) -> Result<Option<StepFactors>> {
        let Some(update) = self.scaler.applied_update()? else { return Ok(None) };
        let corrections = host("adamw", &self.corrections)?;
        let &[root, correction] = corrections.slice::<f32>()? else { return Ok(None) };
        Ok(Some(StepFactors { grad_scale: update.grad_scale, root, correction }))
    }
}

fn bias_corrections(betas: [f64; 2], number: f32) -> [f32; 2] {
    let [correction1, correction2] = betas.map(|beta| 1.0 - beta.powf(f64::from(number)));
    [correction2.sqrt() as f32, (correction2.sqrt() / correction1) as f32]
}
