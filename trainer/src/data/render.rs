//! Rendering: rows of a source to tokenized samples, on many threads.

use candlewick_text::format::{DatasetType, RowFormat};
use candlewick_text::render::{
    EmptyAnswerLoss, EmptyThinkLoss, LossMask, RenderOptions, Sample, TextSpecialTokens, render_row,
};
use candlewick_text::source::RowSource;
use candlewick_text::template::ChatTemplate;
use candlewick_text::tokenizer::Tokenizer;
use rayon::prelude::*;

use super::DataError;
use super::cache_key::{self, CacheKey};
use super::plan::{DataKind, DataPlan};

/// Rows that are rendered in memory before they are written.
const ROWS: usize = 1024;

/// Renders rows by a plan.
pub(crate) struct Renderer<'a> {
    pub(crate) plan: &'a DataPlan,
    tokenizer: &'a Tokenizer,
    template: Option<ChatTemplate>,
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

    /// Adds to a cache key every setting that changes the rendered tokens.
    pub(crate) fn add_to(&self, key: CacheKey) -> CacheKey {
        let template_key = self.template.as_ref().map_or("none".into(), cache_key::hash_template);
        let key = key
            .with("the type", format!("{:?}", self.plan.kind))
            .with("the tokenizer", cache_key::hash_tokenizer(self.tokenizer))
            .with("the chat template", template_key)
            .with("add_bos_token", format!("{:?}", self.plan.add_bos_token))
            .with("add_eos_token", self.plan.add_eos_token.to_string());
        let key = match self.plan.max_text_tokens {
            None => key,
            Some(n_tokens) => key.with("tokenize_kwargs.max_length", n_tokens.to_string()),
        };
        match self.plan.kind {
            DataKind::Causal => key,
            DataKind::Sft => key
                .with("train_on_empty_answers", self.plan.train_on_empty_answers.to_string())
                .with("mask_inputs", self.plan.mask_inputs.to_string())
                .with("ignore_empty_think", self.plan.ignore_empty_think.to_string()),
        }
    }

    /// Renders rows in their order and passes each sample to `write`. Stops at the first error.
    pub(crate) fn render(
        &self,
        source: &dyn RowSource,
        format: &RowFormat,
        rows: &[u32],
        mut write: impl FnMut(u32, &Sample) -> Result<(), DataError> + Send,
    ) -> Result<(), DataError> {
        let mut write = |rendered: Vec<(u32, Result<Sample, DataError>)>| {
            rendered.into_iter().try_for_each(|(row, sample)| write(row, &sample?))
        };
        let render = |chunk: &[u32]| {
            let rows = chunk.par_iter().map(|&row| (row, self.row(source, format, row as usize)));
            rows.collect::<Vec<_>>()
        };
        let mut rendered = Vec::new();
        for chunk in rows.chunks(ROWS) {
            // Writes the rendered rows while the next ones are rendered.
            let (written, next) = rayon::join(|| write(rendered), || render(chunk));
            written?;
            rendered = next;
        }
        write(rendered)
    }

    fn row(&self, source: &dyn RowSource, format: &RowFormat, row: usize) -> Result<Sample, DataError> {
        let document = format.read(source, row)?;
        let sample = render_row(self.tokenizer, self.template.as_ref(), format, document, self.options());
        sample.map_err(|error| DataError::Row { place: source.locate(row), problem: error.to_string() })
    }

    /// Refuses chats without a chat template.
    pub(crate) fn check(&self, name: &str, format: &RowFormat) -> Result<(), DataError> {
        let is_chat = !matches!(format, RowFormat::Text(_) | RowFormat::PromptCompletion(_) | RowFormat::TokenIds(_));
        if !is_chat || self.template.is_some() {
            return Ok(());
        }
        let problem = format!(
            "its rows are chats ({}), but {} has no chat template; use a chat version of the model, or put a \
             chat_template.jinja next to its tokenizer",
            format.name(),
            self.tokenizer.directory().display()
        );
        Err(DataError::Plan { name: name.to_owned(), problem })
    }

    fn options(&self) -> RenderOptions {
        let empty_think = if self.plan.ignore_empty_think { EmptyThinkLoss::Mask } else { EmptyThinkLoss::Include };
        let empty_answers =
            if self.plan.train_on_empty_answers { EmptyAnswerLoss::Include } else { EmptyAnswerLoss::Mask };
        let DataPlan { add_bos_token, add_eos_token, max_text_tokens, .. } = *self.plan;
        let specials = TextSpecialTokens { add_bos_token, add_eos_token, max_text_tokens };
        RenderOptions { targets: self.targets(), empty_think, empty_answers, specials }
    }

    fn targets(&self) -> LossMask {
        match self.plan.kind {
            DataKind::Sft if self.plan.mask_inputs => LossMask::AssistantTokens,
            DataKind::Sft | DataKind::Causal => LossMask::AllTokens,
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
