//! One optimizer step: forward and backward over its micro-batches, gradient clipping, update.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candlewick_model::{ROUTER_TOTALS, RouterLoss, RouterTotal};
use candlewick_ops::{CuSeqlens, DeviceTimestamp, GradScaler, StepDecision, UpdateOutcome, derive_key, span, upload};
use candlewick_parallel::{
    AuxiliaryLoss, Engine, InFlightStep, MasterRounding, Micro, MicroColumns, OptimizerStep, SideOutputs, StepResult,
    TrainBatch, ZeroGradCount, mtp_loss_name,
};

use crate::data::{Batch, GlobalBatch, TrainSteps};
use crate::metrics::{ExpertLoad, WallClockTimes};
use crate::plan::{MtpPlan, ObjectivePlan, RouterPlan};
use crate::routing::RoutingFiles;
use crate::step_error::NonFinite;

use super::nonfinite::{NonFinitePart, locate, nonfinite_rows};
use super::rank_info::RankInfo;
use super::step_experts::{StepExperts, record_experts};

/// A finished step: its batch and its result.
pub(super) struct StepOutput {
    pub(super) step: GlobalBatch,
    pub(super) outcome: StepOutcome,
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StepOutcome {
    /// The step's number, counted from 1.
    pub(super) number: usize,
    pub(super) lr: f64,
    /// The mean loss over the step's target tokens.
    pub(super) loss: f64,
    /// The largest loss whose update is applied; infinity for none.
    pub(super) max_loss: f64,
    /// The samples of a loss or gradient that is not finite.
    pub(super) nonfinite: Option<NonFinite>,
    /// The mean of each auxiliary loss, by name.
    pub(super) auxiliary: BTreeMap<String, f64>,
    /// The metrics of the objective, by name.
    pub(super) metrics: BTreeMap<String, f64>,
    /// The load of the experts, for a model with experts.
    pub(super) expert_load: Option<ExpertLoad>,
    /// The number of zero gradients, if they are counted.
    pub(super) grad_zeros: Option<u64>,
    /// The decision of the gradient scaler.
    pub(super) decision: StepDecision,
    /// The times of the phases, if they are measured.
    pub(super) wall_clock: Option<WallClockTimes>,
    /// The time from the start of the step to its end, on the device. A GPU starts a step when the step before is done.
    pub(super) elapsed: Duration,
}

/// The resolved settings of a step.
pub(super) struct StepConfig<'a> {
    pub(super) objective: ObjectivePlan,
    /// The settings of the routers.
    pub(super) moe: Option<&'a RouterPlan>,
    /// The record of experts that the run writes or replays.
    pub(super) routing: Option<&'a RoutingFiles>,
    /// The losses of MTP layers.
    pub(super) mtp: Option<MtpPlan>,
    /// The choice to count zero gradients.
    pub(super) grad_zeros: ZeroGradCount,
    /// The learning rate.
    pub(super) lr: f64,
    /// The step's number, counted from 1.
    pub(super) number: usize,
    /// The largest loss whose update is applied; infinity for none.
    pub(super) max_loss: f64,
    /// The rounding of the updated master weights.
    pub(super) rounding: MasterRounding,
    /// The seed of this step's dropout masks.
    pub(super) dropout_key: u64,
    /// The position of this rank among the data-parallel ranks.
    pub(super) rank: RankInfo,
}

/// A step that may still be running on the device.
pub(super) struct PendingStep {
    step: GlobalBatch,
    /// The micro-batches of this rank.
    own: Vec<usize>,
    /// The number of data-parallel ranks.
    data_world: usize,
    number: usize,
    /// The dtype of the model's computation.
    dtype: DType,
    lr: f64,
    max_loss: f64,
    started: DeviceTimestamp,
    done: DeviceTimestamp,
    /// The times of the phases, if they are measured.
    wall_clock: Option<WallClockTimes>,
    /// The auxiliary losses.
    auxiliary: Vec<AuxiliaryLoss>,
    objective: ObjectivePlan,
    /// The divisor of the loss.
    normalizer: f64,
    in_flight: InFlightStep,
}

/// Starts a step: computes the gradients and updates the weights. Does not wait for a GPU.
///
/// Each partial loss is divided by the objective's normalizer of the global batch. So accumulation, packing and padding do
/// not change the loss.
pub(super) fn start(
    engine: &Engine,
    scaler: &GradScaler,
    step: GlobalBatch,
    config: &StepConfig,
    started: DeviceTimestamp,
) -> Result<PendingStep> {
    let _step = span("step", "");
    let own: Vec<usize> = step.of_rank((config.rank.data_rank, config.rank.data_world)).collect();
    let filler = Batch::filler();
    let batches = own.iter().map(|micro_idx| step.micro_batches.get(*micro_idx).unwrap_or(&filler));
    let micros = batches.map(|batch| micro(batch, engine)).collect::<Result<Vec<_>>>()?;
    let dropout_keys: Vec<u64> =
        own.iter().map(|micro_idx| derive_key(config.dropout_key, *micro_idx as u64)).collect();
    let objective = config.objective.objective();
    let normalizer = step.count(objective.normalizer()) as f64;
    let auxiliary = auxiliary_losses(config.moe, config.mtp, &step);
    let pads_experts = config.moe.is_some_and(|moe| moe.padded_capacity_factor().is_some());
    let most_tokens = pads_experts.then(|| step.most_tokens(config.rank.data_world));
    let experts = StepExperts::read(config.routing, config.number, &step, &own)?;
    let routing = experts.routing(config.routing);
    let batch = TrainBatch {
        micros: &micros,
        most_tokens: most_tokens.as_deref(),
        dropout_keys: &dropout_keys,
        normalizer,
        auxiliary: &auxiliary,
        routing,
    };
    let StepConfig { rounding, grad_zeros, max_loss, .. } = *config;
    let optimizer = OptimizerStep { lr: config.lr, scaler, rounding, grad_zeros, max_loss };
    let in_flight = engine.train_step(&batch, objective, &optimizer).context("failed to compute the step")?;
    let (number, lr, done) = (config.number, config.lr, DeviceTimestamp::now(engine.device())?);
    let data_world = config.rank.data_world;
    Ok(PendingStep {
        step,
        own,
        data_world,
        number,
        dtype: engine.store().compute_dtype(),
        lr,
        max_loss,
        started,
        done,
        wall_clock: None,
        auxiliary,
        objective: config.objective,
        normalizer,
        in_flight,
    })
}

/// Returns the auxiliary losses of a step.
pub(super) fn auxiliary_losses(
    moe: Option<&RouterPlan>,
    mtp: Option<MtpPlan>,
    step: &GlobalBatch,
) -> Vec<AuxiliaryLoss> {
    let has_targets = |batch: &&Batch| batch.targets.iter().any(|target| *target != Micro::IGNORED);
    let n_tokens = step.micro_batches.iter().filter(has_targets).map(|batch| batch.n_tokens).sum();
    let mut auxiliary = moe.map(|moe| moe.auxiliary(n_tokens)).unwrap_or_default();
    auxiliary.extend(mtp.into_iter().flat_map(|mtp| mtp_losses(mtp, step)));
    auxiliary
}

/// Returns the losses of the MTP layers in a step.
fn mtp_losses(mtp: MtpPlan, step: &GlobalBatch) -> impl Iterator<Item = AuxiliaryLoss> {
    let n_targets = |depth| step.micro_batches.iter().map(|batch| batch.n_targets_ahead(depth)).sum::<usize>();
    (1..=mtp.n_layers).map(move |depth| AuxiliaryLoss {
        name: mtp_loss_name(depth),
        coefficient: mtp.loss_scaling_factor / mtp.n_layers as f64,
        normalizer: n_targets(depth) as f64,
    })
}

impl PendingStep {
    /// Adds the measured times of the phases.
    pub(super) fn with_wall_clock(self, wall_clock: Option<WallClockTimes>) -> Self {
        Self { wall_clock, ..self }
    }

    /// Returns true if [`PendingStep::outcome`] returns at once.
    pub(super) fn is_done(&self) -> bool {
        self.in_flight.is_ready()
    }

    /// Waits for the step and returns its result.
    ///
    /// Writes the step's experts if `routing` is a record to write.
    pub(super) fn outcome(self, stream: &TrainSteps, routing: Option<&RoutingFiles>) -> Result<StepOutput> {
        let Self {
            step,
            own,
            data_world,
            number,
            dtype,
            lr,
            max_loss,
            started,
            done,
            wall_clock,
            auxiliary: weighted,
            objective,
            normalizer,
            in_flight,
        } = self;
        let result = in_flight.wait()?;
        let grad_zeros = result.zero_grads();
        let StepResult { own_losses, losses, outputs, routed, decision } = result;
        record_experts(routing, number, &step, own.iter().copied().zip(routed))?;
        let totals = |names: &mut dyn Iterator<Item = &str>| -> BTreeMap<String, f64> {
            names.filter_map(|name| Some((name.to_owned(), outputs.total(name)?))).collect()
        };
        let auxiliary = totals(&mut weighted.iter().map(|loss| loss.name.as_str()));
        let metrics = totals(&mut objective.objective().metrics().iter().map(|metric| metric.name));
        let elapsed = done.since(&started)?;
        let loss = losses.iter().copied().map(f64::from).sum::<f64>() / normalizer.max(1.0);
        let nonfinite = (decision.outcome == UpdateOutcome::NonFinite).then(|| {
            let part = NonFinitePart::of(loss, &weighted, &auxiliary).to_string();
            let rows = locate(stream, &step, &nonfinite_rows(&step, &own, data_world, [&own_losses, &losses]));
            NonFinite { step: number, part, rows, dtype }
        });
        let expert_load = expert_load(&outputs);
        let outcome = StepOutcome {
            number,
            lr,
            loss,
            max_loss,
            nonfinite,
            auxiliary,
            metrics,
            expert_load,
            grad_zeros,
            decision,
            wall_clock,
            elapsed,
        };
        Ok(StepOutput { step, outcome })
    }

    /// Waits for the step and drops its result.
    pub(super) fn discard(self) -> Result<()> {
        self.in_flight.wait().map(drop).context("failed to compute the step")
    }
}

/// Returns the load of the experts, for a model with experts.
fn expert_load(outputs: &SideOutputs) -> Option<ExpertLoad> {
    let routers = outputs.layers(ROUTER_TOTALS).map(|(layer_idx, total)| (layer_idx, RouterTotal::read(total)));
    let losses = RouterLoss::ALL.into_iter().map(RouterLoss::name).filter(|name| outputs.get(name).is_some());
    ExpertLoad::of(&routers.collect(), &losses.map(|name| (name.to_owned(), outputs.vector(name).to_vec())).collect())
}

/// Copies a batch to the engine's device.
pub(super) fn micro(batch: &Batch, engine: &Engine) -> Result<Micro> {
    Ok(Micro {
        ids: upload(&batch.ids, batch.ids.len(), engine.device())?,
        targets: Tensor::new(batch.targets.as_slice(), &Device::Cpu)?,
        positions: batch.positions.clone(),
        seqs: CuSeqlens::packed(batch.cu_seqlens.clone())?,
        padding: batch.padding.clone(),
        columns: MicroColumns::default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::RouterLossTerm;
    use crate::recipe::{MoeBenchmarkSection, MoeRouterDtype, TokenDropPolicy};

    /// Returns a sequence with these targets, whose last `n_padding` tokens are padding.
    fn sequence(targets: Vec<i64>, n_padding: usize) -> Batch {
        let n = targets.len();
        let n_targets = targets.iter().filter(|target| **target != Micro::IGNORED).count();
        Batch {
            ids: vec![0; n],
            targets,
            cu_seqlens: vec![0, n],
            n_targets,
            n_tokens: n - n_padding,
            ..Batch::default()
        }
    }

    fn routers(n_layers: usize) -> RouterPlan {
        RouterPlan {
            losses: vec![RouterLossTerm { loss: RouterLoss::Z, coefficient: 0.5 }],
            sinkhorn: false,
            n_layers,
            bias_update_rate: 0.0,
            capacity_factor: None,
            drop_policy: TokenDropPolicy::Probs,
            pads_to_capacity: false,
            input_jitter_eps: 0.0,
            dtype: MoeRouterDtype::Fp32,
            benchmark: MoeBenchmarkSection::default(),
            routing_replay: None,
        }
    }

    /// Routers count neither pad tokens nor the tokens of a micro-batch without targets.
    #[test]
    fn losses_of_routers_are_means_over_the_tokens_of_micro_batches_with_targets() {
        const NONE: i64 = Micro::IGNORED;
        let batches = vec![sequence(vec![7, 8, NONE, NONE], 1), sequence(vec![NONE; 5], 0), sequence(vec![7, 8, 9], 0)];
        let mtp = MtpPlan { n_layers: 2, loss_scaling_factor: 0.3 };
        let losses = auxiliary_losses(Some(&routers(6)), Some(mtp), &GlobalBatch::new(0, batches));
        let found = losses.iter().map(|loss| (loss.name.as_str(), loss.coefficient, loss.normalizer));
        // Three and three tokens in six layers. Each MTP layer has half of the factor, and a target fewer in each sequence.
        let want = [("z_loss", 0.5 * 6.0, 6.0 * 6.0), ("mtp_1 loss", 0.15, 3.0), ("mtp_2 loss", 0.15, 1.0)];
        assert_eq!(found.collect::<Vec<_>>(), want);
    }
}
