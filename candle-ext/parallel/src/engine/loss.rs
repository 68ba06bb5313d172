//! Loss of a training step: objective, normalization and auxiliary losses.

use candle_core::{DType, Device, Result, Tensor, bail};
use candlewick_ops::{LossAndGrad, LossGrad, Reduction, Tape, add};

use super::metrics::MetricSums;
use crate::objective::{AuxiliaryLoss, CausalLm, Objective};

/// Factor on the loss of each micro-batch: one over the target tokens of the whole step.
///
/// All micro-batches and ranks share the factor, so each target token has the same weight.
#[derive(Clone, Debug)]
pub struct LossScale {
    mean: f64,
    /// Loss scale of f16 training, an f32 scalar on the device.
    factor: Option<Tensor>,
}

/// Loss that a step minimizes: scale * (objective of each micro-batch), plus auxiliary losses.
#[derive(Clone)]
pub struct StepLoss<'a> {
    /// Loss function of a micro-batch.
    pub objective: &'a dyn Objective,
    /// Factor on the loss of each micro-batch.
    pub scale: LossScale,
    /// Auxiliary losses. It is an error if a layer computes one that is not listed.
    pub auxiliary: &'a [AuxiliaryLoss],
}

/// Reduction and label smoothing of a cross-entropy.
#[derive(Clone, Copy)]
pub(super) struct LossForm {
    pub(super) reduction: Reduction,
    pub(super) label_smoothing: f32,
}

/// Losses of a step on this rank, before normalization.
#[derive(Clone, Debug)]
pub struct StepLosses {
    /// Loss of each micro-batch, f32 scalars.
    pub micros: Vec<Tensor>,
    /// Sum of each auxiliary loss over micro-batches by layer, f32 [layers], in the order of [`StepLoss::auxiliary`]; zeros
    /// for layers of other pipeline stages.
    pub auxiliary: Vec<Tensor>,
    /// Side output of each layer that has one, see [`LayerSpec::side_output`](candlewick_model::LayerSpec::side_output); zeros for
    /// layers of other pipeline stages.
    pub layers: Vec<Tensor>,
    /// Metrics of the objective, f32 [1], in the order of [`Objective::metrics`].
    pub metrics: Vec<Tensor>,
}

/// Sums of the auxiliary losses and the metrics of a running step.
pub(super) struct LossSums<'a> {
    losses: &'a [AuxiliaryLoss],
    scale: &'a LossScale,
    /// Sums of each loss by layer; `None` for a layer that did not compute it.
    sums: Vec<Vec<Option<Tensor>>>,
    metrics: MetricSums<'a>,
}

/// Factors of an auxiliary loss with several numbers, by which its sum is weighted; `None` for a scalar.
pub(super) type LossFactors<'a> = &'a dyn Fn(&Tensor) -> Result<Option<Tensor>>;

impl From<Reduction> for LossForm {
    /// Returns a form without label smoothing.
    fn from(reduction: Reduction) -> Self {
        Self { reduction, label_smoothing: 0.0 }
    }
}

impl LossScale {
    /// Returns the scale of a mean over `n_targets_of_step` target tokens of all micro-batches and ranks.
    pub fn mean_over(n_targets_of_step: f64) -> Self {
        Self { mean: 1.0 / n_targets_of_step.max(1.0), factor: None }
    }

    /// Multiplies by a scalar on the device, such as [`GradScaler::loss_scale`](candlewick_ops::GradScaler).
    pub fn times(self, factor: Option<Tensor>) -> Self {
        Self { factor, ..self }
    }

    pub(super) fn upstream(&self) -> LossGrad<'_> {
        match &self.factor {
            Some(factor) => LossGrad::Scaled(self.mean, factor),
            None => LossGrad::Scalar(self.mean),
        }
    }

    /// Returns the derivative of the scaled loss with respect to an auxiliary loss, as an upstream gradient.
    fn auxiliary_upstream(&self, loss: &AuxiliaryLoss) -> LossGrad<'_> {
        let weight = loss.mean(loss.coefficient);
        self.factor.as_ref().map_or(LossGrad::Scalar(weight), |factor| LossGrad::Scaled(weight, factor))
    }

    /// Returns the derivative of the scaled loss with respect to an auxiliary loss, an f32 scalar.
    fn auxiliary_weight(&self, loss: &AuxiliaryLoss, device: &Device) -> Result<Tensor> {
        let weight = loss.mean(loss.coefficient);
        match &self.factor {
            Some(factor) => factor.affine(weight, 0.0),
            None => Tensor::new(weight as f32, device),
        }
    }

    /// Multiplies token weights, f32 [t], by the scale.
    pub(super) fn times_weights(&self, weights: &Tensor) -> Result<Tensor> {
        let scaled = weights.affine(self.mean, 0.0)?;
        self.factor.as_ref().map_or_else(|| Ok(scaled.clone()), |factor| scaled.broadcast_mul(factor))
    }
}

impl<'a> From<&LossScale> for StepLoss<'a> {
    fn from(scale: &LossScale) -> Self {
        Self { objective: &CausalLm, scale: scale.clone(), auxiliary: &[] }
    }
}

impl<'a> LossSums<'a> {
    pub(super) fn new(loss: &'a StepLoss<'a>, n_layers: usize) -> Self {
        let sums = vec![vec![None; n_layers]; loss.auxiliary.len()];
        Self { losses: loss.auxiliary, scale: &loss.scale, sums, metrics: MetricSums::new(loss.objective.metrics()) }
    }

    /// Runs the backward of a layer from `dy` and its auxiliary losses, and returns the gradient of its input `x`.
    pub(super) fn input_grad(
        &mut self,
        layer_idx: usize,
        tape: Tape,
        (x, dy): (&Tensor, &Tensor),
        factors: LossFactors,
    ) -> Result<Tensor> {
        let mut weights = Vec::new();
        for (name, value) in tape.auxiliary_losses() {
            let i = self.position(name)?;
            let weight = self.scale.auxiliary_weight(&self.losses[i], value.device())?;
            let (value, weight) = match factors(value)? {
                Some(factors) => ((value * &factors)?.sum_all()?, factors.broadcast_mul(&weight)?),
                None => (value.clone(), weight),
            };
            self.add(i, layer_idx, &value)?;
            weights.push(weight);
        }
        input_grad(tape, x, dy, &weights)
    }

    /// Computes a loss of a layer with `loss`, adds it to its sum and returns the gradient. `loss` gets the derivative of
    /// the step's scaled loss with respect to the layer's. `n_copies` ranks of the sum compute the same loss.
    pub(super) fn add_loss(
        &mut self,
        layer_idx: usize,
        name: &str,
        n_copies: usize,
        loss: impl FnOnce(LossGrad) -> Result<LossAndGrad>,
    ) -> Result<Option<Tensor>> {
        let i = self.position(name)?;
        let LossAndGrad { loss, dx } = loss(self.scale.auxiliary_upstream(&self.losses[i]))?;
        self.add(i, layer_idx, &(loss / n_copies as f64)?)?;
        Ok(dx)
    }

    /// Adds the value of a micro-batch to a metric, by its index.
    pub(super) fn add_metric(&mut self, i: usize, value: Tensor) -> Result<()> {
        self.metrics.add(i, value)
    }

    fn position(&self, name: &str) -> Result<usize> {
        match self.losses.iter().position(|loss| loss.name == name) {
            Some(i) => Ok(i),
            None => bail!("the layers compute the auxiliary loss `{name}`, for which the step has no coefficient"),
        }
    }

    fn add(&mut self, i: usize, layer_idx: usize, value: &Tensor) -> Result<()> {
        let sum = &mut self.sums[i][layer_idx];
        *sum = Some(match sum.take() {
            Some(sum) => add(&sum, value)?,
            None => value.clone(),
        });
        Ok(())
    }

    /// Returns the sums of each loss by layer, f32 [layers]: zero for a layer that did not compute it. Returns the metrics, too.
    pub(super) fn finish(self, device: &Device) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        let zero = Tensor::zeros((), DType::F32, device)?;
        let of_layers = |sums: Vec<Option<Tensor>>| {
            let sums: Vec<Tensor> = sums.into_iter().map(|sum| sum.unwrap_or_else(|| zero.clone())).collect();
            Tensor::stack(&sums, 0)
        };
        let auxiliary = self.sums.into_iter().map(of_layers).collect::<Result<_>>()?;
        Ok((auxiliary, self.metrics.finish(device)?))
    }
}

/// Runs the backward of a tape from `dy` and weights of its auxiliary losses, and returns the gradient of its input.
pub(super) fn input_grad(tape: Tape, x: &Tensor, dy: &Tensor, weights: &[Tensor]) -> Result<Tensor> {
    match tape.backward_with_losses(dy, weights)?.remove(x) {
        Some(dx) => Ok(dx),
        None => x.zeros_like(),
    }
}
