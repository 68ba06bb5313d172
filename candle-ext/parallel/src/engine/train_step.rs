//! One optimizer step: forward and backward over its micro-batches, reduction, clipping and update.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor};
use candlewick_comm::Reduce;
use candlewick_ops::{AdamW, GradScaler, Readout, Verdict, span};

use super::{Engine, LossScale, Micro, StepLoss};
use crate::objective::{AuxiliaryLoss, Objective};

/// The micro-batches that this rank computes in a step.
pub struct TrainBatch<'a> {
    /// The micro-batches. All ranks have as many.
    pub micros: &'a [Micro],
    /// Seeds of the dropout of each.
    pub dropout_keys: &'a [u64],
    /// Target tokens of the step on all ranks: the loss is a mean over them.
    pub n_targets: f64,
    /// The auxiliary losses that the layers compute.
    pub auxiliary: &'a [AuxiliaryLoss],
}

/// The update of the weights.
pub struct OptimizerStep<'a> {
    /// AdamW's hyperparameters of this step.
    pub adamw: AdamW,
    /// Clips gradients, or skips the step.
    pub scaler: &'a GradScaler,
}

/// A step that the device may still be computing.
pub struct InFlightStep {
    n_micros: usize,
    auxiliary: Vec<AuxiliaryLoss>,
    readout: Readout,
}

/// The numbers of a finished step.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// The loss of each of this rank's micro-batches, before normalisation.
    pub own_losses: Vec<f32>,
    /// The sums of these over all ranks.
    pub losses: Vec<f32>,
    /// The mean of each auxiliary loss, without its coefficient, by name.
    pub auxiliary: BTreeMap<String, f64>,
    /// The norm of the gradient and the decision about the update.
    pub verdict: Verdict,
}

impl Engine {
    /// Takes one optimizer step. It waits for a GPU only where the optimizer is on the host. All ranks call it.
    pub fn train_step(
        &self,
        batch: &TrainBatch<'_>,
        objective: &dyn Objective,
        optimizer: &OptimizerStep<'_>,
    ) -> Result<InFlightStep> {
        let OptimizerStep { adamw, scaler } = optimizer;
        let scale = LossScale::mean_over(batch.n_targets).times(scaler.loss_scale()?);
        self.store.zero_grads()?;
        let loss = StepLoss { objective, scale, auxiliary: batch.auxiliary };
        let losses = self.forward_backward(batch.micros, loss, |micro_idx| batch.dropout_keys[micro_idx])?;
        let own = Tensor::stack(&[losses.micros, losses.auxiliary].concat(), 0)?;
        let of_all = self.group.all_reduce(&own, Reduce::Sum)?;
        let _span = span("optimizer", "");
        scaler.judge(&self.store.grad_squares()?, &of_all, [adamw.beta1, adamw.beta2])?;
        self.store.step(adamw, scaler)?;
        let readout = Readout::start(&Tensor::cat(&[&own, &of_all, scaler.state()], 0)?)?;
        Ok(InFlightStep { n_micros: batch.micros.len(), auxiliary: batch.auxiliary.to_vec(), readout })
    }
}

impl InFlightStep {
    /// Returns true if [`InFlightStep::wait`] returns at once.
    pub fn is_ready(&self) -> bool {
        self.readout.is_ready()
    }

    /// Waits for the step and returns its numbers.
    pub fn wait(self) -> Result<StepResult> {
        let numbers = self.readout.wait()?;
        let (own, rest) = numbers.split_at(self.n_micros + self.auxiliary.len());
        let (of_all, state) = rest.split_at(own.len());
        let (losses, auxiliary) = of_all.split_at(self.n_micros);
        let mean = |(loss, sum): (&AuxiliaryLoss, &f32)| (loss.name.clone(), loss.mean(f64::from(*sum)));
        Ok(StepResult {
            own_losses: own[..self.n_micros].to_vec(),
            losses: losses.to_vec(),
            auxiliary: self.auxiliary.iter().zip(auxiliary).map(mean).collect(),
            verdict: Verdict::read(state),
        })
    }
}
