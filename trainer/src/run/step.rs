//! One optimizer step: forward and backward over its micro-batches, clipping, AdamW; and what came of it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use candlewick_ops::{AdamW, CuSeqlens, GradScaler, StepDecision, UpdateOutcome, derive_key, span, upload};
use candlewick_parallel::{CausalLm, Engine, InFlightStep, Micro, OptimizerStep, StepResult, TrainBatch};

use crate::data::{Batch, Dataset, GlobalBatch};
use crate::plan::OptimizerPlan;
use crate::recipe::OnNonfinite;

use super::ranks::RankInfo;

/// What a step did.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StepOutcome {
    /// Which step it was, counted from 1, and its learning rate.
    pub(super) number: usize,
    pub(super) lr: f64,
    /// The mean loss over the step's target tokens.
    pub(super) loss: f64,
    /// The mean of each auxiliary loss, by name.
    pub(super) auxiliary: BTreeMap<String, f64>,
    /// What became of its gradient.
    pub(super) decision: StepDecision,
    /// The time since its beginning, or since the step before was done if that was later.
    pub(super) elapsed: Duration,
    /// The time of forward, backward and config. On a GPU, where the host does not wait for their parts, the whole step's.
    pub(super) compute: Duration,
}

/// A loss or gradient that is not finite, and the rows that it came from.
#[derive(Debug, thiserror::Error)]
#[error(
    "failed to take step {step}: the {what} is not finite. {rows}. Lower the learning rate, look at these rows, or set \
     on_nonfinite to skip"
)]
pub struct NonFinite {
    step: usize,
    what: &'static str,
    rows: String,
}

/// A run of which no step was applied.
#[derive(Debug, thiserror::Error)]
#[error(
    "failed to train: the loss or the gradient was not finite in every one of {n_steps} steps, and all were skipped; nothing was \
     exported. Look at the weights and the data, or lower the learning rate"
)]
pub struct AllStepsSkipped {
    pub(super) n_steps: usize,
}

/// The config of a step, resolved.
pub(super) struct StepConfig<'a> {
    pub(super) plan: &'a OptimizerPlan,
    /// The learning rate.
    pub(super) lr: f64,
    /// The step's number, counted from 1.
    pub(super) number: usize,
    /// Chooses what dropout drops in this step.
    pub(super) dropout_key: u64,
    /// This rank's place among those that compute different micro-batches, and how many places there are.
    pub(super) rank: RankInfo,
}

/// A step that the device may still be busy with.
pub(super) struct PendingStep {
    step: GlobalBatch,
    /// Which of its micro-batches this rank has.
    own: Vec<usize>,
    /// How many ranks share the micro-batches.
    data_world: usize,
    number: usize,
    lr: f64,
    /// When the host started with it, and how long it was until all work was handed out: on the CPU until it was done.
    started: Instant,
    launch_time: Duration,
    in_flight: InFlightStep,
}

/// Starts the gradient of `step` and the config of the weights with it. Nothing waits for a GPU.
///
/// Every partial sum of losses is scaled by the target tokens of the whole step over all ranks, so that accumulation,
/// packing and padding give one number.
pub(super) fn start(
    engine: &Engine,
    scaler: &GradScaler,
    step: GlobalBatch,
    config: &StepConfig,
    started: Instant,
) -> Result<PendingStep> {
    let _step = span("step", "");
    let own: Vec<usize> = step.of_rank((config.rank.data_rank, config.rank.data_world)).collect();
    let filler = Batch::filler();
    let batches = own.iter().map(|micro_idx| step.micro_batches.get(*micro_idx).unwrap_or(&filler));
    let micros = batches.map(|batch| micro(batch, engine)).collect::<Result<Vec<_>>>()?;
    let dropout_keys: Vec<u64> =
        own.iter().map(|micro_idx| derive_key(config.dropout_key, *micro_idx as u64)).collect();
    let n_targets = step.n_targets as f64;
    let batch = TrainBatch { micros: &micros, dropout_keys: &dropout_keys, n_targets, auxiliary: &[] };
    let optimizer = OptimizerStep { adamw: config.hyper(), scaler };
    let in_flight = engine.train_step(&batch, &CausalLm, &optimizer).context("failed to compute the step")?;
    let (number, lr, launch_time) = (config.number, config.lr, started.elapsed());
    Ok(PendingStep { step, own, data_world: config.rank.data_world, number, lr, started, launch_time, in_flight })
}

impl PendingStep {
    /// Tells whether [`PendingStep::outcome`] returns at once.
    pub(super) fn is_done(&self) -> bool {
        self.in_flight.is_ready()
    }

    /// Returns what the step did, once it is done. `since` is when the step before was.
    ///
    /// A loss or gradient that is not finite is an error if the run is to stop at it.
    pub(super) fn outcome(
        self,
        dataset: &Dataset,
        on_nonfinite: OnNonfinite,
        since: Instant,
    ) -> Result<(GlobalBatch, StepOutcome)> {
        let Self { step, own, data_world, number, lr, started, launch_time, in_flight } = self;
        let was_done = in_flight.is_ready();
        let StepResult { own_losses, losses, auxiliary, verdict: decision } = in_flight.wait()?;
        let elapsed = started.max(since).elapsed();
        let loss = losses.iter().copied().map(f64::from).sum::<f64>() / (step.n_targets as f64).max(1.0);
        if decision.outcome == UpdateOutcome::NonFinite {
            let what = if loss.is_finite() { "gradient" } else { "loss" };
            let rows = locate(dataset, &step, &nonfinite_rows(&step, &own, data_world, [&own_losses, &losses]));
            stop_or_warn(NonFinite { step: number, what, rows }, on_nonfinite)?;
        }
        let compute = if was_done { launch_time } else { elapsed };
        Ok((step, StepOutcome { number, lr, loss, auxiliary, decision, elapsed, compute }))
    }
}

/// The rows of this rank's micro-batches whose loss is not finite; if there are none, those that other ranks computed at the
/// time of one.
fn nonfinite_rows(step: &GlobalBatch, own: &[usize], data_world: usize, [sums, of_all]: [&[f32]; 2]) -> Vec<usize> {
    let wrong = |sums: &[f32]| (0..own.len()).filter(|round| !sums[*round].is_finite()).collect::<Vec<_>>();
    let mine = wrong(sums).into_iter().map(|round| own[round]);
    let mut micros: Vec<usize> = mine.collect();
    if micros.is_empty() {
        micros = wrong(of_all).into_iter().flat_map(|round| round * data_world..(round + 1) * data_world).collect();
    }
    let batches = micros.into_iter().filter_map(|micro_idx| step.micro_batches.get(micro_idx));
    batches.flat_map(|batch| batch.samples.iter().copied()).collect()
}

fn stop_or_warn(found: NonFinite, on_nonfinite: OnNonfinite) -> Result<()> {
    match on_nonfinite {
        OnNonfinite::Stop => Err(found.into()),
        OnNonfinite::Skip => {
            tracing::warn!("skipped step {}: the {} is not finite. {}", found.step, found.what, found.rows);
            Ok(())
        }
    }
}

/// Names the rows of a step, or the nonfinite_rows among them.
fn locate(dataset: &Dataset, step: &GlobalBatch, nonfinite_rows: &[usize]) -> String {
    const SHOWN: usize = 5;
    let all: Vec<usize> = step.micro_batches.iter().flat_map(|batch| batch.samples.iter().copied()).collect();
    let rows = if nonfinite_rows.is_empty() { &all[..] } else { nonfinite_rows };
    let mut places: Vec<String> = rows.iter().take(SHOWN).map(|&row| dataset.locate(row)).collect();
    if rows.len() > SHOWN {
        places.push(format!("and {} more", rows.len() - SHOWN));
    }
    format!("Its rows: {}", places.join(", "))
}

impl StepConfig<'_> {
    fn hyper(&self) -> AdamW {
        let OptimizerPlan { beta1, beta2, eps, weight_decay, .. } = *self.plan;
        AdamW { lr: self.lr, beta1, beta2, eps, weight_decay }
    }
}

/// Puts a batch on the engine's device.
pub(super) fn micro(batch: &Batch, engine: &Engine) -> Result<Micro> {
    Ok(Micro {
        ids: upload(&batch.ids, batch.ids.len(), engine.device())?,
        targets: Tensor::new(batch.targets.as_slice(), &Device::Cpu)?,
        positions: batch.positions.clone(),
        seqs: CuSeqlens::packed(batch.cu_seqlens.clone())?,
    })
}
