//! A language model at hand: weights, tokenizer and chat template from a folder, to be asked, not trained.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::{DType, Device, Tensor};
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{AdapterFolder, Config, Model};
use candlewick_ops::{AttentionChoice, Seqs};
use candlewick_parallel::{Engine, EngineSpec, Groups, Layout, Micro, ZeroStage};
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::render::{RenderOptions, Sample, render_chat, render_prompt};
use candlewick_text::template::ChatTemplate;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use serde::Serialize;

use crate::generate::{FinishReason, GenerateOptions, Generated, Timings, generate};
use crate::held_out::{HeldOut, HeldOutSums};
use crate::parts::Parts;
use crate::text_stream::TextStream;
use crate::weights::{Origin, fill};
use candlewick_runtime::exit::ExitCode;

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

/// The text of a generation.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The new text, without special tokens.
    pub text: String,
    /// The reason for its end.
    pub finish_reason: FinishReason,
    /// The duration of the generation.
    pub timings: Timings,
}

/// A receiver of text as it is generated, which may end the generation.
pub type OnText<'a> = dyn FnMut(&str) -> Result<ControlFlow<()>> + 'a;

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
        let tokenizer = tokenizer_of(folder, adapter)?;
        let template = tokenizer.chat_template(None)?;
        let folders = std::iter::once(folder).chain(adapter).map(Path::to_owned).collect();
        let adapter = adapter.map(AdapterFolder::open).transpose()?;
        let config = Config::read(folder)?;
        parts.check(&config)?;
        let model = Model::new(config, adapter.as_ref().map(|adapter| adapter.config.clone()))?;
        // The head is computed for few tokens.
        let layout = Layout::balanced(model.n_blocks(), parts.stages, 1, 0.0);
        let zero_stage = parts.in_shares.then_some(ZeroStage::Three);
        let engine = EngineSpec { zero_stage, ..EngineSpec::inference(dtype, layout) }.build(model, groups, device)?;
        let base = Checkpoint::open(folder)?;
        adapter.as_ref().map_or(Ok(()), |adapter| adapter.check_base(&base))?;
        let base = Origin::Checkpoint(&base);
        let notes = fill(&engine, base, adapter.as_ref().map_or(base, |a| Origin::Checkpoint(&a.weights)))?;
        notes.iter().for_each(|note| tracing::warn!("{note}"));
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

    /// Returns the number of tokens that the model was made for.
    pub fn context(&self) -> usize {
        self.engine.model().config().max_positions()
    }

    /// Continues `text` as it stands.
    pub fn complete(&self, text: &str, options: &GenerateOptions, on_text: &mut OnText) -> Result<Answer> {
        let ids = self.tokenizer.encode(text, SpecialTokens::Include)?;
        complete(&self.engine, &self.tokenizer, &ids, options, on_text)
    }

    /// Answers a conversation, with the chat template's prompt for an answer behind it.
    pub fn chat(&self, chat: &Conversation, options: &GenerateOptions, on_text: &mut OnText) -> Result<Answer> {
        answer_chat(&self.engine, &self.tokenizer, self.chat_template()?, chat, options, on_text)
    }

    /// Returns the chat template, or an error where the model has none.
    pub fn chat_template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().with_context(|| {
            let folder = self.tokenizer.directory().display();
            format!(
                "failed to chat: {folder} has no chat template; use the chat version of the model, put a \
                 chat_template.jinja there, or continue plain text with `trainer generate \
                 --raw`"
            )
        })
    }

    /// Returns the log-probability of every token of `text`.
    pub fn score(&self, text: &str) -> Result<Vec<ScoredToken>> {
        let ids = self.tokenizer.encode(text, SpecialTokens::Include)?;
        ensure!(!ids.is_empty(), anyhow!("failed to score: the text has no tokens").context(ExitCode::Data));
        self.check_length("text", ids.len())?;
        let losses = self.engine.token_losses(&micro(&Sample::all_targets(ids.clone()), self.engine.device())?)?;
        if let Some(at) = losses[..ids.len() - 1].iter().position(|loss| !loss.is_finite()) {
            return Err(not_finite(&format!("token {} of the text", at + 1)));
        }
        let score = |(i, &id): (usize, &u32)| {
            let text = self.tokenizer.id_to_token(id).unwrap_or_default();
            ScoredToken { id, text, logprob: i.checked_sub(1).map(|before| -losses[before]) }
        };
        Ok(ids.iter().enumerate().map(score).collect())
    }

    /// Returns the mean loss of the targets of `samples`, each by itself, weighted by tokens. Each has the place that errors
    /// name.
    pub fn held_out(&self, samples: impl Iterator<Item = Result<(String, Sample)>>) -> Result<HeldOut> {
        let mut sums = HeldOutSums::default();
        for sample in samples {
            let (place, sample) = sample?;
            self.check_length(&place, sample.len())?;
            let n_targets = sample.is_target.iter().skip(1).filter(|is_target| **is_target).count();
            if n_targets == 0 {
                continue;
            }
            let loss = sums.add(&self.engine, &micro(&sample, self.engine.device())?, n_targets)?;
            ensure!(loss.is_finite(), not_finite(&place));
        }
        sums.over_ranks(self.engine.group())
    }

    fn check_length(&self, what: &str, n_tokens: usize) -> Result<()> {
        let context = self.context();
        ensure!(
            n_tokens <= context,
            anyhow!(
                "failed to score {what}: it has {n_tokens} tokens, but the model's context has {context} \
                 (max_position_embeddings)"
            )
            .context(ExitCode::Data)
        );
        Ok(())
    }
}

fn not_finite(what: &str) -> anyhow::Error {
    anyhow!(
        "failed to score {what}: its log-probability is not finite; the model's weights hold NaN, or numbers too large \
         for the dtype (try --dtype f32)"
    )
    .context(ExitCode::NonFinite)
}

/// Loads the tokenizer and chat template that an adapter was trained with, if its folder has them, else the model's. The
/// model's stop tokens are stop tokens of both.
fn tokenizer_of(folder: &Path, adapter: Option<&Path>) -> Result<Tokenizer> {
    let own = adapter.filter(|adapter| adapter.join("tokenizer.json").is_file());
    match own {
        Some(own) => Ok(Tokenizer::from_directory(own)?.with_eos_ids_from(folder)?),
        None => Ok(Tokenizer::from_directory(folder)?),
    }
}

/// One sequence. The first token is never a target.
fn micro(sample: &Sample, device: &Device) -> Result<Micro> {
    let target = |(id, is_target): (&u32, &bool)| if *is_target { i64::from(*id) } else { Micro::IGNORED };
    let mut targets: Vec<i64> = sample.ids.iter().zip(&sample.is_target).skip(1).map(target).collect();
    targets.push(Micro::IGNORED);
    Ok(Micro {
        ids: Tensor::new(sample.ids.as_slice(), device)?,
        targets: Tensor::new(targets, &Device::Cpu)?,
        positions: (0..sample.len() as u32).collect(),
        seqs: Seqs::packed(vec![0, sample.len()])?,
    })
}

/// Answers a conversation with the model in `engine`. The end of a turn in the template ends the answer, too.
pub fn answer_chat(
    engine: &Engine,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    chat: &Conversation,
    options: &GenerateOptions,
    on_text: &mut OnText,
) -> Result<Answer> {
    let prompt = render_prompt(tokenizer, template, &template.with_parsed_tool_arguments(chat))?;
    let stop = stops(tokenizer).into_iter().chain(end_of_turn(tokenizer, template)).collect::<Vec<_>>();
    answer(engine, tokenizer, &prompt, &stop, options, on_text)
}

/// Continues `prompt` with the model in `engine` up to a stop token of the tokenizer.
pub fn complete(
    engine: &Engine,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    options: &GenerateOptions,
    on_text: &mut OnText,
) -> Result<Answer> {
    answer(engine, tokenizer, prompt, &stops(tokenizer), options, on_text)
}

fn answer(
    engine: &Engine,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    stop: &[u32],
    options: &GenerateOptions,
    on_text: &mut OnText,
) -> Result<Answer> {
    let mut stream = TextStream::new(tokenizer);
    let mut on_token = |token| match stream.push(token)? {
        text if text.is_empty() => Ok(ControlFlow::Continue(())),
        text => on_text(&text),
    };
    let Generated { tokens, finish_reason, timings } = generate(engine, prompt, stop, options, &mut on_token)?;
    let rest = stream.finish()?;
    if !rest.is_empty() {
        let _ = on_text(&rest)?;
    }
    Ok(Answer { text: tokenizer.decode(&tokens, SpecialTokens::Exclude)?, finish_reason, timings })
}

fn stops(tokenizer: &Tokenizer) -> Vec<u32> {
    tokenizer.eos_ids().iter().copied().collect()
}

/// Returns the special token that ends an assistant's turn in a template, if one does. It may be no EOS of the tokenizer.
fn end_of_turn(tokenizer: &Tokenizer, template: &ChatTemplate) -> Option<u32> {
    let chat = Conversation::new([Message::new("user", "a"), Message::new("assistant", "b")]);
    let sample = render_chat(tokenizer, template, &chat, RenderOptions::default()).ok()?;
    let last = sample.is_target.iter().rposition(|is_target| *is_target)?;
    Some(sample.ids[last]).filter(|id| tokenizer.is_special(*id))
}
