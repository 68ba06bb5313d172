//! A language model at hand: weights, tokenizer and chat template from a folder, to be asked, not trained.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candlewick_comm::Solo;
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{AdapterFolder, Config, Model};
use candlewick_ops::{AttentionChoice, Seqs};
use candlewick_parallel::{
    Engine, Formats, Groups, Layout, Micro, Mode, Norms, ParamStore, Pipeline, Residency, Schedule, Sharded,
};
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::template::{ChatTemplate, Ending};
use candlewick_text::tokenizer::{Specials, Tokenizer};
use serde::Serialize;

use crate::generate::{GenerateOptions, Timings, generate};
use crate::held_out::{HeldOut, HeldOutSums};
use crate::parts::Parts;
use crate::weights::{Origin, fill};

/// A model that answers.
pub struct Lm {
    engine: Engine,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    /// The model's own, and the adapter's.
    folders: Vec<PathBuf>,
    dtype: DType,
    attention: AttentionChoice,
}

/// What speaks for a model: its engine, wherever that came from, and its way with tokens.
#[derive(Clone, Copy)]
pub struct Voice<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) tokenizer: &'a Tokenizer,
    /// Where `generation_config.json` is, if there is one.
    pub(crate) generation_config: Option<&'a Path>,
}

/// What a model said, and how long it took.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its words.
    pub text: String,
    /// The time of the generation.
    pub timings: Timings,
}

/// A token and how likely it was after those before it.
#[derive(Clone, Debug, Serialize)]
pub struct ScoredToken {
    /// The token's id.
    pub id: u32,
    /// Its text.
    pub text: String,
    /// Its log-probability in nats; `None` for the first token, which nothing precedes.
    pub logprob: Option<f32>,
}

impl<'a> Voice<'a> {
    /// Speaks for a model in training. The first of `folders` that has a `generation_config.json` gives it, as in an export.
    pub fn new(engine: &'a Engine, tokenizer: &'a Tokenizer, folders: impl IntoIterator<Item = &'a Path>) -> Self {
        let mut folders = folders.into_iter();
        let generation_config = folders.find(|folder| folder.join("generation_config.json").is_file());
        Self { engine, tokenizer, generation_config }
    }
}

impl Lm {
    /// Loads a Hugging Face folder, and an adapter folder on top of it, with weights in `dtype` on `device`.
    pub fn load(folder: &Path, adapter: Option<&Path>, dtype: DType, device: Device) -> Result<Self> {
        Self::load_in_parts(folder, adapter, dtype, device, (Parts::WHOLE, &Parts::alone()?))
    }

    /// The same, this rank's part of it; the others of its `groups` load theirs.
    pub fn load_in_parts(
        folder: &Path,
        adapter: Option<&Path>,
        dtype: DType,
        device: Device,
        (parts, groups): (Parts, &Groups),
    ) -> Result<Self> {
        let tokenizer = Tokenizer::from_directory(folder)?;
        let template = tokenizer.chat_template(None)?;
        let folders = std::iter::once(folder).chain(adapter).map(Path::to_owned).collect();
        let adapter = adapter.map(AdapterFolder::open).transpose()?;
        let config = Config::read(folder)?;
        parts.check(&config)?;
        let model = Model::new(config, adapter.as_ref().map(|adapter| adapter.config.clone()))?;
        // The head is computed for few tokens.
        let layout = Layout::balanced(model.n_blocks(), parts.stages, 1, 0.0);
        let sharing = groups.sharing(parts.in_shares.then_some(Sharded::Weights), layout.clone(), Norms::Whole);
        let store = ParamStore::new(&model, Formats::computing_in(dtype), Mode::Infer, &device, sharing)?;
        let base = Checkpoint::open(folder)?;
        let base = Origin::Checkpoint(&base);
        let notes = fill(&store, &model, base, adapter.as_ref().map_or(base, |a| Origin::Checkpoint(&a.weights)))?;
        notes.iter().for_each(|note| tracing::warn!("{note}"));
        let residency = vec![Residency::Keep; model.n_blocks()];
        let pipeline = Pipeline::new(Arc::clone(&groups.stages), layout, Schedule::default())?;
        let mut engine = Engine::new(model, store, residency, Arc::new(Solo), device).with_pipeline(pipeline);
        if parts.tensor > 1 {
            engine = engine.with_tensor(groups.tensor_ranks(Norms::Whole));
        }
        Ok(Self { engine, tokenizer, template, folders, dtype, attention: AttentionChoice::default() })
    }

    /// The same model with its attention computed as `attention` says.
    pub fn with_attention(self, attention: AttentionChoice) -> Self {
        Self { engine: self.engine.with_attention(attention), attention, ..self }
    }

    /// Returns the engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns what speaks for it.
    pub fn voice(&self) -> Voice<'_> {
        Voice::new(&self.engine, &self.tokenizer, [self.folder()])
    }

    /// Returns the model's folder.
    pub fn folder(&self) -> &Path {
        &self.folders[0]
    }

    /// Returns the model's folder, and the adapter's if there is one.
    pub fn folders(&self) -> impl Iterator<Item = &Path> {
        self.folders.iter().map(PathBuf::as_path)
    }

    /// Returns the number format that it computes in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns what computes its attention.
    pub fn attention(&self) -> AttentionChoice {
        self.attention
    }

    /// Returns the chat template, if the model has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Continues `text` as it stands.
    pub fn complete(&self, text: &str, options: &GenerateOptions) -> Result<Answer> {
        let ids = self.tokenizer.encode(text, Specials::Add)?;
        complete(&self.engine, &self.tokenizer, &ids, options)
    }

    /// Answers `prompt` as the user's turn of a chat.
    pub fn chat(&self, prompt: &str, options: &GenerateOptions) -> Result<Answer> {
        let template = self.template.as_ref().context("failed to chat: the model has no chat template")?;
        chat(&self.engine, &self.tokenizer, template, prompt, options)
    }

    /// Returns the log-probability of every token of `text`.
    pub fn score(&self, text: &str) -> Result<Vec<ScoredToken>> {
        let ids = self.tokenizer.encode(text, Specials::Add)?;
        ensure!(!ids.is_empty(), "failed to score: the text has no tokens");
        let losses = self.engine.token_losses(&micro(&ids, self.engine.device())?)?;
        let score = |(i, &id): (usize, &u32)| {
            let text = self.tokenizer.id_to_token(id).unwrap_or_default();
            ScoredToken { id, text, logprob: i.checked_sub(1).map(|before| -losses[before]) }
        };
        Ok(ids.iter().enumerate().map(score).collect())
    }

    /// Returns the mean loss of `texts`, each by itself, weighted by tokens.
    pub fn held_out(&self, texts: impl Iterator<Item = Result<String>>) -> Result<HeldOut> {
        let mut sums = HeldOutSums::default();
        for text in texts {
            let ids = self.tokenizer.encode(&text?, Specials::Add)?;
            if ids.len() > 1 {
                sums.add(&self.engine, &micro(&ids, self.engine.device())?, ids.len() - 1)?;
            }
        }
        sums.over_ranks(self.engine.group())
    }
}

/// One sequence, each token of which but the first is a target.
fn micro(ids: &[u32], device: &Device) -> Result<Micro> {
    let mut targets: Vec<i64> = ids[1..].iter().map(|&id| i64::from(id)).collect();
    targets.push(Micro::IGNORED);
    Ok(Micro {
        ids: Tensor::new(ids, device)?,
        targets: Tensor::new(targets, &Device::Cpu)?,
        positions: (0..ids.len() as u32).collect(),
        seqs: Seqs::packed(vec![0, ids.len()])?,
    })
}

/// Answers `prompt` as the user's turn of a chat with the model in `engine`.
pub fn chat(
    engine: &Engine,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    prompt: &str,
    options: &GenerateOptions,
) -> Result<Answer> {
    let conversation = Conversation::new([Message::new("user", prompt)]);
    let text = template.render(&conversation, Ending::GenerationPrompt)?;
    complete(engine, tokenizer, &tokenizer.encode(&text, Specials::Omit)?, options)
}

/// Continues `prompt` with the model in `engine` up to a stop token of the tokenizer.
pub fn complete(engine: &Engine, tokenizer: &Tokenizer, prompt: &[u32], options: &GenerateOptions) -> Result<Answer> {
    let stop: Vec<u32> = tokenizer.eos_ids().iter().copied().collect();
    let (tokens, timings) = generate(engine, prompt, &stop, options)?;
    Ok(Answer { text: tokenizer.decode(&tokens, Specials::Omit)?, timings })
}
