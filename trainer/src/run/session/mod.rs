//! A training session: the data loader, the engine, and the reports.

mod saves;
mod step_report;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use candle_core::DeviceLocation;
use candlewick_ops::{DeviceTimestamp, GradPolicy, GradScaler, UpdateOutcome, derive_key, span};
use candlewick_parallel::{MasterRounding, ZeroGradCount};
use candlewick_text::quantity::counted;
use serde_json::json;

use crate::checkpoint::{CheckpointError, Resumed};
use crate::data::{Cursor, GlobalBatch, TokenStats, TrainSteps};
use crate::exit::ExitCode;
use crate::failpoint::failpoint;
use crate::metrics::{
    Fp8Record, GpuMonitor, PeakRate, Reporter, ResumeRecord, RunJson, RunReport, RunStart, SamplesRecord,
    TrackerFailure,
};
use crate::plan::Plan;
use crate::recipe::OnNonfinite;
use crate::routing::RoutingFiles;
use crate::schedule::Schedule;
use crate::signals::StopRequest;

use super::checkpointer::Checkpointer;
use super::context::{Progress, TrainingRun};
use super::describe::{describe, lines};
use super::routing;
use super::step::{self, PendingStep, StepConfig, StepOutput};
pub(super) use saves::StopResult;

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
    /// Peak rate of the device's matmuls, if known.
    peak: Option<PeakRate>,
    started: Instant,
    /// The steps done before this start.
    pub(super) first_step: usize,
}

impl<'a> Session<'a> {
    /// Resumes from the newest checkpoint of this run or from that of `resume_from_checkpoint`, checks that all checkpoints fit on disk, and opens the
    /// reports.
    pub(super) fn begin(run: TrainingRun<'a>, run_json: &'a mut RunJson) -> Result<Self> {
        let TrainingRun { plan, prepared, .. } = run;
        let mut checkpointer = Checkpointer::new(run)?;
        let resuming = Instant::now();
        let resumed = checkpointer.resume()?;
        let resume_time = resuming.elapsed();
        let state = resumed.as_ref().map(|resumed| &resumed.run);
        let cursor: Cursor = match state {
            Some(state) => serde_json::from_value(state.cursor.clone()).context("failed to read the data cursor")?,
            None => Cursor::default(),
        };
        let stream = TrainSteps::new(prepared, &plan.data, cursor, run.ranks.reader());
        // Ranks with the same error report it once.
        let stream = run.ranks.process.all_ok(stream.map_err(Into::into))?;
        let total_steps = stream.total_steps();
        let schedule = plan.schedule.in_steps(|| stream.tokens_of_steps());
        run.ranks.process.all_ok(schedule.check(total_steps, plan.optimizer.learning_rate).map_err(Into::into))?;
        checkpointer.preflight(&stream)?;
        let moved = checkpointer.prepare_folders(&stream)?;
        let routing = routing::open(&run, &stream)?;

        let start = match &resumed {
            Some(resumed) if !checkpointer.is_of_other_run(resumed) => RunStart::Resumed(resumed.run.step),
            _ => RunStart::Fresh,
        };
        if start == RunStart::Fresh {
            run_json.set_aside_unfinished(&plan.log)?;
        }
        let gpu_id = match run.engine.device().location() {
            DeviceLocation::Cuda { gpu_id } => Some(gpu_id),
            _ => None,
        };
        let description = describe(&run, total_steps, gpu_id);
        let reporter = Reporter::open(&plan.log, start, stream.cursor().step, &description).map_err(|source| {
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
            first_step: 0,
        };
        session.first_step = session.stream.cursor().step;
        let terminal = session.reporter.terminal().clone();
        run.stop.respond_with(move |signal| {
            // The program may be killed before the end of the step, and would leave the bar.
            terminal.finish();
            terminal.line(&signal.acknowledgement("finishing the step, then saving"));
        });
        lines(plan, &description.device).iter().for_each(|line| session.reporter.terminal().line(line));
        session.run_json.update(|report| report.run = Some(description))?;
        session.log_start(resumed.as_ref(), resume_time, &moved)?;
        session.report_best();
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
        terminal.line(&format!("global batch: {}", plan.global_batch()));
        plan.steps(&self.stream).iter().for_each(|line| terminal.line(line));
        self.warn_without_rate();
        let earlier = self.run_json.describe_earlier_run().filter(|_| resumed.is_none());
        earlier.iter().chain(moved).for_each(|line| terminal.line(line));
        let planned = plan.checkpoints.iter().map(|plan| format!("will save: {plan}"));
        planned.for_each(|line| terminal.line(&line));
        if let Some(Resumed { run, dir, .. }) = resumed {
            let (epoch, iter, resume_time) = (run.epoch, run.step, resume_time.as_secs_f64());
            self.reporter.log_resume(&ResumeRecord { epoch, iter, resumed_from: dir.clone(), resume_time, time: None });
            for difference in self.checkpointer.changed_settings(run) {
                tracing::warn!("changed since this checkpoint: {difference}");
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

    /// Warns if all steps of this start have a learning rate of 0: it may end after the first step of the warm-up.
    fn warn_without_rate(&self) {
        let (plan, total_steps, first) = (self.run.plan, self.stream.total_steps(), self.stream.cursor().step);
        let ends = [plan.exit.iteration, plan.exit.iteration_this_run.map(|n| first + n)];
        let end = ends.into_iter().flatten().fold(total_steps, usize::min);
        let rate = |step| self.schedule.lr(step, total_steps, plan.optimizer.learning_rate);
        if first < end && (first..end).all(|step| rate(step) == 0.0) {
            let steps = counted(end - first, "step");
            tracing::warn!(
                "the learning rate is 0 in the {steps} until the run ends: the weights do not change. Raise exit_iteration"
            );
        }
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
            objective: plan.objective,
            grad_zeros: if plan.log.log_num_zeros_in_grad { ZeroGradCount::On } else { ZeroGradCount::Off },
            lr: self.schedule.lr(number - 1, self.stream.total_steps(), plan.optimizer.learning_rate),
            number,
            max_loss: self.max_loss(number),
            rounding: master_rounding(plan, number),
            dropout_key: derive_key(plan.seed, number as u64),
            rank: self.run.ranks.rank_info,
        };
        let (epoch, engine) = (step.epoch, self.run.engine);
        if let Some((fp8, layers)) =
            plan.fp8.as_ref().zip(engine.store().fp8()).filter(|(fp8, _)| fp8.has_stats(number))
        {
            layers.request_stats_of(|module, operand| fp8.measures(module, operand));
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

    /// Returns true if no step was trained since this start, which resumed an ended run.
    pub(super) fn has_only_resumed(&self) -> bool {
        self.first_step > 0 && self.stream.cursor().step == self.first_step
    }

    /// Updates run.json. A failed write only warns, because the run can still save checkpoints.
    pub(super) fn update_run_json(&mut self, change: impl FnOnce(&mut RunReport)) {
        self.run_json.update_or_warn(change);
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

/// Part of the seed of the rounding of master weights.
const MASTER_ROUNDING: u64 = 0xbf16;

/// Returns the rounding of the master weights in a step.
fn master_rounding(plan: &Plan, step: usize) -> MasterRounding {
    if !plan.optimizer.bf16_stochastic_round {
        return MasterRounding::Nearest;
    }
    MasterRounding::Stochastic { key: derive_key(derive_key(plan.seed, MASTER_ROUNDING), step as u64) }
}
