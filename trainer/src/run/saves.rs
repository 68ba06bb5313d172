//! What a run writes: resumable saves, and folders of weights that transformers or peft load.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use candle_core::Tensor;
use candlewick_model::checkpoint::{DEFAULT_SHARD_BYTES, Export};
use candlewick_model::{AdapterFolder, ParamSpec};
use candlewick_parallel::Engine;
use serde_json::{Value, json};

use crate::checkpoint::{
    BestEval, CheckpointPlan, Fingerprint, Kind, PlannedSaves, Resumed, RunState, Tag, TrainState, bytes_needed,
    preflight, prune, resume, save,
};
use crate::data::Stream;
use crate::plan::Plan;

use super::state::EngineState;
use super::{Assets, build};

pub(super) struct Saves<'a> {
    plan: &'a Plan,
    assets: &'a Assets,
    engine: &'a Engine,
    fingerprint: Fingerprint,
    /// The last tag that each folder got.
    last: HashMap<PathBuf, Tag>,
}

impl<'a> Saves<'a> {
    pub(super) fn new(plan: &'a Plan, assets: &'a Assets, engine: &'a Engine, fingerprint: Fingerprint) -> Self {
        Self { plan, assets, engine, fingerprint, last: HashMap::new() }
    }

    /// Takes up the newest whole save of the checkpoint that resumes, if there is one.
    pub(super) fn resume(&mut self) -> Result<Option<Resumed>> {
        let Some(checkpoint) = self.plan.checkpoints.iter().find(|checkpoint| checkpoint.auto_resume) else {
            return Ok(None);
        };
        let mut state = EngineState::of(self.engine.store())?;
        let resumed = resume(checkpoint, &self.fingerprint, &mut state)?;
        if let Some(resumed) = &resumed {
            self.engine.store().refresh()?;
            self.last.insert(checkpoint.output_dir.clone(), resumed.run.tag());
        }
        Ok(resumed)
    }

    /// Checks before the first step that every folder can be written and everything fits on disk.
    pub(super) fn preflight(&self, stream: &Stream) -> Result<()> {
        let sharded = bytes_needed(&EngineState::of(self.engine.store())?.tensors());
        let exported = self.n_export_bytes();
        let ends = epoch_ends(stream);
        let planned = |plan: &'a CheckpointPlan| {
            let n_saves = plan.n_saves(stream.cursor().step, stream.total_steps(), &ends);
            match plan.kind {
                // One may be asked for at any time, by a signal.
                Kind::Sharded => PlannedSaves { plan, bytes_per_save: sharded, n_saves: n_saves.max(1) },
                Kind::HuggingFace => PlannedSaves { plan, bytes_per_save: exported, n_saves },
            }
        };
        Ok(preflight(&self.plan.checkpoints.iter().map(planned).collect::<Vec<_>>())?)
    }

    fn n_export_bytes(&self) -> u64 {
        let model = self.engine.model();
        let numel = |params: &mut dyn Iterator<Item = &ParamSpec>| params.map(ParamSpec::numel).sum::<usize>();
        let n = match model.lora() {
            Some(_) => numel(&mut model.adapter_params()),
            None => numel(&mut model.base_params()),
        };
        (n * build::dtype(self.plan.model.dtype).size_in_bytes()) as u64
    }

    /// Makes one save and returns a line about it; nothing if this step is saved there already.
    pub(super) fn save(
        &mut self,
        checkpoint: &CheckpointPlan,
        stream: &Stream,
        best_eval: Option<BestEval>,
        elapsed: Duration,
    ) -> Result<Option<String>> {
        let run = self.run_state(stream, best_eval, elapsed);
        let tag = run.tag();
        if self.last.get(&checkpoint.output_dir).is_some_and(|last| last.step == tag.step) {
            return Ok(None);
        }
        let dir = match checkpoint.kind {
            Kind::Sharded => save(checkpoint, &run, &EngineState::of(self.engine.store())?)?.dir,
            Kind::HuggingFace => self.export(checkpoint, tag)?,
        };
        self.last.insert(checkpoint.output_dir.clone(), tag);
        Ok(Some(format!("saved {}", dir.display())))
    }

    fn run_state(&self, stream: &Stream, best_eval: Option<BestEval>, elapsed: Duration) -> RunState {
        let cursor = stream.cursor();
        RunState {
            step: cursor.step,
            epoch: cursor.epoch,
            accumulation_phase: 0,
            cursor: json!(cursor),
            rng: Value::Null,
            tokens: cursor.seen.read.tokens,
            target_tokens: cursor.seen.supervised,
            elapsed_s: elapsed.as_secs_f64(),
            best_eval,
            ledger: json!(cursor.seen),
            fingerprint: self.fingerprint.clone(),
        }
    }

    /// Writes the weights alone: a model folder, or an adapter folder if only an adapter is trained.
    fn export(&self, checkpoint: &CheckpointPlan, tag: Tag) -> Result<PathBuf> {
        let dir = checkpoint.dir(tag);
        let masters: HashMap<String, Tensor> = self
            .engine
            .store()
            .masters()
            .map(|master| master.map(|(spec, value)| (spec.name.clone(), value)))
            .collect::<candle_core::Result<_>>()?;
        let fetch = |spec: &ParamSpec| Ok(masters[&spec.name].clone());
        let model = self.engine.model();
        let dtype = build::dtype(self.plan.model.dtype);
        if model.lora().is_some() {
            AdapterFolder::save(&dir, model, dtype, fetch).context("failed to write the adapter")?;
        } else {
            let tokenizer = self.assets.tokenizer.directory();
            let companions: Vec<&Path> =
                [Some(tokenizer), self.assets.model_folder.as_deref()].into_iter().flatten().collect();
            let export = Export {
                folder: &dir,
                config: model.config(),
                companions: &companions,
                dtype,
                shard_bytes: DEFAULT_SHARD_BYTES,
            };
            export.save(model.base_params(), fetch).context("failed to write the weights")?;
        }
        if let Some(keep) = checkpoint.keep {
            prune(checkpoint.kind, &checkpoint.output_dir, tag, keep)?;
        }
        Ok(dir)
    }
}

/// The steps at which epochs end, as far as they can be told now.
fn epoch_ends(stream: &Stream) -> Vec<usize> {
    let in_epoch = stream.steps_in_epoch();
    (1..=stream.total_steps() / in_epoch).map(|epoch| epoch * in_epoch).collect()
}
