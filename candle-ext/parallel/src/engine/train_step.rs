//! One optimizer step: forward and backward, gradient reduction, clipping and update.

use candle_core::{Result, Tensor};
use candlewick_comm::Reduce;
use candlewick_model::LayerOutputSpec;
use candlewick_ops::{GradScaler, LossLimit, StepDecision, span};

use super::step_results::{EntryForm, FlatOutputs, OutputLayout, PartsReadback, SideOutputs, count_as_f32, count_of};
use super::{Engine, LossScale, StepLoss, StepLosses};
use crate::batch::{Micro, StepMicros};
use crate::objective::{AuxiliaryLoss, MetricReduction, Objective};
use crate::params::MasterRounding;
use crate::routing::{RoutedMicro, RoutingReadback, StepRouting};

/// Micro-batches of this rank in a step, with loss settings.
pub struct TrainBatch<'a> {
    /// Micro-batches; their number is equal on all ranks.
    pub micros: &'a [Micro],
    /// The most tokens that any rank has in each micro-batch, see [`StepMicros::most_tokens`].
    pub most_tokens: Option<&'a [usize]>,
    /// Dropout seed of each micro-batch.
    pub dropout_keys: &'a [u64],
    /// Count of the objective's [normalizer](Objective::normalizer) in the step, on all ranks.
    pub normalizer: f64,
    /// Auxiliary losses of the layers.
    pub auxiliary: &'a [AuxiliaryLoss],
    /// Choice of the routing.
    pub routing: StepRouting<'a>,
}

/// Optimizer settings of a step.
pub struct OptimizerStep<'a> {
    /// Learning rate of this step, which each optimizer group multiplies by its factor.
    pub lr: f64,
    /// Gradient clipping, loss scaling and the policy for non-finite gradients.
    pub scaler: &'a GradScaler,
    /// Rounding of the updated master weights.
    pub rounding: MasterRounding,
    /// Count of zero gradients.
    pub grad_zeros: ZeroGradCount,
    /// Largest mean loss of the step whose update is applied; infinity for none.
    pub max_loss: f64,
}

/// Choice to count the gradient elements that are zero, which reads all gradients once more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroGradCount {
    /// Zeros are not counted.
    #[default]
    Off,
    /// Zeros are counted.
    On,
}

/// Name of the side output with the loss of each micro-batch, before normalization.
const LOSSES: &str = "losses";
/// Name of the side output with the number of zero gradients.
const ZERO_GRADS: &str = "zero_grads";

/// A step that may still be running on the device.
pub struct InFlightStep {
    /// Layout of the sums over all ranks.
    sums: OutputLayout,
    /// Layout of the maxima over all ranks.
    maxima: OutputLayout,
    readback: PartsReadback,
    /// Recorded routing, if the step records it.
    routed: Option<RoutingReadback>,
}

/// Results of a finished step.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// Loss of each of this rank's micro-batches, before normalization.
    pub own_losses: Vec<f32>,
    /// Losses summed over all ranks.
    pub losses: Vec<f32>,
    /// Side outputs over all ranks by name: the mean of each auxiliary loss by layer, without its coefficient; outputs of layers;
    /// metrics of the objective.
    pub outputs: SideOutputs,
    /// Recorded routing of each of this rank's micro-batches, for its tokens and layers. Empty without
    /// [`StepRouting::Record`]; without layers if another rank returns it.
    pub routed: Vec<RoutedMicro>,
    /// Gradient norm, and the decision to update, skip or stop.
    pub decision: StepDecision,
}

/// Side outputs of a step over all ranks, on the device.
struct ReducedOutputs {
    sums: OutputLayout,
    /// Sums of this rank.
    own: Tensor,
    of_all: Tensor,
    /// Number of sums before those of metrics.
    n_before_metrics: usize,
    maxima: OutputLayout,
    /// Maxima over all ranks; `None` if nothing has a maximum.
    max: Option<Tensor>,
}

impl Engine {
    /// Runs one optimizer step. It waits for the GPU only if the optimizer is offloaded. Collective: all ranks must
    /// call it.
    pub fn train_step(
        &self,
        batch: &TrainBatch<'_>,
        objective: &dyn Objective,
        optimizer: &OptimizerStep<'_>,
    ) -> Result<InFlightStep> {
        let OptimizerStep { lr, scaler, rounding, grad_zeros, max_loss } = optimizer;
        let scale = LossScale::mean_over(batch.normalizer).times(scaler.loss_scale()?);
        self.store.zero_grads()?;
        let loss = StepLoss { objective, scale, auxiliary: batch.auxiliary };
        let micros = StepMicros { micros: batch.micros, most_tokens: batch.most_tokens };
        let dropout_key = |micro_idx: usize| batch.dropout_keys[micro_idx];
        let (losses, routed) = self.forward_backward_routed(micros, &loss, dropout_key, batch.routing)?;
        let outputs = self.reduce_outputs(losses, batch, objective)?;
        let _span = span("optimizer", "");
        let limit = LossLimit { n_losses: batch.micros.len(), max_sum: max_loss * batch.normalizer.max(1.0) };
        scaler.update_within(limit, &self.store.grad_squares()?, &outputs.before_metrics()?)?;
        let zeros = match grad_zeros {
            ZeroGradCount::Off => None,
            ZeroGradCount::On => Some(count_as_f32(&self.store.grad_zeros()?)?),
        };
        self.store.step(*lr, scaler, *rounding)?;
        self.update_fp8_scales()?;
        self.update_layers(&outputs.of_layers(&self.layer_outputs)?, scaler)?;
        let parts = [&outputs.own, &outputs.of_all, scaler.state()].into_iter().map(Some);
        let readback = PartsReadback::start(parts.chain([outputs.max.as_ref(), zeros.as_ref()]))?;
        Ok(InFlightStep { sums: outputs.sums, maxima: outputs.maxima, readback, routed })
    }

    /// Updates the buffers of layers that follow their side outputs, unless `scaler` skipped the step.
    ///
    /// `outputs` are those of [`StepLosses::layers`], summed over all ranks, which must pass equal ones. Does not wait for the
    /// device.
    pub fn update_layers(&self, outputs: &[Tensor], scaler: &GradScaler) -> Result<()> {
        self.routing.update_biases(&self.model, &self.store, outputs, scaler)
    }

    /// Reduces the side outputs of a step over all ranks: one all-reduce, and another if a metric is a maximum. Collective.
    fn reduce_outputs(
        &self,
        losses: StepLosses,
        batch: &TrainBatch<'_>,
        objective: &dyn Objective,
    ) -> Result<ReducedOutputs> {
        let (mut sums, mut maxima) = (FlatOutputs::default(), FlatOutputs::default());
        sums.push(LOSSES, EntryForm::Vector, 1.0, Tensor::stack(&losses.micros, 0)?);
        for (loss, of_layers) in batch.auxiliary.iter().zip(losses.auxiliary) {
            sums.push(&loss.name, EntryForm::Vector, loss.normalizer.max(1.0), of_layers);
        }
        for (spec, values) in self.layer_outputs.iter().zip(losses.layers) {
            sums.push(spec.name, EntryForm::OfLayer(spec.layer_idx), 1.0, values);
        }
        let n_before_metrics = sums.n_numbers();
        for (metric, value) in objective.metrics().iter().zip(losses.metrics) {
            match metric.reduction {
                MetricReduction::Sum => sums.push(metric.name, EntryForm::Scalar, 1.0, value),
                MetricReduction::Mean => sums.push(metric.name, EntryForm::Scalar, batch.normalizer.max(1.0), value),
                MetricReduction::Max => maxima.push(metric.name, EntryForm::Scalar, 1.0, value),
            }
        }
        let ((sums, own), (maxima, max)) = (sums.finish()?, maxima.finish()?);
        let own = own.expect("a step has losses");
        let of_all = self.group.all_reduce(&own, Reduce::Sum)?;
        let max = max.map(|own| self.group.all_reduce(&own, Reduce::Max)).transpose()?;
        Ok(ReducedOutputs { sums, own, of_all, n_before_metrics, maxima, max })
    }
}

impl ReducedOutputs {
    /// Returns the losses and the outputs of layers. All must be finite for an update; metrics need not be.
    fn before_metrics(&self) -> Result<Tensor> {
        self.of_all.narrow(0, 0, self.n_before_metrics)
    }

    /// Returns the side outputs of layers.
    fn of_layers(&self, specs: &[LayerOutputSpec]) -> Result<Vec<Tensor>> {
        let of_layer = |spec: &LayerOutputSpec| self.sums.of_layer(spec.name, spec.layer_idx, &self.of_all);
        specs.iter().map(of_layer).collect()
    }
}

impl InFlightStep {
    /// Returns true if [`InFlightStep::wait`] would return immediately.
    pub fn is_ready(&self) -> bool {
        self.readback.is_ready()
    }

    /// Waits for the step and returns its results.
    pub fn wait(self) -> Result<StepResult> {
        let Self { sums, maxima, readback, routed } = self;
        let mut parts = readback.wait()?;
        let [own, of_all, state, max, zeros] = std::array::from_fn(|_| parts.next().unwrap_or_default());
        let mut outputs = SideOutputs::default();
        sums.read(&of_all, &mut outputs);
        maxima.read(&max, &mut outputs);
        if let Some(zeros) = count_of(&zeros) {
            outputs.insert(ZERO_GRADS, EntryForm::Scalar, vec![zeros]);
        }
        Ok(StepResult {
            own_losses: sums.numbers(LOSSES, &own).to_vec(),
            losses: sums.numbers(LOSSES, &of_all).to_vec(),
            outputs,
            routed: routed.map_or(Ok(Vec::new()), RoutingReadback::wait)?,
            decision: StepDecision::read(&state),
        })
    }
}

impl StepResult {
    /// Returns the number of zero gradients of all ranks; `None` if they are not counted.
    pub fn zero_grads(&self) -> Option<u64> {
        self.outputs.total(ZERO_GRADS).map(|zeros| zeros as u64)
    }
}
