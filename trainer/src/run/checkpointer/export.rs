//! The export of a run's weights: a model folder, or an adapter folder.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Tensor};
use candlewick_model::checkpoint::{
    AuxiliaryFiles, CarriedTensors, CheckpointExport, DEFAULT_SHARD_BYTES, ExpertTensors,
};
use candlewick_model::{AdapterFolder, BASE_MODEL_RECORD, BaseModelRecord, FP8_SCALES, ParamSpec, fp8_scales_to_json};
use candlewick_runtime::progress::{ProgressUnit, WorkProgress};
use candlewick_text::render::{GENERATION_CONFIG, generation_config_with_end_of_turn};

use crate::checkpoint::{CheckpointPlan, EXPORT_MARK, ExportMark, LocalDisk, RunState, refuse_unowned};
use crate::data::DataKind;
use crate::plan::dtype;

use super::{Checkpointer, SavedCheckpoint};

impl Checkpointer<'_> {
    /// Exports the weights: a model folder, or an adapter folder if an adapter is trained.
    ///
    /// The first rank writes. The others iterate over all weights with it, because each gather is a collective.
    pub(super) fn export(&self, checkpoint: &CheckpointPlan, state: &RunState) -> Result<SavedCheckpoint> {
        let mut masters = self.run.engine.store().masters();
        let written = match self.run.ranks.process.is_first() {
            true => self.write_weights(checkpoint, state, &mut masters),
            false => Ok(Vec::new()),
        };
        // A failed write must not leave the other ranks waiting in a gather. A failed gather reports itself to them.
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
        refuse_unowned(checkpoint.format, &dir, state.run_start)?;
        let keep_alive = self.run.ranks.process.keep_alive();
        let mut busy = Some(keep_alive.begin());
        let model = self.run.engine.model();
        let n_tensors = model.lora().map_or_else(|| model.base_params().count(), |_| model.adapter_params().count());
        let shown = WorkProgress::start("export", ProgressUnit::Count("tensors"), n_tensors);
        // Exported tensors are in the order of the model.
        let fetch = |spec: &ParamSpec| {
            // A gather waits for the other ranks, so this rank is not busy meanwhile.
            checkpoint.format.failpoint("started", state.step);
            shown.add(1);
            drop(busy.take());
            let found = masters.find(|master| master.as_ref().map_or(true, |(at, _)| at.name == spec.name));
            busy = Some(keep_alive.begin());
            match found {
                Some(master) => Ok(master?.1),
                None => candle_core::bail!("{} is out of order", spec.name),
            }
        };
        let dtype = self.export_dtype(checkpoint);
        let (folders, mark) = (self.folders(), self.mark(state.step));
        let base = self.base.as_ref().map(BaseModelRecord::to_json);
        let scales = self.run.engine.fp8_scales()?.map(|scales| fp8_scales_to_json(&scales, model.config()));
        let generation_config = self.generation_config(&folders)?;
        let files = [
            (EXPORT_MARK, Some(&mark)),
            (BASE_MODEL_RECORD, base.as_ref()),
            (FP8_SCALES, scales.as_ref()),
            (GENERATION_CONFIG, generation_config.as_ref()),
        ];
        let files: Vec<_> = files.into_iter().filter_map(|(name, text)| Some((name, text?.as_str()))).collect();
        let auxiliary_files = self.auxiliary_files(&folders, &files);
        if model.lora().is_some() {
            AdapterFolder::save(&dir, model, dtype, auxiliary_files, fetch).context("failed to write the adapter")?;
        } else {
            let (config, shard_bytes) = (model.config(), DEFAULT_SHARD_BYTES);
            let expert_tensors = ExpertTensors::default();
            let export = CheckpointExport { folder: &dir, config, auxiliary_files, dtype, shard_bytes, expert_tensors };
            let carried = self.carried.as_ref();
            export.save_with(carried, model.base_params(), fetch).context("failed to write the weights")?;
        }
        checkpoint.format.failpoint("renamed", state.step);
        Ok(checkpoint.finish_save(&LocalDisk, state.tag(), state)?)
    }

    /// Returns the folders with the files that an export copies.
    pub(super) fn folders(&self) -> Vec<&Path> {
        let folders = [Some(self.run.assets.tokenizer.directory()), self.run.assets.model_folder.as_deref()];
        folders.into_iter().flatten().collect()
    }

    pub(super) fn auxiliary_files<'b>(
        &'b self,
        folders: &'b [&'b Path],
        files: &'b [(&'b str, &'b str)],
    ) -> AuxiliaryFiles<'b> {
        AuxiliaryFiles { folders, chat_template: self.run.assets.own_template(), files }
    }

    /// Returns the generation_config.json of a model that was trained on chats whose end of turn is not the tokenizer's
    /// EOS; `None` if the copied file stays as it is.
    fn generation_config(&self, folders: &[&Path]) -> Result<Option<String>> {
        let assets = self.run.assets;
        let template = if self.run.plan.data.kind == DataKind::Sft { assets.template()? } else { None };
        let Some(template) = template else { return Ok(None) };
        let folder = folders.iter().copied().find(|folder| folder.join(GENERATION_CONFIG).is_file());
        let config = generation_config_with_end_of_turn(&assets.tokenizer, &template, folder);
        config.map_err(|error| anyhow!("failed to {error}"))
    }

    fn mark(&self, step: usize) -> String {
        ExportMark { run_start: self.run.run_id.run, step }.to_json()
    }

    fn export_dtype(&self, checkpoint: &CheckpointPlan) -> DType {
        dtype(checkpoint.dtype.unwrap_or(self.run.plan.model.dtype))
    }

    /// Returns the bytes of the weights that an export writes.
    pub(super) fn n_export_bytes(&self, checkpoint: &CheckpointPlan) -> u64 {
        let model = self.run.engine.model();
        let n = match model.lora() {
            Some(_) => model.adapter_params().map(ParamSpec::numel).sum(),
            None => model.n_exported_elements(),
        };
        let carried = self.carried.as_ref().map_or(0, CarriedTensors::n_bytes);
        (n * self.export_dtype(checkpoint).size_in_bytes()) as u64 + carried
    }
}
