//! Conversations, prompts and texts to token ids, each marked as a target or not.

use std::ops::Range;
use std::path::PathBuf;

use crate::conversation::{Conversation, Message};
use crate::format::{Document, Format};
use crate::sample_warning::{SampleWarning, SampleWarnings};
use crate::template::{AddGenerationPrompt, AssistantSpan, ChatTemplate, TemplateError};
use crate::tokenizer::{Encoding, SpecialTokens, Tokenizer, TokenizerError};

/// What the model reads, and which of it the model must learn to say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The token ids.
    pub ids: Vec<u32>,
    /// `is_target[i]`: the model must learn to predict token `i`. As long as `ids`.
    pub is_target: Vec<bool>,
    /// The oddities of the row.
    pub sample_warnings: SampleWarnings,
}

impl Sample {
    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// A sequence in which every token is a target.
    pub fn all_targets(ids: Vec<u32>) -> Self {
        Self { is_target: vec![true; ids.len()], ids, ..Self::default() }
    }

    /// The sequence in slices of at most `max_length` tokens.
    pub fn slices(&self, max_length: usize) -> impl Iterator<Item = Self> {
        let pieces = self.ids.chunks(max_length).zip(self.is_target.chunks(max_length));
        pieces.map(|(ids, is_target)| Self { ids: ids.to_vec(), is_target: is_target.to_vec(), ..Self::default() })
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The number of tokens that are targets.
    pub fn n_targets(&self) -> usize {
        self.is_target.iter().filter(|target| **target).count()
    }

    /// Whether the model learns to stop: a target is one of the tokenizer's EOS, or a stretch of
    /// targets ends with a special token (an end of turn that is not the tokenizer's EOS).
    pub fn has_eos_target(&self, tokenizer: &Tokenizer) -> bool {
        let targets = (0..self.len()).filter(|token_idx| self.is_target[*token_idx]);
        targets.into_iter().any(|token_idx| {
            let id = self.ids[token_idx];
            let ends = !self.is_target.get(token_idx + 1).copied().unwrap_or(false);
            tokenizer.eos_ids().contains(&id) || (ends && tokenizer.is_special(id))
        })
    }

    /// Whether the sample begins with BOS twice.
    pub fn has_doubled_bos(&self, tokenizer: &Tokenizer) -> bool {
        tokenizer.has_doubled_bos(&self.ids)
    }
}

/// Which of a chat's tokens are targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LossMask {
    /// Every assistant turn, with its end of turn.
    #[default]
    AssistantTokens,
    /// The last assistant turn only.
    LastAssistantTurn,
    /// Every token (`mask_inputs: false`).
    AllTokens,
}

/// What to do with the empty `<think></think>` that some templates put before an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EmptyThinkLoss {
    /// The model learns to write it.
    #[default]
    Include,
    /// It is no target (`ignore_empty_think: true`).
    Mask,
}

/// The handling of an assistant message that has no content, tool calls or reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EmptyAnswerLoss {
    /// Its end of turn is no target.
    #[default]
    Mask,
    /// The model learns to write an empty answer (`train_on_empty_answers: true`).
    Include,
}

/// The special tokens around a text that no chat template renders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextSpecialTokens {
    /// Puts BOS before the text. `None`: as the tokenizer adds it.
    pub add_bos_token: Option<bool>,
    /// Puts EOS after the text. It separates documents.
    pub add_eos_token: bool,
}

impl Default for TextSpecialTokens {
    fn default() -> Self {
        Self { add_bos_token: None, add_eos_token: true }
    }
}

/// The options of rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RenderOptions {
    /// Which tokens are targets.
    pub targets: LossMask,
    /// Whether an empty thought is one.
    pub empty_think: EmptyThinkLoss,
    /// The handling of empty answers.
    pub empty_answers: EmptyAnswerLoss,
    /// The special tokens around texts without a template.
    pub specials: TextSpecialTokens,
}

/// Why something could not be turned into ids.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The chat template failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A turn is not to be learned, and it is not known which of the text it is.
    #[error(
        "leave out message {message} (it is empty, not rendered or of weight 0): chat template {template} has generation blocks that are \
         not printed in their own message's turn; put each inside the loop over the messages"
    )]
    CannotMaskMessage {
        /// The first message that is to be left out, from 0.
        message: usize,
        /// The file or argument that holds the template.
        template: String,
    },
    /// A chat, and nothing to print it with.
    #[error("render a chat: {} has no chat template; use the model's chat version, or put a chat_template.jinja there", .0.display())]
    NoTemplate(PathBuf),
    /// A token is asked for that the tokenizer does not name.
    #[error("add BOS to a text: the tokenizer names no bos_token; remove `data.add_bos_token`")]
    NoBosToken,
    /// Text is dropped.
    #[error(
        "tokenize {text:?}: the tokenizer has no token for any of its characters; the vocabulary of its \
         tokenizer.json may be empty or of another model"
    )]
    OnlyUnknownCharacters {
        /// The beginning of the text.
        text: String,
    },
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Renders a document that `format` read, as [`render_document`], and marks roles that nothing knows as a finding.
pub fn render_row(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    format: &Format,
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

/// Renders a document as training and evaluation do: a chat by the template, a prompt and its completion as a chat where
/// there is a template, and plain text as it is.
pub fn render_document(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    document: Document,
    options: RenderOptions,
) -> Result<Sample, RenderError> {
    let document = if template.is_some() { document.into_chat() } else { document };
    let mut sample = match (&document, template) {
        (Document::Text(text), _) => render_text(tokenizer, text, options.specials)?,
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

/// Renders a chat once, tokenizes that text, and marks the tokens that touch what the assistant
/// wrote. The template writes BOS and the like; nothing is added.
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

/// Finds the oddities of a conversation under this template, and for each message the reason not to learn it.
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
                // It is an earlier answer, whose reasoning the template leaves out by design.
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

/// Keeps the spans of the messages that are learned.
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

/// All spans of the last turn, or the last span if turns are not known.
fn keep_last_turn(spans: &mut Vec<AssistantSpan>) {
    let last = spans.pop();
    let message = last.as_ref().and_then(|span| span.message);
    spans.retain(|span| message.is_some() && span.message == message);
    spans.extend(last);
}

/// The ids that make the model answer a chat: rendered with the generation prompt.
pub fn render_prompt(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    chat: &Conversation,
) -> Result<Vec<u32>, RenderError> {
    let text = template.render(chat, AddGenerationPrompt::Yes)?;
    Ok(tokenizer.encode(&text, SpecialTokens::Exclude)?)
}

/// Renders plain text: all of it is a target, and EOS after it. A blank text has no tokens.
pub fn render_text(tokenizer: &Tokenizer, text: &str, specials: TextSpecialTokens) -> Result<Sample, RenderError> {
    if text.trim().is_empty() {
        return Ok(Sample::default());
    }
    let ids = tokenizer.encode(text, SpecialTokens::Exclude)?;
    if ids.is_empty() {
        return Err(no_tokens(text));
    }
    surround(tokenizer, Sample { is_target: vec![true; ids.len()], ids, ..Sample::default() }, specials)
}

/// Renders a prompt and its completion for a model without a chat template: BOS, both texts as one, EOS.
/// The completion and EOS are targets. After an empty completion nothing is, unless the options say so.
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

/// Puts BOS, which is no target, and EOS, which is one, around a text.
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

/// Tokenizes a text; the tokens that touch a span are targets. Spans are in order and disjoint.
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

/// Refuses a text of which only special tokens are left.
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

/// The length of a leading `<think>`, white space, `</think>` and white space.
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
