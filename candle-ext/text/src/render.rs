//! Tokenization of conversations, prompts and texts, with a loss mask.

use std::ops::Range;
use std::path::PathBuf;

use crate::conversation::{Conversation, Message};
use crate::format::{Document, RowFormat};
use crate::sample_warning::{SampleWarning, SampleWarnings};
use crate::template::{AddGenerationPrompt, AssistantSpan, ChatTemplate, TemplateError};
use crate::tokenizer::{Encoding, SpecialTokens, Tokenizer, TokenizerError};

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
    /// Every assistant turn, including its end-of-turn token.
    #[default]
    AssistantTokens,
    /// The last assistant turn only.
    LastAssistantTurn,
    /// Every token (`mask_inputs: false`).
    AllTokens,
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
/// The template renders chats. A prompt and its completion become a chat if there is a template. Plain text is
/// tokenized without a template.
pub fn render_document(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    document: Document,
    options: RenderOptions,
) -> Result<Sample, RenderError> {
    let document = if template.is_some() { document.into_chat() } else { document };
    let mut sample = match (&document, template) {
        (Document::Text(text), _) => render_text(tokenizer, text, options.specials)?,
        (Document::Tokens { ids, is_target }, _) => tokenized(tokenizer, ids, is_target.as_deref(), options.targets)?,
        (Document::PromptCompletion { prompt, completion }, _) => {
            render_completion(tokenizer, prompt, completion, options)?
        }
        (Document::Conversation(chat), Some(template)) => {
            render_chat(tokenizer, template, &template.with_parsed_tool_arguments(chat), options)?
        }
        (Document::Conversation(_), None) => return Err(RenderError::NoTemplate(tokenizer.directory().to_owned())),
    };
    if options.targets == LossMask::AllTokens {
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
        (None, LossMask::AssistantTokens | LossMask::LastAssistantTurn) => return Err(RenderError::NoLabels),
    };
    Ok(Sample { ids: ids.to_vec(), is_target, ..Sample::default() })
}

/// Renders a chat with the template, and sets loss on the assistant's tokens.
///
/// The text is rendered and tokenized once. A token has loss if it overlaps text of the assistant. The template
/// writes BOS; no special tokens are added.
pub fn render_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    chat: &Conversation,
    options: RenderOptions,
) -> Result<Sample, RenderError> {
    let (mut sample_warnings, lost) = examine(template, chat);
    if options.targets == LossMask::AllTokens {
        let text = template.render(chat, AddGenerationPrompt::No)?;
        let ids = tokenizer.encode(&text, SpecialTokens::Exclude)?;
        return Ok(Sample { is_target: vec![true; ids.len()], ids, sample_warnings });
    }
    let is_empty = |idx: usize| lost[idx] == Some(SampleWarning::EmptyResponse) && chat.messages[idx].is_trained_on();
    if (0..lost.len()).any(is_empty) {
        sample_warnings.insert(SampleWarning::EmptyResponse);
    }
    let is_trained_on = |idx: usize| {
        let is_kept = match lost[idx] {
            Some(SampleWarning::EmptyResponse) => options.empty_answers == EmptyAnswerLoss::Include,
            lost => lost.is_none(),
        };
        is_kept && chat.messages[idx].is_trained_on()
    };
    let rendered = template.render_turns(chat)?;
    let mut spans = spans_with_loss(template, chat, rendered.spans, is_trained_on)?;
    if options.targets == LossMask::LastAssistantTurn {
        keep_last_turn(&mut spans);
    }
    let mut ranges: Vec<Range<usize>> = spans.into_iter().map(|span| span.range).collect();
    if options.empty_think == EmptyThinkLoss::Mask {
        for range in &mut ranges {
            range.start += empty_think_len(&rendered.text[range.clone()]);
        }
    }
    let mut sample = mark(tokenizer, &rendered.text, &ranges)?;
    sample.sample_warnings.extend(sample_warnings);
    Ok(sample)
}

/// Returns the warnings of a conversation, and for each message the reason to mask it.
fn examine(template: &ChatTemplate, chat: &Conversation) -> (SampleWarnings, Vec<Option<SampleWarning>>) {
    let unrendered = template.unrendered_parts(chat);
    let mut sample_warnings = SampleWarnings::default();
    if unrendered.tools {
        sample_warnings.insert(SampleWarning::ToolDefinitionsNotRendered);
    }
    if !unrendered.reasoning.is_empty() && !template.renders_reasoning() {
        sample_warnings.insert(SampleWarning::ReasoningNotRendered);
    }
    let nothing = |(idx, message): (usize, &Message)| {
        let is_bare = message.is_blank() && !message.has_tool_calls();
        match () {
            () if !message.is_assistant() => None,
            () if unrendered.tool_calls.contains(&idx) => Some(SampleWarning::ResponseNotRendered),
            () if message.is_empty_answer() => Some(SampleWarning::EmptyResponse),
            () if is_bare && unrendered.reasoning.contains(&idx) => match template.renders_reasoning() {
                // The template omits the reasoning of earlier answers by design.
                true => Some(SampleWarning::EmptyResponse),
                false => Some(SampleWarning::ResponseNotRendered),
            },
            () => None,
        }
    };
    let lost: Vec<_> = chat.messages.iter().enumerate().map(nothing).collect();
    if lost.contains(&Some(SampleWarning::ResponseNotRendered)) {
        sample_warnings.insert(SampleWarning::ResponseNotRendered);
    }
    (sample_warnings, lost)
}

/// Keeps the spans of the messages that have loss.
fn spans_with_loss(
    template: &ChatTemplate,
    chat: &Conversation,
    mut spans: Vec<AssistantSpan>,
    is_trained_on: impl Fn(usize) -> bool,
) -> Result<Vec<AssistantSpan>, RenderError> {
    let left_out = (0..chat.messages.len()).find(|idx| chat.messages[*idx].is_assistant() && !is_trained_on(*idx));
    let Some(message) = left_out else { return Ok(spans) };
    let is_an_answer = |span: &AssistantSpan| span.message.is_some_and(|message| chat.messages[message].is_assistant());
    if !spans.iter().all(is_an_answer) {
        return Err(RenderError::CannotMaskMessage { message, template: template.name().to_owned() });
    }
    spans.retain(|span| span.message.is_some_and(&is_trained_on));
    Ok(spans)
}

/// Keeps the spans of the last turn, or the last span if turns are unknown.
fn keep_last_turn(spans: &mut Vec<AssistantSpan>) {
    let last = spans.pop();
    let message = last.as_ref().and_then(|span| span.message);
    spans.retain(|span| message.is_some() && span.message == message);
    spans.extend(last);
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
    if text.trim().is_empty() {
        return Ok(Sample::default());
    }
    let mut ids = tokenizer.encode(text, SpecialTokens::Exclude)?;
    if ids.is_empty() {
        return Err(no_tokens(text));
    }
    ids.truncate(specials.max_text_tokens.unwrap_or(usize::MAX));
    surround(tokenizer, Sample { is_target: vec![true; ids.len()], ids, ..Sample::default() }, specials)
}

/// Renders a prompt and its completion without a chat template: BOS, both texts as one, EOS.
///
/// The completion and EOS have loss. After an empty completion, `empty_answers` decides.
pub fn render_completion(
    tokenizer: &Tokenizer,
    prompt: &str,
    completion: &str,
    options: RenderOptions,
) -> Result<Sample, RenderError> {
    let text = [prompt, completion].concat();
    let sample = mark(tokenizer, &text, std::slice::from_ref(&(prompt.len()..text.len())))?;
    let mut sample = surround(tokenizer, sample, options.specials)?;
    if completion.trim().is_empty() {
        sample.sample_warnings.insert(SampleWarning::EmptyResponse);
        if options.empty_answers == EmptyAnswerLoss::Mask {
            sample.is_target.fill(false);
        }
    }
    Ok(sample)
}

/// Adds BOS without loss and EOS with loss.
fn surround(tokenizer: &Tokenizer, sample: Sample, specials: TextSpecialTokens) -> Result<Sample, RenderError> {
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
        is_target: [vec![false; n_before], sample.is_target, vec![true; n_after]].concat(),
        sample_warnings: sample.sample_warnings,
    })
}

/// Tokenizes text and sets loss on tokens that overlap a span. The spans are ordered and disjoint.
fn mark(tokenizer: &Tokenizer, text: &str, spans: &[Range<usize>]) -> Result<Sample, RenderError> {
    let encoded = tokenizer.encode_with_offsets(text)?;
    refuse_dropped_text(tokenizer, text, &encoded)?;
    let touched = |token: &Range<usize>| {
        let span_idx = spans.partition_point(|span| span.end <= token.start);
        spans.get(span_idx).filter(|span| span.start < token.end)
    };
    let mut sample_warnings = SampleWarnings::default();
    let is_merged =
        |token: &Range<usize>| touched(token).is_some_and(|span| token.start < span.start && span.start > 0);
    if encoded.offsets.iter().any(is_merged) {
        sample_warnings.insert(SampleWarning::TokenSpansPromptBoundary);
    }
    let is_target = encoded.offsets.iter().map(|token| touched(token).is_some()).collect();
    Ok(Sample { ids: encoded.ids, is_target, sample_warnings })
}

/// Rejects text of which only special tokens remain.
fn refuse_dropped_text(tokenizer: &Tokenizer, text: &str, encoded: &Encoding) -> Result<(), RenderError> {
    if encoded.ids.iter().any(|id| !tokenizer.is_special(*id)) {
        return Ok(());
    }
    let specials = encoded.ids.iter().filter_map(|id| tokenizer.id_to_token(*id));
    let rest = specials.fold(text.to_owned(), |rest, special| rest.replacen(&special, "", 1));
    if rest.contains(char::is_alphanumeric) { Err(no_tokens(rest.trim())) } else { Ok(()) }
}

fn no_tokens(text: &str) -> RenderError {
    RenderError::OnlyUnknownCharacters { text: text.chars().take(40).collect() }
}

/// Returns the length in bytes of a leading empty `<think></think>` with its white space.
fn empty_think_len(text: &str) -> usize {
    let behind =
        text.strip_prefix("<think>").and_then(|rest| rest.trim_start().strip_prefix("</think>")).map(str::trim_start);
    behind.map_or(0, |behind| text.len() - behind.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_thought_ends_where_the_answer_begins() {
        for (text, want) in [
            ("<think>\n\n</think>\n\nanswer", "answer"),
            ("<think></think>answer", "answer"),
            ("<think>no</think>answer", "<think>no</think>answer"),
            (" <think></think>answer", " <think></think>answer"),
            ("<think>", "<think>"),
            ("", ""),
        ] {
            assert_eq!(&text[empty_think_len(text)..], want);
        }
    }
}
