//! A run in progress: the stream of steps, the engine, and what is reported.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use candlewick_parallel::Engine;
use evaluator::held_out::{HeldOut, held_out_loss};
use serde_json::json;

use crate::checkpoint::{BestEval, CheckpointError, CheckpointPlan, Fingerprint, Kind, Moment, Tag};
use crate::data::{Cursor, EvalStream, Prepared, Step, Stream};
use crate::metrics::{EvalRecord, Memory, ModelShape, Pass, Reporter, RunJson, Start, StepRecord, Visibility, flops};
use crate::plan::{Activations, Plan};

use super::Assets;
use super::saves::Saves;
use super::step::{self, Outcome, Update};

pub(super) struct Session<'a> {
    pub(super) plan: &'a Plan,
    pub(super) assets: &'a Assets,
    pub(super) engine: &'a Engine,
    pub(super) prepared: &'a Prepared,
    pub(super) run_json: &'a mut RunJson,
    pub(super) stream: Stream,
    pub(super) reporter: Reporter,
    pub(super) best_eval: Option<BestEval>,
    saves: Saves<'a>,
    before: Duration,
    began: Instant,
}

impl<'a> Session<'a> {
    /// Takes up the newest save if the plan says so, checks that all saves will fit on disk, and opens the reports.
    pub(super) fn begin(
        plan: &'a Plan,
        assets: &'a Assets,
        engine: &'a Engine,
        prepared: &'a Prepared,
        run_json: &'a mut RunJson,
    ) -> Result<Self> {
        let mut saves = Saves::new(plan, assets, engine, fingerprint(plan));
        let resumed = saves.resume()?;
        let run = resumed.as_ref().map(|resumed| &resumed.run);
        let cursor: Cursor = match run {
            Some(run) => serde_json::from_value(run.cursor.clone()).context("failed to read the data cursor")?,
            None => Cursor::default(),
        };
        let stream = Stream::new(prepared.train.clone(), plan.data.clone(), cursor)?;
        let total_steps = stream.total_steps();
        plan.schedule.check(total_steps, plan.optimizer.learning_rate)?;
        saves.preflight(&stream)?;

        let start = run.map_or(Start::Fresh, |run| Start::Resumed(run.step));
        let reporter = Reporter::open(&plan.log, start, total_steps).map_err(|source| {
            let path = plan.log.metrics_path.clone().unwrap_or_default();
            CheckpointError::Io { action: "open the metrics file", path, source }
        })?;
        reporter.terminal().line(&format!("{}", prepared.ledger));
        run_json.update(|report| {
            report.ledger = json!(prepared.ledger);
            report.resumed_from = resumed.as_ref().map(|resumed| resumed.dir.clone());
        })?;
        if let Some(resumed) = &resumed {
            reporter.terminal().line(&format!(
                "resumed after step {} from {}",
                resumed.run.step,
                resumed.dir.display()
            ));
        }
        let before = Duration::from_secs_f64(run.map_or(0.0, |run| run.elapsed_s));
        let best_eval = run.and_then(|run| run.best_eval);
        let began = Instant::now();
        Ok(Self { plan, assets, engine, prepared, run_json, stream, reporter, best_eval, saves, before, began })
    }

    /// Computes one step.
    pub(super) fn train_step(&mut self, step: &Step) -> Result<Outcome> {
        let number = self.stream.cursor().step;
        step::take(self.engine, &self.prepared.train, step, &self.update(number))
    }

    fn update(&self, number: usize) -> Update<'a> {
        Update {
            plan: &self.plan.optimizer,
            on_nonfinite: self.plan.on_nonfinite,
            lr: self.plan.schedule.lr(number - 1, self.stream.total_steps(), self.plan.optimizer.learning_rate),
            number,
        }
    }

    /// Reports a step that took `elapsed`.
    pub(super) fn report(&mut self, step: &Step, outcome: &Outcome, elapsed: Duration) {
        let number = self.stream.cursor().step;
        let n_micro = step.micro_batches.len() as f64;
        let (step_time, compute) = (elapsed.as_secs_f64(), outcome.compute.as_secs_f64());
        let tera_flops = self.flops(step) / 1e12;
        let padded: usize = step.micro_batches.iter().map(|batch| batch.ids.len()).sum();
        let record = StepRecord {
            epoch: step.epoch,
            iter: number,
            lr: self.update(number).lr,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            seqlen: padded as f64 / n_micro,
            iter_time: compute / n_micro,
            iter_tflops: tera_flops / compute,
            step_time,
            step_tflops: tera_flops / step_time,
            tokens: step.n_tokens() as u64,
            n_targets: step.n_targets as u64,
            tokens_per_second: step.n_tokens() as f64 / step_time,
            mfu: None,
            memory: Memory::now(),
        };
        self.reporter.step(&record);
        self.remember("step", json!(record));
    }

    fn flops(&self, step: &Step) -> f64 {
        let config = self.engine.model().config();
        let shape = ModelShape {
            n_layers: config.n_layers(),
            hidden: config.hidden_size(),
            intermediate: config.intermediate_size(),
            n_heads: config.n_heads(),
            n_kv_heads: config.n_kv_heads(),
            head_dim: config.head_dim(),
            vocab: config.vocab_size(),
        };
        let pass = match (&self.plan.model.adapter, self.plan.model.activations) {
            (None, Activations::Keep) => Pass::TRAIN,
            (None, _) => Pass::TRAIN_RECOMPUTE,
            (Some(_), Activations::Keep) => Pass::ADAPTER,
            (Some(_), _) => Pass::ADAPTER_RECOMPUTE,
        };
        let lengths = |ends: &[usize]| ends.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>();
        let batches = step.micro_batches.iter();
        batches.map(|batch| flops(&shape, pass, Visibility::Full, &lengths(&batch.cu_seqlens))).sum()
    }

    /// Evaluates on the held-out data, if there are any.
    pub(super) fn evaluate(&mut self) -> Result<()> {
        let Some(eval) = &self.prepared.eval else { return Ok(()) };
        let began = Instant::now();
        let engine = self.engine;
        let batches = EvalStream::new(eval.clone(), &self.plan.data)
            .map(|batch| Ok((step::micro(&batch, engine)?, batch.n_targets)));
        let HeldOut { loss, n_targets } = held_out_loss(engine, batches)?;
        let cursor = self.stream.cursor();
        let (epoch, iter, eval_time) = (cursor.epoch, cursor.step, began.elapsed().as_secs_f64());
        let record = EvalRecord { epoch, iter, loss, n_targets: n_targets as u64, eval_time };
        self.reporter.eval(&record);
        if loss.is_finite() && self.best_eval.is_none_or(|best| loss < best.loss) {
            self.best_eval = Some(BestEval { step: iter, loss });
        }
        self.remember("eval", json!(record));
        Ok(())
    }

    fn remember(&mut self, name: &str, value: serde_json::Value) {
        let written = self.run_json.update(|report| report.metrics[name] = value);
        if let Err(error) = written {
            tracing::warn!("failed to write run.json: {error}");
        }
    }

    /// Makes every save that is due.
    pub(super) fn save_due(&mut self, moment: Moment) -> Result<()> {
        for checkpoint in self.plan.checkpoints.iter().filter(|checkpoint| checkpoint.due(moment)) {
            self.save(checkpoint)?;
        }
        Ok(())
    }

    /// Makes the saves of the end that are not there: of a run that died between its last step and one of them.
    pub(super) fn save_missing(&mut self) -> Result<()> {
        let Cursor { step, epoch, .. } = *self.stream.cursor();
        let plans = self.plan.checkpoints.iter();
        for checkpoint in plans.filter(|plan| plan.save_end_of_training && !plan.dir(Tag { step, epoch }).exists()) {
            self.save(checkpoint)?;
        }
        Ok(())
    }

    /// Saves what a later start needs, unless this step is saved already. Tells whether there is such a save.
    pub(super) fn save_to_resume(&mut self) -> Result<bool> {
        let mut is_saved = false;
        for checkpoint in self.plan.checkpoints.iter().filter(|checkpoint| checkpoint.kind == Kind::Sharded) {
            self.save(checkpoint)?;
            is_saved = true;
        }
        Ok(is_saved)
    }

    fn save(&mut self, checkpoint: &CheckpointPlan) -> Result<()> {
        let elapsed = self.before + self.began.elapsed();
        if let Some(line) = self.saves.save(checkpoint, &self.stream, self.best_eval, elapsed)? {
            self.reporter.terminal().line(&line);
        }
        Ok(())
    }
}

/// What must be the same for a run to go on from a save. The data cursor guards what decides the order of the data.
fn fingerprint(plan: &Plan) -> Fingerprint {
    let config = plan.model.config.as_ref().map(|config| config.to_json());
    let adapter = plan.model.adapter.as_ref().map(|adapter| adapter.to_json());
    Fingerprint::of(&json!({"model": {"config": config, "dtype": plan.model.dtype, "peft_config": adapter}}))
}
