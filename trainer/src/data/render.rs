//! Rendering: rows of a source to tokenized samples, on many threads.

use candlewick_runtime::progress::WorkProgress;
use candlewick_text::conversation::ChatRole;
use candlewick_text::format::{DatasetType, RowFormat};
use candlewick_text::render::{
    EmptyAnswerLoss, EmptyThinkLoss, EosLoss, LossMask, PromptForm, RenderOptions, RoleSet, Sample, TextSpecialTokens,
    render_row,
};
use candlewick_text::source::RowSource;
use candlewick_text::template::{BuiltInTemplate, ChatTemplate};
use candlewick_text::tokenizer::Tokenizer;
use rayon::prelude::*;

use super::DataError;
use super::cache::FillStatus;
use super::cache_key::{self, CacheKey};
use super::plan::{DataKind, DataPlan, MaskingStrategy, SourcePlan, TrainOnEos, TrainedRole};
use crate::failpoint::failpoint;

/// Rows that are rendered in memory before they are written.
const ROWS: usize = 1024;

/// Renders rows by a plan.
pub(crate) struct Renderer<'a> {
    pub(crate) plan: &'a DataPlan,
    tokenizer: &'a Tokenizer,
    template: Option<ChatTemplate>,
}

/// Rows of a source to render.
pub(crate) struct ChosenRows<'a> {
    pub(crate) source: &'a dyn RowSource,
    pub(crate) format: &'a RowFormat,
    pub(crate) rows: &'a [u32],
    pub(crate) options: RenderOptions,
}

impl<'a> Renderer<'a> {
    /// Creates a renderer and sets the plan's variables in the template.
    pub(crate) fn new(plan: &'a DataPlan, tokenizer: &'a Tokenizer, template: Option<ChatTemplate>) -> Self {
        let set_variables = |template: ChatTemplate| {
            let variables = plan.template_kwargs.iter();
            variables.fold(template, |template, (name, value)| template.with_variable(name, value.clone()))
        };
        Self { plan, tokenizer, template: template.map(set_variables) }
    }

    pub(crate) fn purpose(&self) -> DatasetType {
        match self.plan.kind {
            DataKind::Sft => DatasetType::Instruct,
            DataKind::Causal => DatasetType::Causal,
        }
    }

    /// Adds to a cache key every setting that changes the rendered tokens or their targets. A key of a default is left
    /// out, so that entries of earlier versions stay valid.
    pub(crate) fn add_to(&self, key: CacheKey, source: &SourcePlan) -> CacheKey {
        let plan = self.plan;
        let template_key = self.template.as_ref().map_or("none".into(), cache_key::hash_template);
        let mut key = key
            .with("the type", format!("{:?}", self.plan.kind))
            .with("the tokenizer", cache_key::hash_tokenizer(self.tokenizer))
            .with("the chat template", template_key)
            .with("add_bos_token", format!("{:?}", self.plan.add_bos_token))
            .with("add_eos_token", self.plan.add_eos_token.to_string());
        if let Some(n_tokens) = plan.max_text_tokens {
            key = key.with("tokenize_kwargs.max_length", n_tokens.to_string());
        }
        if plan.kind == DataKind::Causal {
            return key;
        }
        let mask_inputs = plan.masking_strategy != MaskingStrategy::TrainOnAll;
        key = key
            .with("train_on_empty_answers", plan.train_on_empty_answers.to_string())
            .with("mask_inputs", mask_inputs.to_string())
            .with("ignore_empty_think", plan.ignore_empty_think.to_string());
        if plan.masking_strategy == MaskingStrategy::TrainOnLast {
            key = key.with("masking_strategy", "train_on_last");
        }
        if plan.roles_to_train != [TrainedRole::Assistant] {
            key = key.with("roles_to_train", format!("{:?}", plan.roles_to_train));
        }
        if plan.train_on_eos != TrainOnEos::Turn {
            key = key.with("train_on_eos", format!("{:?}", plan.train_on_eos));
        }
        if let Some(remove_none_values) = source.remove_none_values {
            key = key.with("remove_none_values", remove_none_values.to_string());
        }
        match source.apply_chat_template {
            true => key,
            false => key.with("apply_chat_template", "false"),
        }
    }

    /// Renders rows in their order and passes each sample to `write`. Ends at the first error, or once `is_stopped`.
    pub(crate) fn render(
        &self,
        chosen: &ChosenRows<'_>,
        progress: &WorkProgress,
        is_stopped: &(dyn Fn() -> bool + Sync),
        mut write: impl FnMut(u32, &Sample) -> Result<(), DataError> + Send,
    ) -> Result<FillStatus, DataError> {
        let ChosenRows { source, format, rows, options } = *chosen;
        let mut write = |rendered: Vec<(u32, Option<Result<Sample, DataError>>)>| {
            for (row, sample) in rendered {
                let Some(sample) = sample else { return Ok(FillStatus::Stopped) };
                write(row, &sample?)?;
            }
            Ok(FillStatus::Complete)
        };
        let render = |chunk: &[u32]| {
            let rows = chunk.par_iter().map(|&row| {
                let sample = (!is_stopped()).then(|| self.row(source, format, row as usize, options));
                (row, sample)
            });
            rows.collect::<Vec<_>>()
        };
        let mut rendered = Vec::new();
        for (chunk_idx, chunk) in rows.chunks(ROWS).enumerate() {
            // Writes the rendered rows while the next ones are rendered.
            let (written, next) = rayon::join(|| write(rendered), || render(chunk));
            if written? == FillStatus::Stopped {
                return Ok(FillStatus::Stopped);
            }
            rendered = next;
            progress.add(chunk.len());
            failpoint("rows_rendered", chunk_idx);
        }
        write(rendered)
    }

    fn row(
        &self,
        source: &dyn RowSource,
        format: &RowFormat,
        row: usize,
        options: RenderOptions,
    ) -> Result<Sample, DataError> {
        let document = format.read(source, row)?;
        let sample = render_row(self.tokenizer, self.template.as_ref(), format, document, options);
        sample.map_err(|error| DataError::Row { place: source.locate(row), problem: error.to_string() })
    }

    /// Refuses chats without a chat template.
    pub(crate) fn check(&self, source: &SourcePlan, format: &RowFormat) -> Result<(), DataError> {
        let name = &source.name_or_path;
        let is_chat = !matches!(format, RowFormat::Text(_) | RowFormat::PromptCompletion(_) | RowFormat::TokenIds(_));
        if is_chat && !source.apply_chat_template {
            let problem = format!(
                "its rows are chats ({}), which need a chat template; remove apply_chat_template: false, or use rows \
                 with a prompt and a completion",
                format.name()
            );
            return Err(DataError::Plan { name: name.to_owned(), problem });
        }
        if !is_chat || self.template.is_some() {
            return Ok(());
        }
        let problem = format!(
            "its rows are chats ({}), but {} has no chat template; use a chat version of the model, or set \
             tokenizer.chat_template to a built-in one ({}) or a Jinja file",
            format.name(),
            self.tokenizer.directory().display(),
            BuiltInTemplate::names_for(self.tokenizer)
        );
        Err(DataError::Plan { name: name.to_owned(), problem })
    }

    /// Returns the options of rendering the rows of a source.
    pub(crate) fn options(&self, source: &SourcePlan) -> RenderOptions {
        let empty_think = if self.plan.ignore_empty_think { EmptyThinkLoss::Mask } else { EmptyThinkLoss::Include };
        let empty_answers =
            if self.plan.train_on_empty_answers { EmptyAnswerLoss::Include } else { EmptyAnswerLoss::Mask };
        let DataPlan { add_bos_token, add_eos_token, max_text_tokens, .. } = *self.plan;
        let specials = TextSpecialTokens { add_bos_token, add_eos_token, max_text_tokens };
        let prompt_form = if source.apply_chat_template { PromptForm::Chat } else { PromptForm::Text };
        let (targets, roles, eos) = (self.targets(), self.roles(), self.eos());
        RenderOptions { targets, roles, eos, prompt_form, empty_think, empty_answers, specials }
    }

    fn roles(&self) -> RoleSet {
        RoleSet::of(self.plan.roles_to_train.iter().map(|role| match role {
            TrainedRole::System => ChatRole::System,
            TrainedRole::User => ChatRole::User,
            TrainedRole::Assistant => ChatRole::Assistant,
            TrainedRole::Tool => ChatRole::Tool,
        }))
    }

    fn eos(&self) -> EosLoss {
        match (self.plan.kind, self.plan.train_on_eos) {
            (DataKind::Causal, _) | (_, TrainOnEos::Turn) => EosLoss::Turn,
            (_, TrainOnEos::All) => EosLoss::All,
            (_, TrainOnEos::Last) => EosLoss::Last,
            (_, TrainOnEos::None) => EosLoss::None,
        }
    }

    fn targets(&self) -> LossMask {
        match (self.plan.kind, self.plan.masking_strategy) {
            (DataKind::Causal, _) | (_, MaskingStrategy::TrainOnAll) => LossMask::AllTokens,
            (_, MaskingStrategy::TrainOnAssistant) => LossMask::Turns,
            (_, MaskingStrategy::TrainOnLast) => LossMask::LastTurn,
        }
    }
}

/// Starts the tokenizer threads, at most one a core.
pub(crate) fn threads(plan: &DataPlan) -> Result<rayon::ThreadPool, DataError> {
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let n_threads = plan.num_proc.clamp(1, n_cores);
    rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().map_err(|error| DataError::Plan {
        name: "data.num_proc".into(),
        problem: format!("{n_threads} threads could not be started ({error}); lower it"),
    })
}
