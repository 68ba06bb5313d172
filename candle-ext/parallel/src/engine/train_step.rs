//! One optimizer step: forward and backward, gradient reduction, clipping and update.

use std::collections::BTreeMap;

use candle_core::{DType, Result, Tensor};
use candlewick_comm::Reduce;
use candlewick_model::RouterTotal;
use candlewick_ops::{AdamW, DeviceReadback, GradScaler, LossLimit, StepDecision, span};

use super::routing_replay::{ExpertReadback, MicroExperts, StepRouting};
use super::{Engine, LossScale, StepLoss};
use crate::batch::{Micro, StepMicros};
use crate::objective::{AuxiliaryLoss, Objective};
use crate::params::MasterRounding;

/// Micro-batches of this rank in a step, with loss settings.
pub struct TrainBatch<'a> {
    /// Micro-batches; their number is equal on all ranks.
    pub micros: &'a [Micro],
    /// The most tokens that any rank has in each micro-batch, see [`StepMicros::most_tokens`].
    pub most_tokens: Option<&'a [usize]>,
    /// Dropout seed of each micro-batch.
    pub dropout_keys: &'a [u64],
    /// Target tokens of the step on all ranks, over which the loss is a mean.
    pub n_targets: f64,
    /// Auxiliary losses of the layers.
    pub auxiliary: &'a [AuxiliaryLoss],
    /// Choice of the experts.
    pub routing: StepRouting<'a>,
}

/// Optimizer settings of a step.
pub struct OptimizerStep<'a> {
    /// AdamW hyperparameters of this step.
    pub adamw: AdamW,
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

/// A step that may still be running on the device.
pub struct InFlightStep {
    n_micros: usize,
    auxiliary: Vec<AuxiliaryLoss>,
    n_layers: usize,
    /// Index of each MoE layer, and elements of its router's total.
    routers: Vec<(usize, usize)>,
    grad_zeros: ZeroGradCount,
    readout: DeviceReadback,
    /// Recorded experts, if the step records them.
    experts: Option<ExpertReadback>,
}

/// Results of a finished step.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// Loss of each of this rank's micro-batches, before normalization.
    pub own_losses: Vec<f32>,
    /// Losses summed over all ranks.
    pub losses: Vec<f32>,
    /// Mean of each auxiliary loss by name, without its coefficient.
    pub auxiliary: BTreeMap<String, f64>,
    /// Mean of each auxiliary loss by name and layer: a layer's share of [`StepResult::auxiliary`].
    pub auxiliary_layers: BTreeMap<String, Vec<f64>>,
    /// Total of the router of each MoE layer, by layer index.
    pub routers: BTreeMap<usize, RouterTotal>,
    /// Recorded experts of each of this rank's micro-batches, for its tokens and layers. Empty without
    /// [`StepRouting::Record`]; without layers if another rank returns the experts.
    pub experts: Vec<MicroExperts>,
    /// Gradient norm, and the decision to update, skip or stop.
    pub verdict: StepDecision,
    /// Number of zero gradients of all ranks; `None` if they are not counted.
    pub grad_zeros: Option<u64>,
}

/// Number of zeros per unit of the first of two f32 numbers that carry a count to the host.
const ZEROS_PER_UNIT: f64 = (1 << 20) as f64;

impl Engine {
    /// Runs one optimizer step. It waits for the GPU only if the optimizer is offloaded. Collective: all ranks must
    /// call it.
    pub fn train_step(
        &self,
        batch: &TrainBatch<'_>,
        objective: &dyn Objective,
        optimizer: &OptimizerStep<'_>,
    ) -> Result<InFlightStep> {
        let OptimizerStep { adamw, scaler, rounding, grad_zeros, max_loss } = optimizer;
        let scale = LossScale::mean_over(batch.n_targets).times(scaler.loss_scale()?);
        self.store.zero_grads()?;
        let loss = StepLoss { objective, scale, auxiliary: batch.auxiliary };
        let micros = StepMicros { micros: batch.micros, most_tokens: batch.most_tokens };
        let dropout_key = |micro_idx: usize| batch.dropout_keys[micro_idx];
        let (losses, experts) = self.forward_backward_routed(micros, &loss, dropout_key, batch.routing)?;
        let moe_layers = self.model.layers().filter(|layer| layer.n_experts().is_some());
        let routers: Vec<(usize, usize)> =
            moe_layers.map(|layer| layer.layer_idx).zip(losses.routers.iter().map(Tensor::elem_count)).collect();
        let own = [vec![Tensor::stack(&losses.micros, 0)?], losses.auxiliary, losses.routers].concat();
        let own = Tensor::cat(&own, 0)?;
        let of_all = self.group.all_reduce(&own, Reduce::Sum)?;
        let _span = span("optimizer", "");
        let limit = LossLimit { n_losses: batch.micros.len(), max_sum: max_loss * batch.n_targets.max(1.0) };
        scaler.update_within(limit, &self.store.grad_squares()?, &of_all, [adamw.beta1, adamw.beta2])?;
        let zeros = match grad_zeros {
            ZeroGradCount::Off => None,
            ZeroGradCount::On => Some(count_as_f32(&self.store.grad_zeros()?)?),
        };
        self.store.step(adamw, scaler, *rounding)?;
        self.update_fp8_scales()?;
        let n_layers = self.model.layers().count();
        let first_router = batch.micros.len() + batch.auxiliary.len() * n_layers;
        self.update_expert_biases(&split_totals(&of_all, first_router, &routers)?, scaler)?;
        let numbers: Vec<&Tensor> = [&own, &of_all, scaler.state()].into_iter().chain(&zeros).collect();
        let readout = DeviceReadback::start(&Tensor::cat(&numbers, 0)?)?;
        let (n_micros, auxiliary) = (batch.micros.len(), batch.auxiliary.to_vec());
        Ok(InFlightStep { n_micros, auxiliary, n_layers, routers, grad_zeros: *grad_zeros, readout, experts })
    }
}

/// Returns the total of each router from position `first` of all sums on.
fn split_totals(sums: &Tensor, mut first: usize, routers: &[(usize, usize)]) -> Result<Vec<Tensor>> {
    let total_of = |(_, len): &(usize, usize)| {
        let total = sums.narrow(0, first, *len);
        first += len;
        total
    };
    routers.iter().map(total_of).collect()
}

/// Splits a count, an f64 scalar, into two f32 numbers [2] that hold it exactly: units and the rest.
fn count_as_f32(count: &Tensor) -> Result<Tensor> {
    let units = (count / ZEROS_PER_UNIT)?.floor()?;
    let rest = (count - (&units * ZEROS_PER_UNIT)?)?;
    Tensor::stack(&[units, rest], 0)?.to_dtype(DType::F32)
}

impl InFlightStep {
    /// Returns true if [`InFlightStep::wait`] would return immediately.
    pub fn is_ready(&self) -> bool {
        self.readout.is_ready()
    }

    /// Waits for the step and returns its results.
    pub fn wait(self) -> Result<StepResult> {
        let numbers = self.readout.wait()?;
        let n_auxiliary = self.auxiliary.len() * self.n_layers;
        let n_own = self.n_micros + n_auxiliary + self.routers.iter().map(|(_, len)| len).sum::<usize>();
        let (own, rest) = numbers.split_at(n_own);
        let (of_all, state) = rest.split_at(own.len());
        let (losses, rest) = of_all.split_at(self.n_micros);
        let (auxiliary, mut totals) = rest.split_at(n_auxiliary);
        let mut total_of = |(layer_idx, len): &(usize, usize)| {
            (*layer_idx, RouterTotal::read(totals.split_off(..*len).unwrap_or_default()))
        };
        let means = |(loss, sums): (&AuxiliaryLoss, &[f32])| {
            (loss.name.clone(), sums.iter().map(|sum| loss.mean(f64::from(*sum))).collect())
        };
        let auxiliary_layers: BTreeMap<String, Vec<f64>> =
            self.auxiliary.iter().zip(auxiliary.chunks(self.n_layers)).map(means).collect();
        Ok(StepResult {
            own_losses: own[..self.n_micros].to_vec(),
            losses: losses.to_vec(),
            auxiliary: auxiliary_layers.iter().map(|(name, layers)| (name.clone(), layers.iter().sum())).collect(),
            auxiliary_layers,
            routers: self.routers.iter().map(&mut total_of).collect(),
            experts: self.experts.map_or(Ok(Vec::new()), ExpertReadback::wait)?,
            verdict: StepDecision::read(state),
            grad_zeros: match (self.grad_zeros, state) {
                (ZeroGradCount::On, [.., units, rest]) => {
                    Some((f64::from(*units) * ZEROS_PER_UNIT) as u64 + *rest as u64)
                }
                _ => None,
            },
        })
    }
}
