//! Tokenization of conversations, prompts and texts, with a loss mask.

mod chat;

use std::path::PathBuf;

use crate::conversation::{ChatRole, Conversation};
use crate::format::{Document, RowFormat};
use crate::sample_warning::{SampleWarning, SampleWarnings};
use crate::template::{AddGenerationPrompt, ChatTemplate, TemplateError};
use crate::tokenizer::{SpecialTokens, Tokenizer, TokenizerError};
use chat::{begins_in_prompt, overlapping, refuse_dropped_text};

pub use chat::render_chat;

/// Tokenized training sample with its loss mask.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Token ids, `[n_tokens]`.
    pub ids: Vec<u32>,
    /// Loss mask, `[n_tokens]`: true if token `i` is a target, that is, its label is not -100.
    pub is_target: Vec<bool>,
    /// Warnings about the sample.
    pub sample_warnings: SampleWarnings,
}

impl Sample {
    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Creates a sample in which every token has loss.
    pub fn all_targets(ids: Vec<u32>) -> Self {
        Self { is_target: vec![true; ids.len()], ids, ..Self::default() }
    }

    /// Splits the sample into chunks of at most `max_length` tokens.
    pub fn slices(&self, max_length: usize) -> impl Iterator<Item = Self> {
        let pieces = self.ids.chunks(max_length).zip(self.is_target.chunks(max_length));
        pieces.map(|(ids, is_target)| Self { ids: ids.to_vec(), is_target: is_target.to_vec(), ..Self::default() })
    }

    /// Returns true if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Returns the number of tokens with loss.
    pub fn n_targets(&self) -> usize {
        self.is_target.iter().filter(|target| **target).count()
    }

    /// Returns true if the sample trains the model to stop.
    ///
    /// That holds if a target is one of the tokenizer's EOS tokens. It also holds if a run of targets ends with a
    /// special token, such as an end of turn.
    pub fn has_eos_target(&self, tokenizer: &Tokenizer) -> bool {
        let targets = (0..self.len()).filter(|token_idx| self.is_target[*token_idx]);
        targets.into_iter().any(|token_idx| {
            let id = self.ids[token_idx];
            let ends = !self.is_target.get(token_idx + 1).copied().unwrap_or(false);
            tokenizer.eos_ids().contains(&id) || (ends && tokenizer.is_special(id))
        })
    }

    /// Returns true if the sample begins with BOS twice.
    pub fn has_doubled_bos(&self, tokenizer: &Tokenizer) -> bool {
        tokenizer.has_doubled_bos(&self.ids)
    }
}

/// Tokens of a chat that have loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LossMask {
    /// Every turn of the roles with loss.
    #[default]
    Turns,
    /// The last turn of the roles with loss.
    LastTurn,
    /// Every token (`mask_inputs: false`).
    AllTokens,
}

/// Set of roles whose turns have loss. The default is the assistant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoleSet(u8);

impl RoleSet {
    /// Creates a set of roles.
    pub fn of(roles: impl IntoIterator<Item = ChatRole>) -> Self {
        Self(roles.into_iter().fold(0, |bits, role| bits | 1 << role as u8))
    }

    /// Returns true if the set has `role`.
    pub fn contains(self, role: ChatRole) -> bool {
        self.0 & 1 << role as u8 != 0
    }
}

impl Default for RoleSet {
    fn default() -> Self {
        Self::of([ChatRole::Assistant])
    }
}

/// Loss on the tokens that end turns, such as `<|im_end|>`: axolotl's `train_on_eos`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EosLoss {
    /// The ends of the turns with loss.
    #[default]
    Turn,
    /// The ends of all turns.
    All,
    /// The end of the last turn with loss.
    Last,
    /// No end of turn.
    None,
}

/// Form in which a prompt and its completion, both strings, are rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PromptForm {
    /// A chat of two messages, if there is a chat template.
    #[default]
    Chat,
    /// Plain text, without the chat template. Conversations are refused.
    Text,
}

/// Loss on the empty `<think></think>` that some templates put before an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EmptyThinkLoss {
    /// The empty block has loss.
    #[default]
    Include,
    /// The empty block is masked (`ignore_empty_think: true`).
    Mask,
}

/// Loss on assistant messages without content, tool calls and reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EmptyAnswerLoss {
    /// The end-of-turn token is masked.
    #[default]
    Mask,
    /// The end-of-turn token has loss (`train_on_empty_answers: true`).
    Include,
}

/// Special tokens around text that is rendered without a chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextSpecialTokens {
    /// Adds BOS before the text. `None` follows the tokenizer's configuration.
    pub add_bos_token: Option<bool>,
    /// Adds EOS after the text, as a document separator.
    pub add_eos_token: bool,
    /// Tokens after which a text is cut, without special tokens. `None` cuts nothing.
    pub max_text_tokens: Option<usize>,
}

impl Default for TextSpecialTokens {
    fn default() -> Self {
        Self { add_bos_token: None, add_eos_token: true, max_text_tokens: None }
    }
}

/// Options of rendering a document to a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RenderOptions {
    /// Tokens that have loss.
    pub targets: LossMask,
    /// Roles whose turns have loss.
    pub roles: RoleSet,
    /// Loss on the ends of turns.
    pub eos: EosLoss,
    /// Form of prompts with completions.
    pub prompt_form: PromptForm,
    /// Loss on an empty `<think></think>`.
    pub empty_think: EmptyThinkLoss,
    /// Loss on empty assistant messages.
    pub empty_answers: EmptyAnswerLoss,
    /// Special tokens around text without a chat template.
    pub specials: TextSpecialTokens,
}

/// Error of rendering a document to token ids.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The chat template fails.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A message must be masked, but the template's generation blocks do not show its text.
    #[error(
        "leave out message {message} (it is empty, not rendered or of weight 0): chat template {template} has generation blocks that are \
         not printed in their own message's turn; put each inside the loop over the messages"
    )]
    CannotMaskMessage {
        /// Index of the first message to mask.
        message: usize,
        /// File or argument of the template.
        template: String,
    },
    /// The tokenizer has no chat template for a chat.
    #[error("render a chat: {} has no chat template; use the model's chat version, or put a chat_template.jinja there", .0.display())]
    NoTemplate(PathBuf),
    /// A conversation in data that are rendered without a chat template.
    #[error("render a chat without its template: the row has a list of messages; remove `apply_chat_template: false`")]
    TemplateOff,
    /// BOS is requested, but the tokenizer has no `bos_token`.
    #[error("add BOS to a text: the tokenizer names no bos_token; remove `data.add_bos_token`")]
    NoBosToken,
    /// The tokenizer drops all characters of the text.
    #[error(
        "tokenize {text:?}: the tokenizer has no token for any of its characters; the vocabulary of its \
         tokenizer.json may be empty or of another model"
    )]
    OnlyUnknownCharacters {
        /// Beginning of the text.
        text: String,
    },
    /// A tokenized row has an id that the tokenizer lacks.
    #[error("use token id {id}: the tokenizer in {} has no such token; tokenize the data with it", .folder.display())]
    UnknownTokenId {
        /// The id.
        id: u32,
        /// The tokenizer's folder.
        folder: PathBuf,
    },
    /// A tokenized row of a chat has no loss mask.
    #[error(
        "find targets: the tokenized row has no column `labels`; add it, or set `data.mask_inputs: false` to train on all tokens"
    )]
    NoLabels,
    /// The tokenizer fails.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Renders a document that `format` read, and warns about roles that neither the mapping nor chat templates define.
pub fn render_row(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    format: &RowFormat,
    document: Document,
    options: RenderOptions,
) -> Result<Sample, RenderError> {
    let has_unknown_role = format.has_unknown_role(&document);
    let mut sample = render_document(tokenizer, template, document, options)?;
    if has_unknown_role {
        sample.sample_warnings.insert(SampleWarning::UnknownRole);
    }
    Ok(sample)
}

/// Renders a document to a sample, for training and evaluation.
///
/// The template renders chats. A prompt and its completion become a chat if there is a template, unless
/// `options.prompt_form` is text. Plain text is tokenized without a template.
pub fn render_document(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    document: Document,
    options: RenderOptions,
) -> Result<Sample, RenderError> {
    let is_chat = template.is_some() && options.prompt_form == PromptForm::Chat;
    let document = if is_chat { document.into_chat() } else { document };
    let mut sample = match (&document, template) {
        (Document::Text(text), _) => text_sample(tokenizer, text, options.specials, options.eos)?,
        (Document::Tokens { ids, is_target }, _) => tokenized(tokenizer, ids, is_target.as_deref(), options.targets)?,
        (Document::PromptCompletion { prompt, completion }, _) => {
            render_completion(tokenizer, prompt, completion, options)?
        }
        (Document::Conversation(_), _) if options.prompt_form == PromptForm::Text => {
            return Err(RenderError::TemplateOff);
        }
        (Document::Conversation(chat), Some(template)) => {
            return render_chat(tokenizer, template, &template.with_parsed_tool_arguments(chat), options);
        }
        (Document::Conversation(_), None) => return Err(RenderError::NoTemplate(tokenizer.directory().to_owned())),
    };
    if options.targets == LossMask::AllTokens && options.eos != EosLoss::None {
        sample.is_target.fill(true);
    }
    Ok(sample)
}

/// Returns the sample of a tokenized row. Chats need its loss mask.
fn tokenized(
    tokenizer: &Tokenizer,
    ids: &[u32],
    is_target: Option<&[bool]>,
    targets: LossMask,
) -> Result<Sample, RenderError> {
    if let Some(id) = ids.iter().max().filter(|id| tokenizer.id_to_token(**id).is_none()) {
        return Err(RenderError::UnknownTokenId { id: *id, folder: tokenizer.directory().to_owned() });
    }
    let is_target = match (is_target, targets) {
        (Some(is_target), _) => is_target.to_vec(),
        (None, LossMask::AllTokens) => vec![true; ids.len()],
        (None, LossMask::Turns | LossMask::LastTurn) => return Err(RenderError::NoLabels),
    };
    Ok(Sample { ids: ids.to_vec(), is_target, ..Sample::default() })
}

/// Renders a chat with the generation prompt and returns its token ids.
pub fn render_prompt(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    chat: &Conversation,
) -> Result<Vec<u32>, RenderError> {
    let text = template.render(chat, AddGenerationPrompt::Yes)?;
    Ok(tokenizer.encode(&text, SpecialTokens::Exclude)?)
}

/// Renders plain text, followed by EOS. Every token has loss. Blank text gives no tokens.
pub fn render_text(tokenizer: &Tokenizer, text: &str, specials: TextSpecialTokens) -> Result<Sample, RenderError> {
    text_sample(tokenizer, text, specials, EosLoss::Turn)
}

fn text_sample(
    tokenizer: &Tokenizer,
    text: &str,
    specials: TextSpecialTokens,
    eos: EosLoss,
) -> Result<Sample, RenderError> {
    if text.trim().is_empty() {
        return Ok(Sample::default());
    }
    let mut ids = tokenizer.encode(text, SpecialTokens::Exclude)?;
    if ids.is_empty() {
        return Err(no_tokens(text));
    }
    ids.truncate(specials.max_text_tokens.unwrap_or(usize::MAX));
    surround(tokenizer, Sample::all_targets(ids), specials, eos)
}

/// Renders a prompt and its completion without a chat template: BOS, both texts as one, EOS.
///
/// The completion and EOS have loss, as `options` say. After an empty completion, `empty_answers` decides.
pub fn render_completion(
    tokenizer: &Tokenizer,
    prompt: &str,
    completion: &str,
    options: RenderOptions,
) -> Result<Sample, RenderError> {
    let text = [prompt, completion].concat();
    let encoded = tokenizer.encode_with_offsets(&text)?;
    refuse_dropped_text(tokenizer, &text, &encoded)?;
    let mut sample_warnings = SampleWarnings::default();
    if begins_in_prompt(&encoded, &(prompt.len()..text.len())) {
        sample_warnings.insert(SampleWarning::TokenSpansPromptBoundary);
    }
    let first = if options.targets == LossMask::AllTokens { 0 } else { prompt.len() };
    let is_target = overlapping(&encoded, std::slice::from_ref(&(first..text.len())));
    let sample = Sample { ids: encoded.ids, is_target, sample_warnings };
    let mut sample = surround(tokenizer, sample, options.specials, options.eos)?;
    if completion.trim().is_empty() {
        sample.sample_warnings.insert(SampleWarning::EmptyResponse);
        if options.empty_answers == EmptyAnswerLoss::Mask {
            sample.is_target.fill(false);
        }
    }
    Ok(sample)
}

/// Adds BOS without loss and EOS, which has loss unless `eos` excludes it.
fn surround(
    tokenizer: &Tokenizer,
    sample: Sample,
    specials: TextSpecialTokens,
    eos: EosLoss,
) -> Result<Sample, RenderError> {
    let own = tokenizer.post_processor_tokens();
    let before = match specials.add_bos_token {
        None => own.before.clone(),
        Some(false) => Vec::new(),
        Some(true) => vec![tokenizer.bos().ok_or(RenderError::NoBosToken)?.id],
    };
    let after = match (specials.add_eos_token, tokenizer.eos()) {
        (true, Some(eos)) if own.after.is_empty() => vec![eos.id],
        (true, _) => own.after.clone(),
        (false, _) => Vec::new(),
    };
    let (n_before, n_after) = (before.len(), after.len());
    Ok(Sample {
        ids: [before, sample.ids, after].concat(),
        is_target: [vec![false; n_before], sample.is_target, vec![eos != EosLoss::None; n_after]].concat(),
        sample_warnings: sample.sample_warnings,
    })
}

fn no_tokens(text: &str) -> RenderError {
    RenderError::OnlyUnknownCharacters { text: text.chars().take(40).collect() }
}
