//! A language model for inference: weights, tokenizer and chat template.

mod loss;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Device};
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{AdapterFolder, FP8_SCALES, Model, read_fp8_scales};
use candlewick_ops::AttentionChoice;
use candlewick_parallel::{Engine, EngineSpec, ParallelGroups, PipelineLayout, ZeroStage};
use candlewick_text::conversation::Conversation;
use candlewick_text::files::is_present;
use candlewick_text::render::{end_of_turn, render_prompt};
use candlewick_text::template::{AddGenerationPrompt, ChatTemplate, ChatTemplateSource, Clock};
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

pub use loss::TokenLogprob;

use crate::generate::{FinishReason, GenerateOptions, GeneratedTokens, Timings, generate};
use crate::parallel_config::ParallelConfig;
use crate::text_stream::StoppableText;
use crate::weights::{WeightSource, load_weights};
use candlewick_runtime::exit::ExitCode;

/// A language model with its tokenizer and chat template.
pub struct Lm {
    engine: Engine,
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
    /// Model folder, then the adapter folder if there is one.
    folders: Vec<PathBuf>,
    dtype: DType,
    attention: AttentionChoice,
    parallel: (ParallelConfig, ParallelGroups),
}

/// A borrowed model for evaluation: engine and tokenizer, also of a model in training.
#[derive(Clone, Copy)]
pub struct LmHandle<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) tokenizer: &'a Tokenizer,
    /// Folder of `generation_config.json`, if there is one.
    pub(crate) generation_config: Option<&'a Path>,
}

/// Result of a generation, as text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GeneratedText {
    /// Generated text, without special tokens.
    pub text: String,
    /// Reason why the generation ended.
    pub finish_reason: FinishReason,
    /// Timings of the generation.
    pub timings: Timings,
}

/// Callback that receives text as it is generated, and may stop the generation.
pub type OnText<'a> = dyn FnMut(&str) -> Result<ControlFlow<()>> + 'a;

impl<'a> LmHandle<'a> {
    /// Creates a handle of a model in training. `generation_config.json` is read from the first of `folders` that has
    /// one.
    pub fn new(engine: &'a Engine, tokenizer: &'a Tokenizer, folders: impl IntoIterator<Item = &'a Path>) -> Self {
        let mut folders = folders.into_iter();
        let generation_config = folders.find(|folder| is_present(&folder.join("generation_config.json")));
        Self { engine, tokenizer, generation_config }
    }
}

impl Lm {
    /// Loads a Hugging Face model folder, and optionally a PEFT adapter, with weights in `dtype` on `device`.
    pub fn load(folder: &Path, adapter: Option<&Path>, dtype: DType, device: Device) -> Result<Self> {
        Self::load_sharded(
            folder,
            adapter,
            dtype,
            device,
            (ParallelConfig::SINGLE_RANK, &ParallelConfig::single_rank_groups()?),
        )
    }

    /// Loads this rank's shard of a model. Collective: all ranks of `groups` must call it.
    pub fn load_sharded(
        folder: &Path,
        adapter: Option<&Path>,
        dtype: DType,
        device: Device,
        parallel: (ParallelConfig, &ParallelGroups),
    ) -> Result<Self> {
        Self::load_sharing((folder, adapter), dtype, device, parallel, None)
    }

    /// Loads a PEFT adapter on top of this model, or none. This model must have none. Both models share the base weights, unless
    /// the adapter replaces some.
    /// Collective: all ranks of the model's groups must call it.
    pub fn with_adapter(&self, adapter: Option<&Path>) -> Result<Self> {
        let (config, groups) = &self.parallel;
        let (folders, device) = ((self.folder(), adapter), self.engine.device().clone());
        let adapted = Self::load_sharing(folders, self.dtype, device, (*config, groups), Some(&self.engine))?;
        Ok(adapted.with_attention(self.attention))
    }

    /// Loads this rank's shard of a model. The frozen weights of `base` are shared.
    fn load_sharing(
        (folder, adapter): (&Path, Option<&Path>),
        dtype: DType,
        device: Device,
        (parallel_config, groups): (ParallelConfig, &ParallelGroups),
        base: Option<&Engine>,
    ) -> Result<Self> {
        let tokenizer = tokenizer_of(folder, adapter)?;
        let template = tokenizer.chat_template(None)?;
        let folders = std::iter::once(folder).chain(adapter).map(Path::to_owned).collect();
        let adapter = adapter.map(AdapterFolder::open).transpose()?;
        let (config, weights) = match &adapter {
            Some(adapter) => adapter.open_base(folder)?,
            None => Checkpoint::open_with_config(folder)?,
        };
        let base = base.filter(|_| adapter.as_ref().is_none_or(|adapter| adapter.replacements().is_empty()));
        parallel_config.check_can_split(&config)?;
        let model = Model::new(config, adapter.as_ref().map(|adapter| adapter.config.clone()))?;
        // The output layer runs on few tokens, so its cost is neglected.
        let layout = PipelineLayout::balanced(model.n_blocks(), parallel_config.pipeline_parallel, 1, 0.0);
        let zero_stage = parallel_config.zero3.then_some(ZeroStage::Three);
        let spec = EngineSpec { zero_stage, ..EngineSpec::inference(dtype, layout) };
        let engine = spec.build_sharing(model, groups, device, base)?;
        let base = WeightSource::Checkpoint(&weights);
        let notes =
            load_weights(&engine, base, adapter.as_ref().map_or(base, |a| WeightSource::Checkpoint(&a.weights)))?;
        notes.iter().for_each(|note| tracing::warn!("{note}"));
        let (tokenizer, template) = (Arc::new(tokenizer), template.map(Arc::new));
        let (attention, parallel) = (AttentionChoice::default(), (parallel_config, groups.clone()));
        Ok(Self { engine, tokenizer, template, folders, dtype, attention, parallel })
    }

    /// Sets the attention implementation.
    pub fn with_attention(self, attention: AttentionChoice) -> Self {
        Self { engine: self.engine.with_attention(attention), attention, ..self }
    }

    /// Makes linear layers multiply in FP8 with the scales that a run with delayed scaling stored in its export: the adapter
    /// folder, or the model folder without an adapter.
    ///
    /// # Errors
    /// If the folder has no scales, scales of other layers, or those of some layers only.
    pub fn with_fp8_scales(self) -> Result<Self> {
        let folder = self.folders.last().expect("a model has a folder");
        let scales = read_fp8_scales(folder, self.engine.model().config()).context("failed to quantize to FP8")?;
        let Some(scales) = scales else {
            let error = anyhow!(
                "failed to quantize to FP8: {} has no {FP8_SCALES}, the scales of inputs and weights; choose the export of a \
                 run with `precision.recipe: delayed`",
                folder.display()
            );
            return Err(error.context(ExitCode::Usage));
        };
        let engine = self.engine.with_fp8_scales(&scales);
        let path = folder.join(FP8_SCALES);
        let engine = engine.map_err(|error| {
            let remedy = "take the file of this model's run, or export the run again";
            anyhow!("failed to quantize to FP8 with {}: {error}; {remedy}", path.display())
                .context(ExitCode::Checkpoint)
        })?;
        Ok(Self { engine, ..self })
    }

    /// Returns true if linear layers multiply in FP8.
    pub fn multiplies_in_fp8(&self) -> bool {
        self.engine.store().fp8().is_some()
    }

    /// Returns the engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns a handle for evaluation.
    pub fn handle(&self) -> LmHandle<'_> {
        LmHandle::new(&self.engine, &self.tokenizer, [self.folder()])
    }

    /// Returns the model's folder.
    pub fn folder(&self) -> &Path {
        &self.folders[0]
    }

    /// Returns the model folder, and the adapter folder if there is one.
    pub fn folders(&self) -> impl Iterator<Item = &Path> {
        self.folders.iter().map(PathBuf::as_path)
    }

    /// Returns the compute dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the attention implementation.
    pub fn attention(&self) -> AttentionChoice {
        self.attention
    }

    /// Returns the chat template, if the model has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_deref()
    }

    /// Returns a shared reference to the chat template, if the model has one.
    pub fn shared_template(&self) -> Option<Arc<ChatTemplate>> {
        self.template.clone()
    }

    /// Replaces the chat template.
    ///
    /// # Errors
    /// If the source is invalid, or the tokenizer lacks the markers of a built-in template.
    pub fn with_chat_template(self, source: &ChatTemplateSource) -> Result<Self> {
        let template = source.compile(&self.tokenizer).map_err(|error| anyhow!("failed to {error}"))?;
        Ok(Self { template: Some(Arc::new(template)), ..self })
    }

    /// Sets variables of the chat template, such as `enable_thinking`.
    ///
    /// # Errors
    /// If the model has no chat template.
    pub fn with_template_variables(self, variables: &Map<String, Json>) -> Result<Self> {
        if variables.is_empty() {
            return Ok(self);
        }
        let template = with_variables(self.chat_template()?.clone(), variables);
        Ok(Self { template: Some(Arc::new(template)), ..self })
    }

    /// Sets the clock of the chat template. Ranks that compute together need equal prompts, so they use one clock.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        let template = self.template.as_deref().map(|template| Arc::new(template.clone().with_clock(clock)));
        Self { template, ..self }
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Returns the context length, in tokens.
    pub fn context(&self) -> usize {
        self.engine.model().config().max_positions()
    }

    /// Generates a completion of `text`, without a chat template.
    pub fn complete(&self, text: &str, options: &GenerateOptions, on_text: &mut OnText) -> Result<GeneratedText> {
        let ids = self.tokenizer.encode(text, SpecialTokens::Include)?;
        complete(&self.engine, &self.tokenizer, &ids, options, on_text)
    }

    /// Generates the assistant's reply to a conversation, with the chat template's generation prompt.
    pub fn chat(&self, chat: &Conversation, options: &GenerateOptions, on_text: &mut OnText) -> Result<GeneratedText> {
        answer_chat(&self.engine, &self.tokenizer, self.chat_template()?, chat, options, on_text)
    }

    /// Returns the chat template.
    ///
    /// # Errors
    /// If the model has none.
    pub fn chat_template(&self) -> Result<&ChatTemplate> {
        self.template.as_deref().with_context(|| {
            let folder = self.tokenizer.directory().display();
            format!(
                "failed to chat: {folder} has no chat template; use the chat version of the model, choose a template \
                 with --chat-template (chatml, llama3, ...), or continue plain text with `trainer generate --raw`"
            )
        })
    }
}

/// Loads tokenizer and chat template from the adapter folder if it has them, else from the model folder. The model's
/// stop tokens apply to both.
fn tokenizer_of(folder: &Path, adapter: Option<&Path>) -> Result<Tokenizer> {
    let own = adapter.filter(|adapter| is_present(&adapter.join("tokenizer.json")));
    match own {
        Some(own) => Ok(Tokenizer::from_directory(own)?.with_eos_ids_from(folder)?),
        None => Ok(Tokenizer::from_directory(folder)?),
    }
}

/// Generates the assistant's reply with the model in `engine`. The template's end-of-turn token is a stop token, too.
pub fn answer_chat(
    engine: &Engine,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    chat: &Conversation,
    options: &GenerateOptions,
    on_text: &mut OnText,
) -> Result<GeneratedText> {
    let prompt = render_prompt(tokenizer, template, &template.adapt(chat))?;
    let stop = stops(tokenizer).into_iter().chain(end_of_turn(tokenizer, template)).collect::<Vec<_>>();
    answer(engine, tokenizer, &prompt, &stop, options, on_text)
}

/// Logs a warning if the chat template does not render the whole conversation.
pub(crate) fn warn_of_unrendered_parts(template: &ChatTemplate, chat: &Conversation) {
    let chat = template.adapt(chat);
    let parts = template.unrendered_parts(&chat, AddGenerationPrompt::Yes).describe(&chat);
    if !parts.is_empty() {
        tracing::warn!("the chat template does not render {}: the model does not see it", parts.join(", "));
    }
}

/// Generates a completion of `prompt` with the model in `engine`, up to a stop token of the tokenizer.
pub fn complete(
    engine: &Engine,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    options: &GenerateOptions,
    on_text: &mut OnText,
) -> Result<GeneratedText> {
    answer(engine, tokenizer, prompt, &stops(tokenizer), options, on_text)
}

fn answer(
    engine: &Engine,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    stop: &[u32],
    options: &GenerateOptions,
    on_text: &mut OnText,
) -> Result<GeneratedText> {
    let stop: Vec<u32> = stop.iter().copied().chain(special_stops(tokenizer, &options.stop)).collect();
    let mut stream = StoppableText::new(tokenizer, &options.stop);
    let mut whole = String::new();
    let mut emit = |text: String| {
        whole += &text;
        if text.is_empty() { Ok(ControlFlow::Continue(())) } else { on_text(&text) }
    };
    let mut on_token = |token| {
        let flow = emit(stream.push(token)?)?;
        Ok(if stream.has_stopped() { ControlFlow::Break(()) } else { flow })
    };
    let GeneratedTokens { finish_reason, timings, .. } = generate(engine, prompt, &stop, options, &mut on_token)?;
    let _ = emit(stream.finish()?)?;
    let finish_reason = if stream.has_stopped() { FinishReason::Stop } else { finish_reason };
    Ok(GeneratedText { text: whole, finish_reason, timings })
}

/// Returns the special tokens among stop strings. A text without special tokens does not contain them.
pub(crate) fn special_stops(tokenizer: &Tokenizer, stop: &[String]) -> impl Iterator<Item = u32> {
    stop.iter().filter_map(|stop| tokenizer.token_to_id(stop)).filter(|id| tokenizer.is_special(*id))
}

fn stops(tokenizer: &Tokenizer) -> Vec<u32> {
    tokenizer.eos_ids().iter().copied().collect()
}

/// Sets variables of a chat template.
pub(crate) fn with_variables(template: ChatTemplate, variables: &Map<String, Json>) -> ChatTemplate {
    let set = |template: ChatTemplate, (name, value): (&String, &Json)| template.with_variable(name, value.clone());
    variables.iter().fold(template, set)
}
