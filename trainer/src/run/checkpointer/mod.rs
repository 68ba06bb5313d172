//! The checkpoints of a run: sharded ones to resume from, and exported weights for transformers and PEFT.

mod export;
mod preflight;
mod resumable;
mod resume;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candlewick_model::BaseModelRecord;
use candlewick_model::checkpoint::{CarriedTensors, Checkpoint};
use candlewick_text::quantity::counted;
use serde_json::{Value, json};

use crate::checkpoint::{
    CheckpointError, CheckpointFormat, CheckpointPlan, FROZEN_WEIGHTS, Fingerprint, FinishedSave, Moment,
    ReservedSpace, Resumed, RunOrigin, RunState, Scores, Tag, WrittenCheckpoint, move_aside, refuse_occupied,
    remove_all, save,
};
use crate::data::TrainSteps;
use crate::plan::{Plan, WeightInit};

use super::async_save::{AsyncSave, FinishedAsyncSave};
use super::context::{Progress, TrainingRun};
use super::state::EngineState;

pub(super) use resumable::{run_id, state_to_resume};

pub(super) struct Checkpointer<'a> {
    run: TrainingRun<'a>,
    fingerprint: Fingerprint,
    settings: Fingerprint,
    /// The identity of an adapter's frozen base weights.
    base: Option<BaseModelRecord>,
    /// The carried tensors of a multimodal model whose own weights are trained.
    carried: Option<CarriedTensors>,
    /// The newest checkpoint of each entry of the plan: its step and its folder.
    newest: HashMap<(CheckpointFormat, PathBuf), (usize, PathBuf)>,
    /// The scores in the checkpoint that the run resumed from. Their metric may be another one than the plan's.
    resumed_scores: Scores,
    /// The last checkpoint of `resume_from_checkpoint` that the run continued from.
    started_from: RunOrigin,
    /// The checkpoint that is being written in the background.
    async_save_in_progress: Option<AsyncSave>,
    /// The disk space of the checkpoint of a stopped run, on the first rank.
    reserved: Option<ReservedSpace>,
}

/// The result of saving a checkpoint.
pub(super) enum SaveOutcome {
    /// The checkpoint already exists.
    AlreadySaved,
    /// The checkpoint is on disk.
    Saved(SavedCheckpoint),
    /// The checkpoint is being written in the background.
    InBackground,
}

/// A checkpoint on disk.
pub(super) struct SavedCheckpoint {
    pub(super) dir: PathBuf,
    /// Older checkpoints that retention deleted.
    pub(super) removed: Vec<PathBuf>,
}

impl<'a> Checkpointer<'a> {
    pub(super) fn new(run: TrainingRun<'a>) -> Result<Self> {
        let (base, carried) = (base_record(run), carried_tensors(run)?);
        let frozen = base.as_ref().map(|base| base.weights.clone());
        let fingerprint = fingerprint(run.plan, frozen.or_else(|| Some(carried.as_ref()?.identity())));
        Ok(Self {
            run,
            fingerprint,
            settings: settings(run.plan),
            base,
            carried,
            newest: HashMap::new(),
            resumed_scores: Scores::default(),
            started_from: RunOrigin::Beginning,
            async_save_in_progress: None,
            reserved: None,
        })
    }

    /// Loads the newest complete checkpoint that this run wrote or resumed from, if there is one.
    pub(super) fn load_newest(&mut self) -> Result<Option<Resumed>> {
        let Some((output_dir, _)) = self.newest_sharded_entry() else { return Ok(None) };
        let is_entry =
            |plan: &&CheckpointPlan| plan.format == CheckpointFormat::Sharded && plan.output_dir == output_dir;
        let plan = self.run.plan;
        let entry = plan.checkpoints.iter().chain(&plan.stop_checkpoint).find(is_entry);
        entry.map_or(Ok(None), |checkpoint| self.load(checkpoint))
    }

    /// Returns the newest `sharded` checkpoint that this run wrote or resumed from.
    pub(super) fn newest_sharded(&self) -> Option<&Path> {
        self.newest_sharded_entry().map(|(_, dir)| dir)
    }

    /// Returns the folder of the entry with the newest `sharded` checkpoint, and the checkpoint. Entries of one step are in
    /// the order of their folders, equal on all ranks.
    fn newest_sharded_entry(&self) -> Option<(&Path, &Path)> {
        let sharded = self.newest.iter().filter(|((format, _), _)| *format == CheckpointFormat::Sharded);
        let newest = sharded.max_by_key(|((_, output_dir), (step, _))| (*step, output_dir));
        newest.map(|((_, output_dir), (_, dir))| (output_dir.as_path(), dir.as_path()))
    }

    /// Lists the settings that differ from the checkpoint's, one line for each key.
    pub(super) fn changed_settings(&self, run: &RunState) -> Vec<String> {
        // Checkpoints of earlier versions do not have the rows of a micro-batch.
        let is_unknown =
            |line: &&String| line.starts_with(MICRO_BATCH_SIZE) && run.settings.get(MICRO_BATCH_SIZE).is_none();
        let differences = run.settings.differences(&self.settings);
        differences.iter().filter(|line| !is_unknown(line)).map(|line| with_recipe_key(line)).collect()
    }

    /// Moves the checkpoints of other runs aside. Fails if an entry of another origin has the name of a checkpoint that
    /// this run will write.
    ///
    /// Returns one line for each changed folder.
    pub(super) fn prepare_folders(&self, stream: &TrainSteps) -> Result<Vec<String>> {
        let (run_start, done, total_steps) = (self.run.run_id.run, stream.cursor().step, stream.total_steps());
        let (ends, exit) = (stream.epoch_ends(), &self.run.plan.exit);
        let ends_early = [exit.iteration, exit.iteration_this_run.map(|n| done + n)];
        let mut lines = Vec::new();
        self.run.ranks.process.on_first_rank(|| {
            for plan in &self.run.plan.checkpoints {
                self.refuse_in_use(plan)?;
                // Keep sharded checkpoints up to the current step: the run may have resumed from another run's.
                let since = if plan.format == CheckpointFormat::Sharded { done } else { 0 };
                if let Some((folder, n)) = move_aside(plan.format, &plan.output_dir, run_start, since)? {
                    lines.push(format!("moved {} of other runs to {}", counted(n, "checkpoint"), folder.display()));
                }
                let is_due =
                    |step| plan.is_due(Moment::of(step, total_steps, ends)) || ends_early.contains(&Some(step));
                let is_due = |step| step > done && is_due(step);
                refuse_occupied(plan.format, &plan.output_dir, run_start, is_due)?;
            }
            Ok(())
        })?;
        Ok(lines)
    }

    /// Fails if the model, adapter or tokenizer in use is one of the checkpoints of `plan`.
    ///
    /// The plan checks the names in the recipe; this checks the folders that they resolved to.
    fn refuse_in_use(&self, plan: &CheckpointPlan) -> Result<()> {
        let adapter = self.run.plan.model.adapter_folder.as_deref();
        for folder in self.folders().into_iter().chain(adapter) {
            if let Some(dir) = plan.format.checkpoint_in_use(&plan.output_dir, folder) {
                return Err(CheckpointError::Occupied { dir, what: "in use by this run" }.into());
            }
        }
        Ok(())
    }

    /// Returns the step of the newest checkpoint that this run wrote or resumed from, without that of a stopped run.
    pub(super) fn newest_step(&self) -> Option<usize> {
        let stop = self.run.plan.stop_checkpoint.as_ref().map(|plan| &plan.output_dir);
        let newest = self.newest.iter().filter(|((_, output_dir), _)| Some(output_dir) != stop);
        newest.map(|(_, (step, _))| *step).max()
    }

    /// Returns true if a stopped run writes the checkpoint of the plan for that: no entry is `sharded`.
    pub(super) fn writes_stop_checkpoint(&self) -> bool {
        !self.run.plan.checkpoints.iter().any(|plan| plan.format == CheckpointFormat::Sharded)
    }

    /// Returns true if the run continues from the checkpoint of a stopped run.
    pub(super) fn has_stop_checkpoint(&self) -> bool {
        let stop = self.run.plan.stop_checkpoint.as_ref();
        stop.is_some_and(|plan| self.newest.contains_key(&(plan.format, plan.output_dir.clone())))
    }

    /// Deletes the checkpoint of an earlier process of this run that was stopped, if nothing can be lost: the last step of the
    /// run is saved, or a checkpoint that is as new can be resumed. All ranks call this.
    pub(super) fn remove_stop_checkpoint(&self, Moment { step, end_of_training, .. }: Moment) -> Result<()> {
        let plan = self.run.plan;
        let Some(stop) = &plan.stop_checkpoint else { return Ok(()) };
        let is_complete = end_of_training && plan.checkpoints.iter().any(|entry| self.is_saved(entry, step));
        let newest =
            |entry: &CheckpointPlan| self.newest.get(&(entry.format, entry.output_dir.clone())).map(|(step, _)| *step);
        let resumable = plan.checkpoints.iter().filter(|entry| entry.auto_resume).filter_map(newest).max();
        if !is_complete && resumable.is_none_or(|step| Some(step) < newest(stop)) {
            return Ok(());
        }
        let run_start = self.run.run_id.run;
        self.run.ranks.process.on_first_rank(|| Ok(remove_all(stop, run_start)?)).map(drop)
    }

    /// Returns true if this step is the newest checkpoint of an entry of the plan.
    pub(super) fn is_saved(&self, checkpoint: &CheckpointPlan, step: usize) -> bool {
        let place = (checkpoint.format, checkpoint.output_dir.clone());
        self.newest.get(&place).is_some_and(|(newest, _)| *newest == step)
    }

    /// Returns the newest folder of each entry of the plan that exports weights.
    pub(super) fn exported(&self) -> impl Iterator<Item = &Path> {
        let newest = self.newest.iter().filter(|((format, _), _)| *format == CheckpointFormat::HuggingFace);
        newest.map(|(_, (_, dir))| dir.as_path())
    }

    /// Returns the asynchronous checkpoint if it is finished. With `wait`, waits for it.
    pub(super) fn finish_async_save(&mut self, wait: bool) -> Result<Option<FinishedAsyncSave>> {
        let done = self.async_save_in_progress.take_if(|save| wait || save.is_finished());
        done.map(AsyncSave::finish).transpose()
    }

    /// Writes a checkpoint, or starts to. No other one may be in progress.
    pub(super) fn save(
        &mut self,
        checkpoint: &CheckpointPlan,
        stream: &TrainSteps,
        progress: Progress,
    ) -> Result<SaveOutcome> {
        let home = checkpoint.output_dir.canonicalize().ok();
        let state = RunState { home, ..self.run_state(stream, progress) };
        if self.is_saved(checkpoint, state.step) {
            return Ok(SaveOutcome::AlreadySaved);
        }
        if self.run.plan.stop_checkpoint.as_ref() == Some(checkpoint) {
            // The checkpoint takes the space.
            self.reserved = None;
        }
        let place = (checkpoint.format, checkpoint.output_dir.clone());
        let newest = (state.step, checkpoint.dir(state.tag()));
        let outcome = match checkpoint.format {
            CheckpointFormat::Sharded if checkpoint.async_save => {
                let engine = EngineState::of(self.run.engine)?;
                self.async_save_in_progress =
                    Some(AsyncSave::begin(checkpoint, state, &engine, self.run.ranks.background.clone())?);
                SaveOutcome::InBackground
            }
            CheckpointFormat::Sharded => {
                let WrittenCheckpoint { dir, removed, .. } =
                    save(checkpoint, &state, &EngineState::of(self.run.engine)?, &self.run.ranks.process)?;
                SaveOutcome::Saved(SavedCheckpoint { dir, removed })
            }
            CheckpointFormat::HuggingFace => SaveOutcome::Saved(self.export(checkpoint, &state)?),
        };
        self.newest.insert(place, newest);
        Ok(outcome)
    }

    /// Completes the newest save of each entry up to this step, in case a process was killed before its end. Returns the tag
    /// of each, and the deleted folders on the first rank. All ranks call this.
    ///
    /// Without a value of the plan's metric, the stored scores select the best checkpoint, which is not deleted.
    pub(super) fn finish_saves(
        &mut self,
        stream: &TrainSteps,
        progress: Progress,
    ) -> Result<Vec<(Tag, SavedCheckpoint)>> {
        let (mut state, plans) = (self.run_state(stream, progress), &self.run.plan.checkpoints);
        if state.scores.values.is_empty() {
            state.scores.clone_from(&self.resumed_scores);
        }
        let mut removed = vec![Vec::new(); plans.len()];
        let tags = self.run.ranks.process.broadcast_from_first(|| {
            let finished: Vec<Option<FinishedSave>> =
                plans.iter().map(|plan| plan.finish_newest_save(&state)).collect::<Result<_, _>>()?;
            let tags: Vec<Option<Tag>> = finished.iter().map(|save| save.as_ref().map(|save| save.tag)).collect();
            removed = finished.into_iter().map(|save| save.map(|save| save.removed).unwrap_or_default()).collect();
            Ok(serde_json::to_vec(&tags)?)
        })?;
        let tags: Vec<Option<Tag>> = serde_json::from_slice(&tags).context("failed to read the first rank's tags")?;
        let mut saves = Vec::new();
        for ((plan, removed), tag) in plans.iter().zip(removed).zip(tags) {
            let Some(tag) = tag else { continue };
            let dir = plan.dir(tag);
            self.newest.insert((plan.format, plan.output_dir.clone()), (tag.step, dir.clone()));
            saves.push((tag, SavedCheckpoint { dir, removed }));
        }
        Ok(saves)
    }

    fn run_state(&self, stream: &TrainSteps, progress: Progress) -> RunState {
        let cursor = stream.cursor();
        RunState {
            step: cursor.step,
            epoch: cursor.epoch,
            accumulation_phase: 0,
            cursor: json!(cursor),
            rng: Value::Null,
            tokens: cursor.seen.read.tokens,
            target_tokens: cursor.seen.supervised,
            elapsed_s: progress.before.as_secs_f64(),
            scores: progress.scores,
            evaluated: progress.evaluated,
            early_stopping: progress.early_stopping,
            loss_history: progress.loss_history,
            n_skipped: progress.n_skipped,
            scaler: progress.scaler,
            token_stats: json!(cursor.seen),
            run_start: self.run.run_id.run,
            date: Some(self.run.run_id.date),
            home: None,
            output_dir: self.run.plan.log.output_dir.as_ref().and_then(|folder| folder.canonicalize().ok()),
            fingerprint: self.fingerprint.clone(),
            settings: self.settings.clone(),
            slower_modules: self.run.slower_modules.map(<[String]>::to_vec),
            started_from: self.started_from,
        }
    }
}

/// Lets an asynchronous save finish if the run fails.
impl Drop for Checkpointer<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.finish_async_save(true) {
            tracing::warn!("{error:#}");
        }
    }
}

/// Identifies the base weights of an adapter, if they were loaded from a checkpoint.
fn base_record(run: TrainingRun) -> Option<BaseModelRecord> {
    let model = &run.plan.model;
    let folder = run.assets.model_folder.as_deref().filter(|_| model.init == WeightInit::Load)?;
    let name = model.adapter.as_ref()?.base_model().unwrap_or_default();
    let weights = Checkpoint::of_model(folder, model.config.as_ref()?).ok()?.identity();
    Some(BaseModelRecord { model: name.to_owned(), weights })
}

/// Returns the carried tensors of a multimodal model whose own weights are trained.
fn carried_tensors(run: TrainingRun) -> Result<Option<CarriedTensors>> {
    let model = &run.plan.model;
    match (run.assets.model_folder.as_deref(), &model.config) {
        (Some(folder), Some(config)) if model.init == WeightInit::Load && model.adapter.is_none() => {
            Ok(CarriedTensors::open(folder, config)?)
        }
        _ => Ok(None),
    }
}

/// Returns the settings that a resumed run must share with its checkpoint. The data cursor guards the settings that
/// determine the data order.
///
/// `frozen` is the hash of weights that are in no checkpoint: the base of an adapter, or the carried tensors of a multimodal
/// model. Their folder does not count.
fn fingerprint(plan: &Plan, frozen: Option<String>) -> Fingerprint {
    let config = plan.model.config.as_ref().map(|config| config.to_json());
    let mut adapter = plan.model.adapter.as_ref().map(|adapter| adapter.to_json());
    if let Some(Value::Object(adapter)) = &mut adapter {
        adapter.remove("base_model_name_or_path");
    }
    let model = json!({"config": config, "dtype": plan.model.dtype, "peft_config": adapter, (FROZEN_WEIGHTS): frozen});
    Fingerprint::of(&json!({"model": model}))
}

/// The key of the rows of a micro-batch, in the settings that may change.
const MICRO_BATCH_SIZE: &str = "micro_batch_size";

/// Returns the settings that may change when a run resumes, such as the learning rate. Changes are logged.
pub(super) fn settings(plan: &Plan) -> Fingerprint {
    let (optimizer, scheduler, horizon) = (&plan.optimizer, &plan.schedule, plan.data.horizon);
    let model = plan.model.name_or_path.as_deref();
    let mut settings = json!({
        "optimizer": optimizer, "scheduler": scheduler, "horizon": horizon, "seed": plan.seed, "model": model,
        (MICRO_BATCH_SIZE): plan.data.micro_batch_size,
    });
    if plan.label_smoothing_factor > 0.0 {
        settings["label_smoothing_factor"] = json!(plan.label_smoothing_factor);
    }
    if let Some(moe) = &plan.moe {
        settings["moe"] = json!(moe);
    }
    if let Some(fp8) = &plan.fp8 {
        settings["precision"] = json!(fp8);
    }
    if plan.model.fp32_residual_connection {
        settings["fp32_residual_connection"] = json!(true);
    }
    if let Some(storage) = plan.model.quantize_base {
        settings["quantize_base"] = json!(storage);
    }
    if let Some(mtp) = &plan.model.mtp {
        settings["mtp"] = json!(mtp);
    }
    Fingerprint::of(&settings)
}

/// Replaces the name of a setting at the start of a line by the key of the recipe.
fn with_recipe_key(line: &str) -> String {
    const KEYS: [(&str, &str); 6] = [
        ("horizon.epochs:", "epochs:"),
        ("horizon.steps:", "train_iters:"),
        ("horizon.tokens:", "train_tokens:"),
        ("model:", "model.name_or_path:"),
        ("fp32_residual_connection:", "model.fp32_residual_connection:"),
        ("quantize_base:", "model.quantize_base:"),
    ];
    let renamed = KEYS.iter().find_map(|(name, key)| Some(format!("{key}{}", line.strip_prefix(name)?)));
    renamed.unwrap_or_else(|| line.to_owned())
}
