//! What a run writes: resumable saves, and folders of weights that transformers or peft load.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use candlewick_model::checkpoint::{AuxiliaryFiles, Checkpoint, CheckpointExport, DEFAULT_SHARD_BYTES};
use candlewick_model::{AdapterFolder, BASE_MODEL_RECORD, BaseModelRecord, ParamSpec};
use candlewick_runtime::run_id::RunId;
use serde_json::{Value, json};

use crate::checkpoint::{
    CheckpointError, CheckpointPlan, EXPORT_MARK, ExportMark, Fingerprint, Kind, Moment, PlannedSaves, Resumed,
    RunState, Saved, TrainState, bytes_needed, move_aside, newest_complete, preflight, read_state, refuse_foreign,
    refuse_occupied, resume, save, update_latest_link,
};
use crate::data::Stream;
use crate::failpoint::failpoint;
use crate::plan::{Init, Plan, dtype};

use super::background::{Done, UnderWay};
use super::context::{Progress, Run};
use super::state::EngineState;

pub(super) struct Saves<'a> {
    run: Run<'a>,
    fingerprint: Fingerprint,
    settings: Fingerprint,
    /// The frozen weights of an adapter.
    base: Option<BaseModelRecord>,
    /// The newest checkpoint of each entry of the plan: its step and its folder.
    last: HashMap<(Kind, PathBuf), (usize, PathBuf)>,
    /// The one that is written in the background.
    under_way: Option<UnderWay>,
}

/// What became of a save that was asked for.
pub(super) enum Outcome {
    /// It was there already.
    Known,
    /// It is on disk.
    Saved(SavedCheckpoint),
    /// It is on its way there.
    UnderWay,
}

/// A checkpoint on disk.
pub(super) struct SavedCheckpoint {
    pub(super) dir: PathBuf,
    /// Older ones that `keep` deleted.
    pub(super) removed: Vec<PathBuf>,
}

/// Returns the start of the run that a run of `plan` will resume, if it will resume one.
///
/// A run that resumes a copied checkpoint is another run: it keeps the date, and owns nothing of the original's.
pub(super) fn began(plan: &Plan) -> Result<Option<RunId>> {
    let Some(checkpoint) = plan.checkpoints.iter().find(|checkpoint| checkpoint.auto_resume) else { return Ok(None) };
    let Some(save) = newest_complete(&checkpoint.output_dir)? else { return Ok(None) };
    let (began, state) = (save.manifest.began, read_state(&save).ok());
    let date = state.as_ref().and_then(|state| state.date).unwrap_or(began);
    let is_copy = state.is_some_and(|state| state.is_copied_to(&save.dir));
    Ok(Some(RunId { run: if is_copy { RunId::now().run } else { began }, date }))
}

/// Tells whether there is a save that was made after this run began: one of its own, not of an earlier run.
pub(super) fn is_of_run(dir: &Path, began: RunId) -> bool {
    let modified = std::fs::metadata(dir).and_then(|metadata| metadata.modified());
    modified.is_ok_and(|time| time >= UNIX_EPOCH + Duration::from_millis(began.run))
}

impl<'a> Saves<'a> {
    pub(super) fn new(run: Run<'a>) -> Self {
        let base = base_record(run);
        let fingerprint = fingerprint(run.plan, base.as_ref());
        Self { run, fingerprint, settings: settings(run.plan), base, last: HashMap::new(), under_way: None }
    }

    /// Takes up the newest whole save of the checkpoint that resumes, if there is one.
    pub(super) fn resume(&mut self) -> Result<Option<Resumed>> {
        let Some(checkpoint) = self.run.plan.checkpoints.iter().find(|checkpoint| checkpoint.auto_resume) else {
            return Ok(None);
        };
        let mut state = EngineState::of(self.run.engine)?;
        let resumed = resume(checkpoint, &self.fingerprint, &mut state, &self.run.ranks.process)?;
        if let Some(resumed) = &resumed {
            self.run.engine.store().refresh()?;
            let newest = (resumed.run.step, resumed.dir.clone());
            self.last.insert((checkpoint.kind, checkpoint.output_dir.clone()), newest);
        }
        Ok(resumed)
    }

    /// What the run is trained with from here on and was not before, one line a key.
    pub(super) fn new_settings(&self, run: &RunState) -> Vec<String> {
        run.settings.differences(&self.settings)
    }

    /// Checks before the first step that every folder can be written and everything fits on disk.
    pub(super) fn preflight(&self, stream: &Stream) -> Result<()> {
        let sharded = bytes_needed(&EngineState::of(self.run.engine)?.tensors());
        let exported = |plan: &CheckpointPlan| self.n_export_bytes(plan);
        let began = self.run.began.run;
        let ends = epoch_ends(stream);
        let planned = |plan: &'a CheckpointPlan| {
            let n_saves = plan.n_saves(stream.cursor().step, stream.total_steps(), &ends);
            let spares_best = self.run.plan.best.is_some();
            match plan.kind {
                // One may be asked for at any time, by a signal.
                Kind::Sharded => {
                    PlannedSaves { plan, bytes_per_save: sharded, n_saves: n_saves.max(1), began, spares_best }
                }
                Kind::HuggingFace => PlannedSaves { plan, bytes_per_save: exported(plan), n_saves, began, spares_best },
            }
        };
        let planned: Vec<_> = self.run.plan.checkpoints.iter().map(planned).collect();
        let check = || -> Result<()> {
            preflight(&planned)?;
            let exports = self.run.plan.checkpoints.iter().any(|plan| plan.kind == Kind::HuggingFace);
            if exports {
                self.auxiliary_files(&self.folders(), &[]).check()?;
            }
            Ok(())
        };
        self.run.ranks.process.on_first_rank(check).map(drop)
    }

    /// Moves the checkpoints of other runs aside, and fails if something else has the name of one that this run will write.
    /// Returns one line for each folder that was changed.
    pub(super) fn prepare_folders(&self, stream: &Stream) -> Result<Vec<String>> {
        let (began, done, total_steps) = (self.run.began.run, stream.cursor().step, stream.total_steps());
        let (ends, exit) = (epoch_ends(stream), &self.run.plan.exit);
        let ends_early = [exit.iteration, exit.iteration_this_run.map(|n| done + n)];
        let mut lines = Vec::new();
        self.run.ranks.process.on_first_rank(|| {
            for plan in &self.run.plan.checkpoints {
                self.refuse_in_use(plan)?;
                // A run may go on from another one's checkpoint, which is among those of steps that are done.
                let since = if plan.kind == Kind::Sharded { done } else { 0 };
                if let Some((folder, n)) = move_aside(plan.kind, &plan.output_dir, began, since)? {
                    lines.push(format!("moved {n} checkpoints of other runs to {}", folder.display()));
                }
                let is_due = |step| plan.due(Moment::of(step, total_steps, &ends)) || ends_early.contains(&Some(step));
                let is_due = |step| step > done && is_due(step);
                refuse_occupied(plan.kind, &plan.output_dir, began, is_due)?;
            }
            Ok(())
        })?;
        Ok(lines)
    }

    /// Fails if the model, the adapter or the tokenizer in use is among the checkpoints of `plan`. The plan checks the names in
    /// the recipe; these are the folders that were found.
    fn refuse_in_use(&self, plan: &CheckpointPlan) -> Result<()> {
        let adapter = self.run.plan.model.adapter_folder.as_deref();
        for folder in self.folders().into_iter().chain(adapter) {
            if let Some(dir) = plan.kind.in_use(&plan.output_dir, folder) {
                return Err(CheckpointError::Occupied { dir, what: "in use by this run" }.into());
            }
        }
        Ok(())
    }

    /// Returns the newest step that this run saved, or that it was resumed from.
    pub(super) fn newest_step(&self) -> Option<usize> {
        self.last.values().map(|(step, _)| *step).max()
    }

    /// Returns the newest folder of each entry of the plan that exports weights.
    pub(super) fn exported(&self) -> impl Iterator<Item = &Path> {
        let newest = self.last.iter().filter(|((kind, _), _)| *kind == Kind::HuggingFace);
        newest.map(|(_, (_, dir))| dir.as_path())
    }

    fn n_export_bytes(&self, checkpoint: &CheckpointPlan) -> u64 {
        let model = self.run.engine.model();
        let numel = |params: &mut dyn Iterator<Item = &ParamSpec>| params.map(ParamSpec::numel).sum::<usize>();
        let n = match model.lora() {
            Some(_) => numel(&mut model.adapter_params()),
            None => numel(&mut model.base_params()),
        };
        (n * self.export_dtype(checkpoint).size_in_bytes()) as u64
    }

    /// Returns the save that was written in the background, if it is done now; with `wait` as soon as it is.
    pub(super) fn finish_background(&mut self, wait: bool) -> Result<Option<Done>> {
        let done = self.under_way.take_if(|save| wait || save.is_finished());
        done.map(UnderWay::finish).transpose()
    }

    /// Makes one save, or begins it. None may be in the background.
    pub(super) fn save(&mut self, checkpoint: &CheckpointPlan, stream: &Stream, progress: Progress) -> Result<Outcome> {
        let home = checkpoint.output_dir.canonicalize().ok();
        let state = RunState { home, ..self.run_state(stream, progress) };
        let place = (checkpoint.kind, checkpoint.output_dir.clone());
        if self.last.get(&place).is_some_and(|(step, _)| *step == state.step) {
            return Ok(Outcome::Known);
        }
        let newest = (state.step, checkpoint.dir(state.tag()));
        let outcome = match checkpoint.kind {
            Kind::Sharded if checkpoint.async_save => {
                let engine = EngineState::of(self.run.engine)?;
                self.under_way = Some(UnderWay::begin(checkpoint, state, &engine, self.run.ranks.background.clone())?);
                Outcome::UnderWay
            }
            Kind::Sharded => {
                let Saved { dir, removed, .. } =
                    save(checkpoint, &state, &EngineState::of(self.run.engine)?, &self.run.ranks.process)?;
                Outcome::Saved(SavedCheckpoint { dir, removed })
            }
            Kind::HuggingFace => Outcome::Saved(self.export(checkpoint, &state)?),
        };
        self.last.insert(place, newest);
        Ok(outcome)
    }

    fn run_state(&self, stream: &Stream, progress: Progress) -> RunState {
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
            n_skipped: progress.n_skipped,
            scaler: progress.scaler,
            ledger: json!(cursor.seen),
            began: self.run.began.run,
            date: Some(self.run.began.date),
            home: None,
            fingerprint: self.fingerprint.clone(),
            settings: self.settings.clone(),
        }
    }

    /// Writes the weights alone: a model folder, or an adapter folder if only an adapter is trained. The first rank writes;
    /// the others go through all weights with it, of which each may have a share.
    fn export(&self, checkpoint: &CheckpointPlan, state: &RunState) -> Result<SavedCheckpoint> {
        let mut masters = self.run.engine.store().masters();
        let written = match self.run.ranks.process.is_first() {
            true => self.write_weights(checkpoint, state, &mut masters),
            false => Ok(Vec::new()),
        };
        // A write that failed must not leave the others waiting. A gather that failed has: they hear of it from the world.
        masters.try_for_each(|master| master.map(drop)).context("failed to gather the weights")?;
        let removed = self.run.ranks.process.all_ok(written)?;
        Ok(SavedCheckpoint { dir: checkpoint.dir(state.tag()), removed })
    }

    fn write_weights<'m>(
        &self,
        checkpoint: &CheckpointPlan,
        state: &RunState,
        masters: &mut impl Iterator<Item = candle_core::Result<(&'m ParamSpec, Tensor)>>,
    ) -> Result<Vec<PathBuf>> {
        let dir = checkpoint.dir(state.tag());
        refuse_foreign(checkpoint.kind, &dir, state.began)?;
        let at_work = self.run.ranks.process.keep_alive();
        let mut working = Some(at_work.begin());
        // Exports are in the order of the model.
        let fetch = |spec: &ParamSpec| {
            // A gather waits for the others: no work meanwhile.
            failpoint("export_started", state.step);
            drop(working.take());
            let found = masters.find(|master| master.as_ref().map_or(true, |(at, _)| at.name == spec.name));
            working = Some(at_work.begin());
            match found {
                Some(master) => Ok(master?.1),
                None => candle_core::bail!("{} is out of order", spec.name),
            }
        };
        let model = self.run.engine.model();
        let dtype = self.export_dtype(checkpoint);
        let (folders, mark) = (self.folders(), self.mark(state.step));
        let base = self.base.as_ref().map(BaseModelRecord::to_json);
        let files = [Some((EXPORT_MARK, mark.as_str())), base.as_deref().map(|base| (BASE_MODEL_RECORD, base))];
        let files: Vec<_> = files.into_iter().flatten().collect();
        let auxiliary_files = self.auxiliary_files(&folders, &files);
        if model.lora().is_some() {
            AdapterFolder::save(&dir, model, dtype, auxiliary_files, fetch).context("failed to write the adapter")?;
        } else {
            let (config, shard_bytes) = (model.config(), DEFAULT_SHARD_BYTES);
            let export = CheckpointExport { folder: &dir, config, auxiliary_files, dtype, shard_bytes };
            export.save(model.base_params(), fetch).context("failed to write the weights")?;
        }
        failpoint("export_published", state.step);
        update_latest_link(&dir);
        let prune = |keep| checkpoint.retention(keep, state).prune(state.tag());
        Ok(checkpoint.keep.map_or(Ok(Vec::new()), prune)?)
    }

    /// The folders with the files that an export copies.
    fn folders(&self) -> Vec<&Path> {
        let folders = [Some(self.run.assets.tokenizer.directory()), self.run.assets.model_folder.as_deref()];
        folders.into_iter().flatten().collect()
    }

    fn auxiliary_files<'b>(&'b self, folders: &'b [&'b Path], files: &'b [(&'b str, &'b str)]) -> AuxiliaryFiles<'b> {
        AuxiliaryFiles { folders, chat_template: self.run.assets.own_template(), files }
    }

    fn mark(&self, step: usize) -> String {
        ExportMark { began: self.run.began.run, step }.to_json()
    }

    fn export_dtype(&self, checkpoint: &CheckpointPlan) -> DType {
        dtype(checkpoint.dtype.unwrap_or(self.run.plan.model.dtype))
    }
}

/// A run that fails lets what it has begun to save be saved.
impl Drop for Saves<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.finish_background(true) {
            tracing::warn!("{error:#}");
        }
    }
}

/// Identifies the weights that an adapter is trained on, where they were loaded.
fn base_record(run: Run) -> Option<BaseModelRecord> {
    let model = &run.plan.model;
    let folder = run.assets.model_folder.as_deref().filter(|_| model.init == Init::Load)?;
    let name = model.adapter.as_ref()?.base_model().unwrap_or_default();
    let weights = Checkpoint::open(folder).ok()?.identity();
    Some(BaseModelRecord { model: name.to_owned(), weights })
}

/// What must be the same for a run to go on from a save. The data cursor guards what decides the order of the data.
///
/// `base` names the frozen weights of an adapter, which are in no save. Their hash counts, their folder does not.
fn fingerprint(plan: &Plan, base: Option<&BaseModelRecord>) -> Fingerprint {
    let config = plan.model.config.as_ref().map(|config| config.to_json());
    let mut adapter = plan.model.adapter.as_ref().map(|adapter| adapter.to_json());
    if let Some(Value::Object(adapter)) = &mut adapter {
        adapter.remove("base_model_name_or_path");
    }
    let base = base.map(|base| &base.weights);
    let model = json!({"config": config, "dtype": plan.model.dtype, "peft_config": adapter, "frozen weights": base});
    Fingerprint::of(&json!({"model": model}))
}

/// What may change between a save and going on from it (people lower learning rates), but not unnoticed.
fn settings(plan: &Plan) -> Fingerprint {
    let (optimizer, scheduler, horizon) = (&plan.optimizer, &plan.schedule, plan.data.horizon);
    let model = plan.model.name_or_path.as_deref();
    Fingerprint::of(&json!({
        "optimizer": optimizer, "scheduler": scheduler, "horizon": horizon, "seed": plan.seed, "model": model,
    }))
}

/// The steps at which epochs end, as far as they can be told now.
fn epoch_ends(stream: &Stream) -> Vec<usize> {
    let in_epoch = stream.steps_in_epoch();
    (1..=stream.total_steps() / in_epoch).map(|epoch| epoch * in_epoch).collect()
}
