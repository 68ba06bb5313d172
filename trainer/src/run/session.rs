//! A run in progress: the stream of steps, the engine, and what is reported.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use candle_core::DeviceLocation;
use candlewick_model::TiledMlp;
use candlewick_ops::{GradPolicy, GradScaler, LossScaling, UpdateOutcome, derive_key, span};
use candlewick_parallel::ActivationCheckpointing;
use serde_json::json;

use crate::checkpoint::{CheckpointError, CheckpointPlan, Kind, Moment, Resumed, Tag};
use crate::data::{Cursor, Ledger, Step, Stream};
use crate::exit::ExitCode;
use crate::failpoint::failpoint;
use crate::metrics::{
    GpuMonitor, Memory, ModelShape, Pass, Recomputed, Reporter, ResumeRecord, RunJson, RunReport, SaveRecord, Start,
    StepRecord, Visibility, flops, model_flops_utilization, recomputed_flops,
};
use crate::recipe::OnNonfinite;
use crate::signals::Stop;

use super::background::Done;
use super::context::{Progress, Run};
use super::saves::{self, SavedCheckpoint, Saves};
use super::step::{self, AllStepsSkipped, Launched, Outcome, Update};

pub(super) struct Session<'a> {
    pub(super) run: Run<'a>,
    pub(super) run_json: &'a mut RunJson,
    pub(super) stream: Stream,
    pub(super) reporter: Reporter,
    pub(super) progress: Progress,
    pub(super) saves: Saves<'a>,
    scaler: GradScaler,
    /// Steps that the device was given and whose results were not read yet, oldest first.
    launched: VecDeque<Launched>,
    /// When the last step was done that was looked at.
    settled: Instant,
    monitor: Option<GpuMonitor>,
    started: Instant,
}

impl<'a> Session<'a> {
    /// Takes up the newest save if the plan says so, checks that all saves will fit on disk, and opens the reports.
    pub(super) fn begin(run: Run<'a>, run_json: &'a mut RunJson) -> Result<Self> {
        let Run { plan, prepared, .. } = run;
        let mut saves = Saves::new(run);
        let resuming = Instant::now();
        let resumed = saves.resume()?;
        let resume_time = resuming.elapsed();
        let state = resumed.as_ref().map(|resumed| &resumed.run);
        let cursor: Cursor = match state {
            Some(state) => serde_json::from_value(state.cursor.clone()).context("failed to read the data cursor")?,
            None => Cursor::default(),
        };
        let stream = Stream::new(prepared.train.clone(), plan.data.clone(), cursor)?;
        let total_steps = stream.total_steps();
        plan.schedule.check(total_steps, plan.optimizer.learning_rate)?;
        saves.preflight(&stream)?;
        let moved = saves.prepare_folders(&stream)?;

        let start = state.map_or(Start::Fresh, |state| Start::Resumed(state.step));
        let reporter = Reporter::open(&plan.log, start, total_steps).map_err(|source| {
            let path = plan.log.metrics_path.clone().unwrap_or_default();
            CheckpointError::Io { action: "open the metrics file", path, source }
        })?;
        let mut progress = state.map_or(Progress::default(), Progress::of);
        if !progress.scores.is_about(run.scores) {
            progress.scores = run.scores.clone();
        }
        let gpu_id = match run.engine.device().location() {
            DeviceLocation::Cuda { gpu_id } => Some(gpu_id),
            _ => None,
        };
        let policy = GradPolicy {
            max_norm: plan.optimizer.gradient_clipping,
            loss_scaling: plan.optimizer.loss_scaling,
            stop_on_nonfinite: plan.on_nonfinite == OnNonfinite::Stop,
        };
        let device = run.engine.device();
        let scaler = match &progress.scaler {
            Some(state) => GradScaler::from_state(policy, state, device)?,
            None => GradScaler::new(policy, stream.cursor().step - progress.n_skipped, device)?,
        };
        let mut session = Self {
            run,
            run_json,
            stream,
            reporter,
            progress,
            saves,
            scaler,
            launched: VecDeque::new(),
            settled: Instant::now(),
            monitor: gpu_id.and_then(GpuMonitor::open),
            started: Instant::now(),
        };
        session.announce(resumed.as_ref(), resume_time, &moved)?;
        if resumed.is_some() {
            session.save_missing()?;
        }
        Ok(session)
    }

    /// Says what was found out before the first step.
    fn announce(&mut self, resumed: Option<&Resumed>, resume_time: Duration, moved: &[String]) -> Result<()> {
        let (terminal, prepared) = (self.reporter.terminal().clone(), self.run.prepared);
        let notes: Vec<String> = prepared.notes.iter().chain(self.run.notes).cloned().collect();
        notes.iter().for_each(|note| terminal.line(note));
        if resumed.is_none_or(|resumed| resumed.run.step < self.stream.total_steps()) {
            terminal.line(&prepared.ledger.to_string());
        }
        let plan = self.run.plan;
        plan.steps(&self.stream).iter().for_each(|line| terminal.line(line));
        plan.parameters().iter().for_each(|text| terminal.line(&format!("parameters: {text}")));
        moved.iter().for_each(|line| terminal.line(line));
        let saves = plan.checkpoints.iter().map(|plan| format!("will save: {plan}"));
        saves.for_each(|line| terminal.line(&line));
        if let Some(Resumed { run, dir, .. }) = resumed {
            let (epoch, iter, resume_time) = (run.epoch, run.step, resume_time.as_secs_f64());
            self.reporter.resume(&ResumeRecord { epoch, iter, resumed_from: dir.clone(), resume_time });
            for difference in self.saves.new_settings(run) {
                terminal.line(&format!("changed since that save: {difference}"));
            }
            if run.step >= self.stream.total_steps() {
                terminal.line("there is nothing left to train: all steps are done");
            }
        }
        let ledger = json!(self.ledger());
        self.run_json.update(|report| {
            report.ledger = ledger;
            report.notes = notes;
            report.resumed_from = resumed.map(|resumed| resumed.dir.clone());
        })?;
        Ok(())
    }

    fn ledger(&self) -> Ledger {
        Ledger { seen: self.stream.cursor().seen, ..self.run.prepared.ledger.clone() }
    }

    /// Computes one step. On a GPU it only starts it and looks at the one before: the device is never idle, and the
    /// reports are one step late.
    pub(super) fn train_step(&mut self, step: Step, began: Instant) -> Result<()> {
        let plan = self.run.plan;
        let number = self.stream.cursor().step;
        let update = Update {
            plan: &plan.optimizer,
            lr: plan.schedule.lr(number - 1, self.stream.total_steps(), plan.optimizer.learning_rate),
            number,
            dropout_key: derive_key(plan.seed, number as u64),
            seat: self.run.ranks.seat,
        };
        self.launched.push_back(step::launch(self.run.engine, &self.scaler, step, &update, began)?);
        failpoint("step_computed", number);
        self.settle(1)
    }

    /// Looks at the steps that are done, and waits until no more than `n_waiting` are not.
    pub(super) fn settle(&mut self, n_waiting: usize) -> Result<()> {
        let Run { plan, prepared, .. } = self.run;
        while self.launched.len() > n_waiting || self.launched.front().is_some_and(Launched::is_done) {
            let Some(launched) = self.launched.pop_front() else { break };
            let (step, outcome) = launched.outcome(&prepared.train, plan.on_nonfinite, self.settled)?;
            self.settled = Instant::now();
            self.progress.n_skipped += usize::from(outcome.verdict.outcome != UpdateOutcome::Applied);
            self.progress.scaler = Some(outcome.verdict.next);
            self.report(&step, &outcome);
        }
        Ok(())
    }

    fn report(&mut self, step: &Step, outcome: &Outcome) {
        let verdict = &outcome.verdict;
        if verdict.outcome == UpdateOutcome::Overflowed {
            let (number, scale) = (outcome.number, verdict.next.loss_scale);
            let line =
                format!("skipped step {number}: its gradient overflowed; the loss scale is {scale} from here on");
            self.reporter.terminal().line(&line);
        }
        let (_, n_places) = self.run.ranks.seat;
        let (n_micros, n_rounds) = (step.micro_batches.len() as f64, step.n_micros(n_places) as f64);
        let n_ranks = self.run.plan.ranks.n_ranks();
        let (step_time, compute) = (outcome.elapsed.as_secs_f64(), outcome.compute.as_secs_f64());
        let tera_flops = self.flops(step, Work::All) / n_ranks as f64 / 1e12;
        let padded: usize = step.micro_batches.iter().map(|batch| batch.ids.len()).sum();
        let record = StepRecord {
            epoch: step.epoch,
            iter: outcome.number,
            lr: outcome.lr,
            loss: outcome.loss,
            auxiliary_losses: outcome.auxiliary.clone(),
            grad_norm: verdict.norm,
            loss_scale: (self.run.plan.optimizer.loss_scaling != LossScaling::NONE).then_some(verdict.next.loss_scale),
            seqlen: padded as f64 / n_micros,
            iter_time: compute / n_rounds,
            iter_tflops: tera_flops / compute,
            step_time,
            step_tflops: tera_flops / step_time,
            tokens: step.n_tokens() as u64,
            n_targets: step.n_targets as u64,
            tokens_per_second: step.n_tokens() as f64 / step_time,
            mfu: self
                .run
                .peak
                .map(|peak| model_flops_utilization(self.flops(step, Work::Useful) / n_ranks as f64, step_time, peak)),
            memory: Memory::now(),
            gpu_memory: self.monitor.as_ref().map(GpuMonitor::memory),
        };
        self.reporter.step(&record);
        let (ledger, n_skipped) = (json!(self.ledger()), self.progress.n_skipped);
        self.remember(|report| {
            report.metrics["step"] = json!(record);
            report.ledger = ledger;
            report.skipped_steps = n_skipped;
        });
    }

    /// The operations of a step, on all ranks.
    fn flops(&self, step: &Step, work: Work) -> f64 {
        let shape = ModelShape::of(self.run.engine.model());
        let (visibility, again) = match work {
            Work::All => (Visibility::Full, recomputed(self.run.engine.checkpointing(), self.run.engine.tiled_mlp())),
            Work::Useful => (Visibility::Causal, Vec::new()),
        };
        let pass = if self.run.plan.model.adapter.is_some() { Pass::ADAPTER } else { Pass::TRAIN };
        let of_batch = |ends: &[usize]| {
            let lengths: Vec<usize> = ends.windows(2).map(|pair| pair[1] - pair[0]).collect();
            flops(&shape, pass, visibility, &lengths) + recomputed_flops(&shape, &again, &lengths)
        };
        step.micro_batches.iter().map(|batch| of_batch(&batch.cu_seqlens)).sum()
    }

    /// A report that cannot be written must not end a run that could still save.
    pub(super) fn remember(&mut self, change: impl FnOnce(&mut RunReport)) {
        if let Err(error) = self.run_json.update(change) {
            tracing::warn!("failed to write run.json: {error}");
        }
    }

    /// Fails if a run that did everything else could not write all of its metrics.
    pub(super) fn whole_metrics(&mut self, code: ExitCode) -> Result<()> {
        let failure = self.reporter.take_failure().filter(|_| code == ExitCode::Ok);
        let path = self.run.plan.log.metrics_path.clone().unwrap_or_default();
        failure
            .map_or(Ok(()), |source| Err(CheckpointError::Io { action: "write all metrics to", path, source }.into()))
    }

    /// Whether anybody was asked to stop, told to all ranks alike.
    pub(super) fn asked_to_stop(&self) -> Result<Option<Stop>> {
        let Run { plan, ranks, stop, .. } = self.run;
        ranks.agree(stop.poll(), plan.exit.kill_switch_path.as_deref())
    }

    /// Reports the save that was written in the background, if it is done; with `wait` as soon as it is.
    pub(super) fn settle_saves(&mut self, wait: bool) -> Result<()> {
        if let Some(Done { tag, dir, removed, save_time }) = self.saves.finish_background(wait)? {
            let (epoch, iter, save_time) = (tag.epoch, tag.step, save_time.as_secs_f64());
            self.reporter.save(&SaveRecord { epoch, iter, saved: dir, save_time });
            self.log_removed(&removed);
        }
        Ok(())
    }

    fn log_removed(&self, removed: &[PathBuf]) {
        removed
            .iter()
            .for_each(|dir| self.reporter.terminal().line(&format!("deleted {} (save_total_limit)", dir.display())));
    }

    /// Makes every save that is due after this step.
    pub(super) fn save_due(&mut self) -> Result<()> {
        self.settle_saves(false)?;
        let moment = self.moment();
        if moment.end_of_training {
            self.refuse_untrained()?;
        }
        if !self.run.plan.checkpoints.iter().any(|checkpoint| checkpoint.due(moment)) {
            return Ok(());
        }
        let is_trained = self.is_trained()?;
        self.save_all(|plan| plan.due(moment) && (is_trained || plan.kind == Kind::Sharded)).map(drop)
    }

    /// Tells whether a step was applied, or none was due yet.
    fn is_trained(&mut self) -> Result<bool> {
        self.settle(0)?;
        let n_steps = self.stream.cursor().step;
        Ok(n_steps == 0 || self.progress.n_skipped < n_steps)
    }

    /// Fails if every step so far was skipped: the weights are those of the start.
    fn refuse_untrained(&mut self) -> Result<()> {
        let n_steps = self.stream.cursor().step;
        if self.is_trained()? { Ok(()) } else { Err(AllStepsSkipped { n_steps }.into()) }
    }

    pub(super) fn moment(&self) -> Moment {
        let Cursor { step, epoch, step_in_epoch, .. } = *self.stream.cursor();
        let finished_epoch = (step_in_epoch == 0).then_some(epoch);
        Moment { step, finished_epoch, end_of_training: step >= self.stream.total_steps() }
    }

    /// Makes the saves that this step should have and has not: of a run that died between two of them.
    fn save_missing(&mut self) -> Result<()> {
        let Cursor { step, epoch, .. } = *self.stream.cursor();
        let (moment, began) = (self.moment(), self.run.began);
        let is_missing = |plan: &CheckpointPlan| !saves::is_of_run(&plan.dir(Tag { step, epoch }), began);
        // The first rank looks for all: by the time that another does, a save may be there.
        let found = self.run.plan.checkpoints.iter().map(|plan| u8::from(plan.due(moment) && is_missing(plan)));
        let found = self.run.ranks.process.exchange(Ok(found.collect()))?.swap_remove(0);
        let checkpoints = self.run.plan.checkpoints.iter().zip(found);
        let missing: Vec<&CheckpointPlan> = checkpoints.filter(|(_, is)| *is == 1).map(|(plan, _)| plan).collect();
        self.save_all(|plan| missing.contains(&plan)).map(drop)
    }

    /// Saves by every checkpoint of the plan if the run has ended and none of them was due: no training is thrown away.
    pub(super) fn save_unsaved(&mut self) -> Result<()> {
        if self.saves.newest_step().is_some() || self.run.plan.checkpoints.is_empty() || self.stream.cursor().step == 0
        {
            return Ok(());
        }
        self.refuse_untrained()?;
        self.reporter.terminal().line("no checkpoint was due in this run: the last step is saved");
        self.save_all(|_| true)?;
        self.settle_saves(true)
    }

    /// Saves everything that a run which ends early is worth: what a later start needs, and what the end would export.
    pub(super) fn save_early_end(&mut self) -> Result<usize> {
        self.refuse_untrained()?;
        let n_saves = self.save_all(|plan| plan.kind == Kind::Sharded || plan.save_end_of_training)?;
        self.settle_saves(true)?;
        Ok(n_saves)
    }

    /// Saves what a later start needs; without a checkpoint for that, the weights at least.
    pub(super) fn save_to_resume(&mut self) -> Result<Stopped> {
        let n_saves = self.save_all(|plan| plan.kind == Kind::Sharded)?;
        self.settle_saves(true)?;
        if n_saves == 0 {
            return Ok(if self.save_all(|_| true)? == 0 { Stopped::Lost } else { Stopped::Exported });
        }
        let resumes = self.run.plan.checkpoints.iter().any(|plan| plan.auto_resume);
        Ok(if resumes { Stopped::Resumable } else { Stopped::Saved })
    }

    /// Makes the saves that are `wanted` and counts them, those that were there already included.
    fn save_all(&mut self, wanted: impl Fn(&CheckpointPlan) -> bool) -> Result<usize> {
        let mut n_saves = 0;
        for checkpoint in self.run.plan.checkpoints.iter().filter(|checkpoint| wanted(checkpoint)) {
            self.settle(0)?;
            self.settle_saves(true)?;
            let _span = span("save", "");
            let before = self.progress.before + self.started.elapsed();
            let progress = Progress { before, ..self.progress.clone() };
            let started = Instant::now();
            if let saves::Outcome::Saved(SavedCheckpoint { dir: saved, removed }) =
                self.saves.save(checkpoint, &self.stream, progress)?
            {
                let Cursor { epoch, step: iter, .. } = *self.stream.cursor();
                let save_time = started.elapsed().as_secs_f64();
                self.reporter.save(&SaveRecord { epoch, iter, saved, save_time });
                self.log_removed(&removed);
            }
            n_saves += 1;
        }
        Ok(n_saves)
    }
}

/// Which operations are counted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// What is computed: attention to all tokens, as ArcticTraining counts it, and forwards that are computed again.
    All,
    /// What the model needs: causal attention, each forward once.
    Useful,
}

/// Returns the parts of each layer that backward computes again: tiled MLPs once more than their layer.
fn recomputed(kept: &[ActivationCheckpointing], tiled_mlp: TiledMlp) -> Vec<Recomputed> {
    let of_layer = |kept: &ActivationCheckpointing| {
        let layer = *kept != ActivationCheckpointing::None;
        let attention = layer && *kept != ActivationCheckpointing::Selective;
        Recomputed { layer, attention, tiled_mlp: tiled_mlp == TiledMlp::On }
    };
    kept.iter().map(of_layer).collect()
}

/// What is left of a run that was asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    /// The same command goes on with it.
    Resumable,
    /// It is saved, but the recipe does not resume.
    Saved,
    /// Its weights.
    Exported,
    /// Nothing: the recipe has no checkpoint.
    Lost,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_without_a_tape_and_tiled_mlps_are_computed_again() {
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
