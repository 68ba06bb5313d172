//! The files of a run: the folders of the model and the tokenizer, local or from the Hub.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, anyhow};
use candlewick_runtime::run_id::RunId;
use candlewick_text::hub::{Hub, ModelFiles};
use candlewick_text::template::{ChatTemplate, ChatTemplateSource, Clock};
use candlewick_text::tokenizer::Tokenizer;

use crate::exit::ExitCode;
use crate::plan::{Plan, TokenizerPlan, WeightInit};
use crate::recipe::missing_path_advice;
use crate::resolve::is_path;

/// The model files and the tokenizer of a run.
pub struct Assets {
    /// The model's folder; `None` if the recipe contains the config.
    pub model_folder: Option<PathBuf>,
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    template: Option<(String, String)>,
    kwargs: serde_json::Map<String, serde_json::Value>,
    clock: Clock,
}

impl Assets {
    /// Finds the folders of the model and the tokenizer, and downloads missing ones. A chat template that prints the
    /// date prints the date of `run_id`.
    pub fn find(plan: &Plan, hub: &Hub, run_id: RunId) -> Result<Self> {
        let part = match plan.model.init {
            WeightInit::Load => ModelFiles::All,
            WeightInit::Random => ModelFiles::WithoutWeights,
        };
        let model = plan.model.name_or_path.as_deref();
        let model_folder = model.map(|name| hub.model(name, plan.model.revision.as_deref(), part)).transpose()?;
        let TokenizerPlan { name_or_path, revision, chat_template, chat_template_kwargs } = &plan.tokenizer;
        if is_path(name_or_path) && !Path::new(name_or_path).exists() {
            let problem = format!("failed to find {name_or_path}: {}", missing_path_advice(name_or_path));
            return Err(anyhow!(problem).context(ExitCode::Data));
        }
        let tokenizer_folder = hub.model(name_or_path, revision.as_deref(), ModelFiles::WithoutWeights)?;
        let tokenizer = Tokenizer::from_directory(tokenizer_folder)?;
        let own_template = |source: &ChatTemplateSource| {
            source.check(&tokenizer)?;
            source.read()
        };
        let template = chat_template.as_ref().map(own_template).transpose();
        Ok(Self {
            model_folder,
            template: template.map_err(|error| anyhow!("failed to {error}").context(ExitCode::Data))?,
            tokenizer: Arc::new(tokenizer),
            kwargs: chat_template_kwargs.clone(),
            clock: run_id.clock(),
        })
    }

    /// Returns the source of the chat template in the recipe, if there is one.
    pub fn own_template(&self) -> Option<&str> {
        self.template.as_ref().map(|(_, source)| source.as_str())
    }

    /// Compiles the recipe's chat template, else the tokenizer's, if there is one.
    pub fn template(&self) -> Result<Option<ChatTemplate>> {
        let template = match &self.template {
            Some((name, source)) => Some(self.tokenizer.with_special_tokens(ChatTemplate::new(name.as_str(), source)?)),
            None => self.tokenizer.chat_template(None)?,
        };
        let with = |template, (name, value): (&String, &serde_json::Value)| {
            ChatTemplate::with_variable(template, name.as_str(), value.clone())
        };
        Ok(template.map(|template| self.kwargs.iter().fold(template, with).with_clock(self.clock)))
    }
}
