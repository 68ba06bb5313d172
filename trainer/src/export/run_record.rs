//! The parts of a run's `run.json` that an export needs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candle_core::DType;
use candlewick_model::{Config, LoraConfig};
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_regular_file};
use candlewick_text::template::ChatTemplateSource;
use serde::Deserialize;
use serde_json::Value;

use crate::exit::ExitCode;

/// A run's record, as JSON.
#[derive(Clone, Debug)]
pub(super) struct RunRecord {
    path: PathBuf,
    json: Value,
}

impl RunRecord {
    /// Finds the record of the run that wrote a folder: in it, or up to two folders above.
    pub(super) fn find(folder: &Path) -> Option<Self> {
        let absolute = std::path::absolute(folder).ok()?;
        let paths = absolute.ancestors().take(3).map(|folder| folder.join("run.json"));
        paths.into_iter().find_map(|path| {
            let json = serde_json::from_slice(&read_regular_file(&path, MAX_GENERATED_FILE_BYTES).ok()?).ok()?;
            Some(Self { path, json })
        })
    }

    /// Returns the value at a path of keys, such as `/plan/model/name_or_path`.
    pub(super) fn get(&self, pointer: &str) -> Option<&Value> {
        self.json.pointer(pointer).filter(|value| !value.is_null())
    }

    pub(super) fn text(&self, pointer: &str) -> Option<&str> {
        self.get(pointer)?.as_str()
    }

    /// Checks that the run with this start wrote the record.
    pub(super) fn check(&self, run_start: u64) -> Result<()> {
        match self.get("/run_id").and_then(Value::as_u64) {
            Some(run_id) if run_id != run_start => Err(self.unusable("it is of another run than the checkpoint")),
            _ => Ok(()),
        }
    }

    /// Returns the model's config with the recipe's overrides and MTP layers.
    pub(super) fn config(&self) -> Result<Config> {
        let json = self.get("/plan/model/config").ok_or_else(|| self.unusable("it has no model config"))?;
        let n_mtp_layers = self.get("/plan/model/mtp/n_layers").and_then(Value::as_u64).unwrap_or(0);
        let config =
            Config::from_json(json.clone()).with_context(|| format!("failed to read {}", self.path.display()))?;
        Ok(config.with_mtp_layers(n_mtp_layers as usize))
    }

    /// Returns the LoRA configuration; `None` if the run trained all weights.
    pub(super) fn adapter(&self) -> Result<Option<LoraConfig>> {
        let json = self.get("/plan/model/adapter");
        json.map(LoraConfig::from_peft_json)
            .transpose()
            .with_context(|| format!("failed to read {}", self.path.display()))
    }

    /// Returns the dtype of the run's weights.
    pub(super) fn dtype(&self) -> DType {
        match self.text("/plan/model/dtype") {
            Some("bf16") => DType::BF16,
            Some("f16") => DType::F16,
            _ => DType::F32,
        }
    }

    /// Returns true if the run trained on chats or completions, not on plain text.
    pub(super) fn trained_on_chats(&self) -> bool {
        self.text("/plan/data/kind") == Some("sft")
    }

    /// Returns the recipe's chat template, if it has one.
    pub(super) fn chat_template(&self) -> Result<Option<String>> {
        const KEY: &str = "/plan/tokenizer/chat_template";
        let source = self.get(KEY).map(ChatTemplateSource::deserialize).transpose();
        let source = source.map_err(|error| self.unusable(&format!("{KEY}: {error}")))?;
        let read = |source: ChatTemplateSource| source.read().map_err(|error| anyhow!("failed to {error}"));
        Ok(source.map(read).transpose()?.map(|(_, text)| text))
    }

    /// Returns the error of a record without what an export needs.
    pub(super) fn unusable(&self, problem: &str) -> anyhow::Error {
        anyhow!("failed to use {}: {problem}", self.path.display()).context(ExitCode::Data)
    }
}
