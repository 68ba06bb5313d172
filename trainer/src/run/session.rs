//! A training session: the data loader, the engine, and the reports.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use candle_core::DeviceLocation;
use candlewick_model::TiledMlp;
use candlewick_ops::{DeviceTimestamp, GradPolicy, GradScaler, LossScaling, UpdateOutcome, derive_key, span};
use candlewick_parallel::{ActivationCheckpointing, MasterRounding, ZeroGradCount};
use serde_json::json;

use crate::checkpoint::{CheckpointError, CheckpointFormat, CheckpointPlan, Moment, Resumed, Tag};
use crate::data::{Cursor, GlobalBatch, TokenStats, TrainSteps};
use crate::exit::ExitCode;
use crate::failpoint::failpoint;
use crate::metrics::{
    AttentionPairs, CheckpointRecord, FlopFactors, Fp8Record, GpuMonitor, Memory, ModelShape, Recomputed, Reporter,
    ResumeRecord, RunJson, RunReport, RunStart, SamplesRecord, StepRecord, TrackerFailure, flops,
    model_flops_utilization, recomputed_flops,
};
use crate::plan::Plan;
use crate::recipe::OnNonfinite;
use crate::routing::RoutingFiles;
use crate::schedule::Schedule;
use crate::signals::StopRequest;

use super::async_save::FinishedAsyncSave;
use super::checkpointer::{self, Checkpointer, SaveOutcome, SavedCheckpoint};
use super::context::{Progress, TrainingRun};
use super::describe::{describe, lines};
use super::routing;
use super::step::{self, AllStepsSkipped, PendingStep, StepConfig, StepOutcome, StepOutput};

pub(super) struct Session<'a> {
    pub(super) run: TrainingRun<'a>,
    pub(super) run_json: &'a mut RunJson,
    pub(super) stream: TrainSteps,
    pub(super) reporter: Reporter,
    pub(super) progress: Progress,
    pub(super) checkpointer: Checkpointer<'a>,
    scaler: GradScaler,
    /// The learning rate schedule, with all lengths in steps.
    schedule: Schedule,
    /// The record of experts that the run writes or replays.
    routing: Option<RoutingFiles>,
    /// Steps on the device whose results were not read yet, oldest first, and the positions after them in the data.
    in_flight: VecDeque<(PendingStep, Cursor)>,
    /// The number of batches that this process kept.
    pub(super) n_kept_batches: usize,
    /// The last sample generations.
    pub(super) last_samples: Option<SamplesRecord>,
    monitor: Option<GpuMonitor>,
    /// Peak FLOPs per second of the device, if known.
    peak: Option<f64>,
    started: Instant,
}

impl<'a> Session<'a> {
    /// Resumes from the newest checkpoint if the plan sets `auto_resume`, checks that all checkpoints fit on disk, and opens the
    /// reports.
    pub(super) fn begin(run: TrainingRun<'a>, run_json: &'a mut RunJson) -> Result<Self> {
        let TrainingRun { plan, prepared, .. } = run;
        let mut checkpointer = Checkpointer::new(run);
        let resuming = Instant::now();
        let resumed = checkpointer.resume()?;
        let resume_time = resuming.elapsed();
        let state = resumed.as_ref().map(|resumed| &resumed.run);
        let cursor: Cursor = match state {
            Some(state) => serde_json::from_value(state.cursor.clone()).context("failed to read the data cursor")?,
            None => Cursor::default(),
        };
        let stream = TrainSteps::new(prepared, &plan.data, cursor, run.ranks.reader())?;
        let total_steps = stream.total_steps();
        let schedule = plan.schedule.in_steps(|| stream.tokens_of_steps());
        schedule.check(total_steps, plan.optimizer.learning_rate)?;
        checkpointer.preflight(&stream)?;
        let moved = checkpointer.prepare_folders(&stream)?;
        let routing = routing::open(&run, &stream)?;

        let start = state.map_or(RunStart::Fresh, |state| RunStart::Resumed(state.step));
        let gpu_id = match run.engine.device().location() {
            DeviceLocation::Cuda { gpu_id } => Some(gpu_id),
            _ => None,
        };
        let description = describe(&run, total_steps, gpu_id);
        let reporter = Reporter::open(&plan.log, start, &description).map_err(|source| {
            let path = plan.log.metrics_path.clone().unwrap_or_default();
            CheckpointError::Io { action: "open the metrics file", path, source }
        })?;
        let mut progress = state.map_or(Progress::default(), Progress::of);
        if !progress.scores.has_metric_of(run.scores) {
            progress.scores = run.scores.clone();
        }
        if !progress.early_stopping.has_metric_of(run.early_stopping) {
            progress.early_stopping = run.early_stopping.clone();
        }
        let scaler = grad_scaler(&run, &progress, stream.cursor().step)?;
        let mut session = Self {
            peak: run.peak,
            run,
            run_json,
            stream,
            reporter,
            progress,
            checkpointer,
            scaler,
            schedule,
            routing,
            in_flight: VecDeque::new(),
            n_kept_batches: 0,
            last_samples: None,
            monitor: gpu_id.and_then(GpuMonitor::open),
            started: Instant::now(),
        };
        lines(plan, &description.device).iter().for_each(|line| session.reporter.terminal().line(line));
        session.run_json.update(|report| report.run = Some(description))?;
        session.log_start(resumed.as_ref(), resume_time, &moved)?;
        if resumed.is_some() {
            session.save_missing()?;
        }
        session.run.ranks.instruments.begin_training();
        Ok(session)
    }

    /// Logs notes, token statistics, planned checkpoints and a resume before the first step.
    ///
    /// `moved` has a line for each folder to which another run's checkpoints were moved.
    fn log_start(&mut self, resumed: Option<&Resumed>, resume_time: Duration, moved: &[String]) -> Result<()> {
        let (terminal, prepared) = (self.reporter.terminal().clone(), self.run.prepared);
        let notes: Vec<String> = prepared.notes.iter().chain(self.run.notes).cloned().collect();
        notes.iter().for_each(|note| terminal.line(note));
        let is_tokenized = prepared.streamed.is_none();
        if is_tokenized && resumed.is_none_or(|resumed| resumed.run.step < self.stream.total_steps()) {
            terminal.line(&prepared.token_stats.to_string());
        }
        let plan = self.run.plan;
        plan.steps(&self.stream).iter().for_each(|line| terminal.line(line));
        moved.iter().for_each(|line| terminal.line(line));
        let planned = plan.checkpoints.iter().map(|plan| format!("will save: {plan}"));
        planned.for_each(|line| terminal.line(&line));
        if let Some(Resumed { run, dir, .. }) = resumed {
            let (epoch, iter, resume_time) = (run.epoch, run.step, resume_time.as_secs_f64());
            self.reporter.log_resume(&ResumeRecord { epoch, iter, resumed_from: dir.clone(), resume_time });
            for difference in self.checkpointer.changed_settings(run) {
                terminal.line(&format!("changed since this checkpoint: {difference}"));
            }
            if run.step >= self.stream.total_steps() {
                terminal.line("nothing left to train: all steps are done");
            }
        }
        let token_stats = json!(self.token_stats());
        self.run_json.update(|report| {
            report.token_stats = token_stats;
            report.notes = notes;
            report.resumed_from = resumed.map(|resumed| resumed.dir.clone());
        })?;
        Ok(())
    }

    fn token_stats(&self) -> TokenStats {
        let (seen, sources) = (self.stream.cursor().seen, self.stream.counts_by_source());
        TokenStats { seen, sources, ..self.run.prepared.token_stats.clone() }
    }

    /// Loads the batch of the next step; `None` at the horizon.
    pub(super) fn next_batch(&mut self) -> Result<Option<GlobalBatch>> {
        let _span = span("data", "");
        let process = &self.run.ranks.process;
        self.stream.next_step(&|own| process.exchange(own.map_err(Into::into)))
    }

    /// Computes one step. On a GPU, starts the step and reads the results of the step before, so that the device is
    /// never idle. Reports are one step late.
    pub(super) fn train_step(&mut self, step: GlobalBatch, started: DeviceTimestamp) -> Result<()> {
        let plan = self.run.plan;
        let number = self.stream.cursor().step;
        let config = StepConfig {
            moe: self.run.plan.moe.as_ref(),
            routing: self.routing.as_ref(),
            mtp: self.run.plan.model.mtp,
            plan: &plan.optimizer,
            grad_zeros: if plan.log.log_num_zeros_in_grad { ZeroGradCount::On } else { ZeroGradCount::Off },
            lr: self.schedule.lr(number - 1, self.stream.total_steps(), plan.optimizer.learning_rate),
            number,
            max_loss: self.max_loss(number),
            rounding: master_rounding(plan, number),
            dropout_key: derive_key(plan.seed, number as u64),
            rank: self.run.ranks.rank_info,
        };
        let (epoch, engine) = (step.epoch, self.run.engine);
        let interval = plan.fp8.as_ref().map_or(0, |fp8| fp8.stats_interval);
        if let Some(fp8) = engine.store().fp8().filter(|_| interval > 0 && number.is_multiple_of(interval)) {
            fp8.request_stats();
        }
        let pending = step::start(engine, &self.scaler, step, &config, started)?;
        let pending = pending.with_wall_clock(self.run.ranks.instruments.take_wall_clock());
        self.in_flight.push_back((pending, self.stream.cursor().clone()));
        if let Some(layers) = engine.fp8_stats()? {
            self.reporter.log_fp8(&Fp8Record::of(epoch, number, layers));
        }
        failpoint("step_computed", number);
        self.drain(1)
    }

    /// Reads the results of finished steps, and waits until at most `n_waiting` steps are in flight.
    pub(super) fn drain(&mut self, n_waiting: usize) -> Result<()> {
        while self.in_flight.len() > n_waiting || self.in_flight.front().is_some_and(|(step, _)| self.reads_early(step))
        {
            let Some((in_flight, position)) = self.in_flight.pop_front() else { break };
            let output = in_flight.outcome(&self.stream, self.routing.as_ref())?;
            self.take_output(output, position)?;
        }
        Ok(())
    }

    /// Returns true if the result of a step is there. With a watchdog, ranks with GPUs read results at the same time, because
    /// they rewind together.
    fn reads_early(&self, step: &PendingStep) -> bool {
        let reads_together = self.run.plan.loss_watchdog.is_some() && !self.run.engine.device().is_cpu();
        !reads_together && step.is_done()
    }

    /// Records and reports the result of a step. `position` follows the step's batch in the data.
    fn take_output(&mut self, output: StepOutput, position: Cursor) -> Result<()> {
        let StepOutput { step, outcome } = &output;
        if let Some(found) = outcome.nonfinite.clone() {
            self.keep_batch(step, outcome, "the loss or a gradient is not finite");
            found.stop_or_warn(self.run.plan.on_nonfinite)?;
        }
        self.progress.n_skipped += usize::from(outcome.decision.outcome != UpdateOutcome::Applied);
        self.progress.scaler = Some(outcome.decision.next);
        self.report(step, outcome);
        self.watch_loss(&output, position)
    }

    /// Waits for the steps in flight and drops their results.
    pub(super) fn discard_in_flight(&mut self) -> Result<()> {
        std::mem::take(&mut self.in_flight).into_iter().try_for_each(|(step, _)| step.discard())
    }

    /// Sets the gradient scaler to the progress after `step`.
    pub(super) fn reset_scaler(&mut self, step: usize) -> Result<()> {
        self.scaler = grad_scaler(&self.run, &self.progress, step)?;
        Ok(())
    }

    fn report(&mut self, step: &GlobalBatch, outcome: &StepOutcome) {
        let decision = &outcome.decision;
        if decision.outcome == UpdateOutcome::Overflowed {
            let (number, scale) = (outcome.number, decision.next.loss_scale);
            let line = format!("skipped step {number}: its gradient overflowed; the loss scale is now {scale}");
            self.reporter.terminal().line(&line);
        }
        let data_world = self.run.ranks.rank_info.data_world;
        let (n_micros, n_rounds) = (step.micro_batches.len() as f64, step.n_micros(data_world) as f64);
        let n_ranks = self.run.plan.ranks.n_ranks();
        let step_time = outcome.elapsed.as_secs_f64();
        let tera_flops = self.flops(step, Work::All) / n_ranks as f64 / 1e12;
        let useful_flops = self.flops(step, Work::Useful) / n_ranks as f64;
        let padded: usize = step.micro_batches.iter().map(|batch| batch.ids.len()).sum();
        let record = StepRecord {
            epoch: step.epoch,
            iter: outcome.number,
            lr: outcome.lr,
            loss: outcome.loss,
            auxiliary_losses: outcome.auxiliary.clone(),
            expert_load: outcome.expert_load.clone(),
            grad_norm: decision.norm,
            num_zeros: outcome.grad_zeros,
            loss_scale: (self.run.plan.optimizer.loss_scaling != LossScaling::NONE).then_some(decision.next.loss_scale),
            seqlen: padded as f64 / n_micros,
            iter_time: step_time / n_rounds,
            iter_tflops: tera_flops / step_time,
            step_time,
            step_tflops: tera_flops / step_time,
            tokens: step.n_tokens() as u64,
            n_targets: step.n_targets as u64,
            tokens_per_second: step.n_tokens() as f64 / step_time,
            mfu: self.peak.as_mut().map(|peak| model_flops_utilization(useful_flops, step_time, peak)),
            memory: Memory::now(),
            gpu_memory: self.monitor.as_ref().map(GpuMonitor::memory),
            wall_clock_ms: outcome.wall_clock,
            gpu_energy_joules: self.monitor.as_ref().and_then(GpuMonitor::energy),
        };
        self.reporter.log_step(&record);
        if let Some(times) = outcome.wall_clock {
            self.reporter.terminal().line(&times.to_string());
        }
        let (token_stats, n_skipped) = (json!(self.token_stats()), self.progress.n_skipped);
        self.update_run_json(|report| {
            report.metrics["step"] = json!(record);
            report.token_stats = token_stats;
            report.skipped_steps = n_skipped;
        });
    }

    /// Returns the FLOPs of a step, summed over all ranks.
    fn flops(&self, step: &GlobalBatch, work: Work) -> f64 {
        let shape = ModelShape::of(self.run.engine.model());
        let (attention_pairs, again) = match work {
            Work::All => {
                (AttentionPairs::Full, recomputed(self.run.engine.checkpointing(), self.run.engine.tiled_mlp()))
            }
            Work::Useful => (AttentionPairs::Causal, Vec::new()),
        };
        let factors = if self.run.plan.model.adapter.is_some() { FlopFactors::ADAPTER } else { FlopFactors::TRAIN };
        let of_batch = |ends: &[usize]| {
            let lengths: Vec<usize> = ends.windows(2).map(|pair| pair[1] - pair[0]).collect();
            flops(&shape, factors, attention_pairs, &lengths) + recomputed_flops(&shape, &again, &lengths)
        };
        step.micro_batches.iter().map(|batch| of_batch(&batch.cu_seqlens)).sum()
    }

    /// Updates run.json. A failed write only warns, because the run can still save checkpoints.
    pub(super) fn update_run_json(&mut self, change: impl FnOnce(&mut RunReport)) {
        if let Err(error) = self.run_json.update(change) {
            tracing::warn!("failed to write run.json: {error}");
        }
    }

    /// Fails if a run that succeeded otherwise could not write all of its metrics.
    pub(super) fn check_metrics_written(&mut self, code: ExitCode) -> Result<()> {
        let failure = self.reporter.take_failure().filter(|_| code == ExitCode::Ok);
        failure.map_or(Ok(()), |TrackerFailure { path, source }| {
            Err(CheckpointError::Io { action: "write all metrics to", path, source }.into())
        })
    }

    /// Returns the stop request of any rank. All ranks return the same.
    pub(super) fn stop_request(&self) -> Result<Option<StopRequest>> {
        let TrainingRun { plan, ranks, stop, .. } = self.run;
        ranks.agree_on_stop(stop.poll(), plan.exit.kill_switch_path.as_deref())
    }

    /// Reports the asynchronous checkpoint if it is finished. With `wait`, waits for it.
    pub(super) fn finish_async_save(&mut self, wait: bool) -> Result<()> {
        if let Some(FinishedAsyncSave { tag, dir, removed, save_time }) = self.checkpointer.finish_async_save(wait)? {
            let (epoch, iter, save_time) = (tag.epoch, tag.step, save_time.as_secs_f64());
            self.reporter.log_checkpoint(&CheckpointRecord { epoch, iter, saved: dir, save_time });
            self.log_removed(&removed);
        }
        Ok(())
    }

    fn log_removed(&self, removed: &[PathBuf]) {
        removed
            .iter()
            .for_each(|dir| self.reporter.terminal().line(&format!("deleted {} (save_total_limit)", dir.display())));
    }

    /// Saves every checkpoint that is due after this step.
    pub(super) fn save_due(&mut self) -> Result<()> {
        self.finish_async_save(false)?;
        let moment = self.moment();
        if moment.end_of_training {
            self.refuse_untrained()?;
        }
        if !self.run.plan.checkpoints.iter().any(|checkpoint| checkpoint.is_due(moment)) {
            return Ok(());
        }
        let is_trained = self.is_trained()?;
        self.save_all(|plan| plan.is_due(moment) && (is_trained || plan.format == CheckpointFormat::Sharded)).map(drop)
    }

    /// Returns true if a step was applied, or if there was no step yet.
    fn is_trained(&mut self) -> Result<bool> {
        self.drain(0)?;
        let n_steps = self.stream.cursor().step;
        Ok(n_steps == 0 || self.progress.n_skipped < n_steps)
    }

    /// Fails if every step so far was skipped, because the weights are the initial ones.
    fn refuse_untrained(&mut self) -> Result<()> {
        let n_steps = self.stream.cursor().step;
        if self.is_trained()? { Ok(()) } else { Err(AllStepsSkipped { n_steps }.into()) }
    }

    pub(super) fn moment(&self) -> Moment {
        let Cursor { step, epoch, step_in_epoch, .. } = *self.stream.cursor();
        let finished_epoch = (step_in_epoch == 0).then_some(epoch);
        Moment { step, finished_epoch, end_of_training: step >= self.stream.total_steps() }
    }

    /// Saves the checkpoints of this step that are missing because the run died between two of them.
    fn save_missing(&mut self) -> Result<()> {
        let Cursor { step, epoch, .. } = *self.stream.cursor();
        let (moment, run_id) = (self.moment(), self.run.run_id);
        let is_missing = |plan: &CheckpointPlan| !checkpointer::is_of_run(&plan.dir(Tag { step, epoch }), run_id);
        // The first rank decides: a later check on another rank may find a checkpoint that was written meanwhile.
        let found = self.run.plan.checkpoints.iter().map(|plan| u8::from(plan.is_due(moment) && is_missing(plan)));
        let found = self.run.ranks.process.exchange(Ok(found.collect()))?.swap_remove(0);
        let checkpoints = self.run.plan.checkpoints.iter().zip(found);
        let missing: Vec<&CheckpointPlan> = checkpoints.filter(|(_, is)| *is == 1).map(|(plan, _)| plan).collect();
        self.save_all(|plan| missing.contains(&plan)).map(drop)
    }

    /// Saves every checkpoint of the plan if the run has ended and none was due, so that no training is lost.
    pub(super) fn save_last_step(&mut self) -> Result<()> {
        if self.checkpointer.newest_step().is_some()
            || self.run.plan.checkpoints.is_empty()
            || self.stream.cursor().step == 0
        {
            return Ok(());
        }
        self.refuse_untrained()?;
        self.reporter.terminal().line("no checkpoint was due in this run: saving the last step");
        self.save_all(|_| true)?;
        self.finish_async_save(true)
    }

    /// Saves the checkpoints of a run that ends early: those to resume from, and those due at the end of training.
    pub(super) fn save_early_end(&mut self) -> Result<usize> {
        self.refuse_untrained()?;
        let n_checkpoints =
            self.save_all(|plan| plan.format == CheckpointFormat::Sharded || plan.save_end_of_training)?;
        self.finish_async_save(true)?;
        Ok(n_checkpoints)
    }

    /// Saves the checkpoints to resume from. If the plan has none, exports the weights.
    pub(super) fn save_to_resume(&mut self) -> Result<StopResult> {
        let n_checkpoints = self.save_all(|plan| plan.format == CheckpointFormat::Sharded)?;
        self.finish_async_save(true)?;
        if n_checkpoints == 0 {
            return Ok(if self.save_all(|_| true)? == 0 { StopResult::Lost } else { StopResult::Exported });
        }
        let resumes = self.run.plan.checkpoints.iter().any(|plan| plan.auto_resume);
        Ok(if resumes { StopResult::Resumable } else { StopResult::Saved })
    }

    /// Saves the `wanted` checkpoints and returns their number, existing ones included.
    fn save_all(&mut self, wanted: impl Fn(&CheckpointPlan) -> bool) -> Result<usize> {
        let mut n_checkpoints = 0;
        for checkpoint in self.run.plan.checkpoints.iter().filter(|checkpoint| wanted(checkpoint)) {
            self.drain(0)?;
            self.finish_async_save(true)?;
            let _span = span("save", "");
            let before = self.progress.before + self.started.elapsed();
            let progress = Progress { before, ..self.progress.clone() };
            let started = Instant::now();
            if let SaveOutcome::Saved(SavedCheckpoint { dir: saved, removed }) =
                self.checkpointer.save(checkpoint, &self.stream, progress)?
            {
                let Cursor { epoch, step: iter, .. } = *self.stream.cursor();
                let save_time = started.elapsed().as_secs_f64();
                self.reporter.log_checkpoint(&CheckpointRecord { epoch, iter, saved, save_time });
                self.log_removed(&removed);
            }
            n_checkpoints += 1;
        }
        Ok(n_checkpoints)
    }
}

/// Returns the gradient scaler after `step`. Old checkpoints have no state of it.
fn grad_scaler(run: &TrainingRun, progress: &Progress, step: usize) -> Result<GradScaler> {
    let plan = run.plan;
    let policy = GradPolicy {
        max_norm: plan.optimizer.gradient_clipping,
        loss_scaling: plan.optimizer.loss_scaling,
        stop_on_nonfinite: plan.on_nonfinite == OnNonfinite::Stop,
    };
    let device = run.engine.device();
    Ok(match &progress.scaler {
        Some(state) => GradScaler::from_state(policy, state, device)?,
        None => GradScaler::new(policy, step.saturating_sub(progress.n_skipped), device)?,
    })
}

/// The operations to count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// All computed operations: attention over all pairs, as ArcticTraining counts it, and recomputation.
    All,
    /// The useful operations: causal attention, without recomputation.
    Useful,
}

/// Part of the seed of the rounding of master weights.
const MASTER_ROUNDING: u64 = 0xbf16;

/// Returns the rounding of the master weights in a step.
fn master_rounding(plan: &Plan, step: usize) -> MasterRounding {
    if !plan.optimizer.bf16_stochastic_round {
        return MasterRounding::Nearest;
    }
    MasterRounding::Stochastic { key: derive_key(derive_key(plan.seed, MASTER_ROUNDING), step as u64) }
}

/// Returns the recomputed parts of each layer. Tiled MLPs are recomputed once more than their layer.
fn recomputed(kept: &[ActivationCheckpointing], tiled_mlp: TiledMlp) -> Vec<Recomputed> {
    let of_layer = |kept: &ActivationCheckpointing| {
        let layer = *kept != ActivationCheckpointing::None;
        let attention = layer && *kept != ActivationCheckpointing::Selective;
        Recomputed { layer, attention, tiled_mlp: tiled_mlp == TiledMlp::On }
    };
    kept.iter().map(of_layer).collect()
}

/// The saved state of a run that was stopped by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopResult {
    /// A checkpoint from which the same command resumes.
    Resumable,
    /// A checkpoint, but the recipe does not set `auto_resume`.
    Saved,
    /// Exported weights.
    Exported,
    /// Nothing: the recipe has no checkpoint.
    Lost,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpointed_layers_and_tiled_mlps_are_recomputed() {
        use ActivationCheckpointing::{Full, None, Offload, Selective};
        let counts = |kept: &[ActivationCheckpointing], tiled_mlp| {
            let again = recomputed(kept, tiled_mlp);
            let n = |is_again: fn(&Recomputed) -> bool| again.iter().filter(|layer| is_again(layer)).count();
            (n(|layer| layer.layer), n(|layer| layer.attention), n(|layer| layer.tiled_mlp))
        };
        assert_eq!(counts(&[None; 3], TiledMlp::Off), (0, 0, 0));
        assert_eq!(counts(&[Full, None, Full], TiledMlp::Off), (2, 2, 0));
        assert_eq!(counts(&[Selective, None, Full], TiledMlp::Off), (2, 1, 0));
        assert_eq!(counts(&[Offload, Offload, Full], TiledMlp::On), (3, 3, 3));
        assert_eq!(counts(&[None; 3], TiledMlp::On), (0, 0, 3));
    }
}
