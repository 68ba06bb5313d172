//! Conversations, prompts and texts to token ids, each marked as a target or not.

use std::ops::Range;
use std::path::PathBuf;

use crate::conversation::{Conversation, Message};
use crate::format::Document;
use crate::template::{ChatTemplate, Ending, Span, TemplateError};
use crate::tokenizer::{Specials, Tokenizer, TokenizerError};

/// What the model reads, and which of it the model must learn to say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The token ids.
    pub ids: Vec<u32>,
    /// `is_target[i]`: the model must learn to predict token `i`. As long as `ids`.
    pub is_target: Vec<bool>,
}

impl Sample {
    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// A sequence in which every token is a target.
    pub fn all_targets(ids: Vec<u32>) -> Self {
        Self { is_target: vec![true; ids.len()], ids }
    }

    /// The sequence in slices of at most `max_length` tokens.
    pub fn slices(&self, max_length: usize) -> impl Iterator<Item = Self> {
        let pieces = self.ids.chunks(max_length).zip(self.is_target.chunks(max_length));
        pieces.map(|(ids, is_target)| Self { ids: ids.to_vec(), is_target: is_target.to_vec() })
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
    pub fn teaches_to_stop(&self, tokenizer: &Tokenizer) -> bool {
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
pub enum Targets {
    /// Every assistant turn, with its end of turn.
    #[default]
    Assistant,
    /// The last assistant turn only.
    LastAssistant,
    /// Every token (`mask_inputs: false`).
    Everything,
}

/// What to do with the empty `<think></think>` that some templates put before an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EmptyThink {
    /// The model learns to write it.
    #[default]
    Learn,
    /// It is no target (`ignore_empty_think: true`).
    Ignore,
}

/// How chats become samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RenderOptions {
    /// Which tokens are targets.
    pub targets: Targets,
    /// Whether an empty thought is one.
    pub empty_think: EmptyThink,
}

/// Why something could not be turned into ids.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The chat template failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A turn is not to be learned, and it is not known which of the text it is.
    #[error(
        "leave out message {message} (weight 0): chat template {template} has generation blocks that are \
         not printed in their own message's turn; put each inside the loop over the messages"
    )]
    Weight {
        /// The first message that is to be left out, from 0.
        message: usize,
        /// Where the template is from.
        template: String,
    },
    /// A chat, and nothing to print it with.
    #[error("render a chat: {} has no chat template; use the model's chat version, or put a chat_template.jinja there", .0.display())]
    NoTemplate(PathBuf),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
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
        (Document::Text(text), _) => render_text(tokenizer, text)?,
        (Document::PromptCompletion { prompt, completion }, _) => render_completion(tokenizer, prompt, completion)?,
        (Document::Conversation(chat), Some(template)) => render_chat(tokenizer, template, chat, options)?,
        (Document::Conversation(_), None) => return Err(RenderError::NoTemplate(tokenizer.directory().to_owned())),
    };
    if options.targets == Targets::Everything {
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
    if options.targets == Targets::Everything {
        let text = template.render(chat, Ending::Closed)?;
        let ids = tokenizer.encode(&text, Specials::Omit)?;
        return Ok(Sample { is_target: vec![true; ids.len()], ids });
    }
    let rendered = template.render_turns(chat)?;
    let mut spans = learned_spans(template, chat, rendered.spans)?;
    if options.targets == Targets::LastAssistant {
        keep_last_turn(&mut spans);
    }
    let mut ranges: Vec<Range<usize>> = spans.into_iter().map(|span| span.range).collect();
    if options.empty_think == EmptyThink::Ignore {
        for range in &mut ranges {
            range.start += empty_think_len(&rendered.text[range.clone()]);
        }
    }
    Ok(mark(tokenizer, &rendered.text, &ranges)?)
}

/// Without the turns of weight 0.
fn learned_spans(template: &ChatTemplate, chat: &Conversation, mut spans: Vec<Span>) -> Result<Vec<Span>, RenderError> {
    let is_left_out = |message: &Message| message.is_assistant() && !message.is_learned();
    let Some(message) = chat.messages.iter().position(is_left_out) else { return Ok(spans) };
    let is_an_answer = |span: &Span| span.message.is_some_and(|message| chat.messages[message].is_assistant());
    if !spans.iter().all(is_an_answer) {
        return Err(RenderError::Weight { message, template: template.name().to_owned() });
    }
    spans.retain(|span| span.message.is_some_and(|message| chat.messages[message].is_learned()));
    Ok(spans)
}

/// All spans of the last turn, or the last span if turns are not known.
fn keep_last_turn(spans: &mut Vec<Span>) {
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
    let text = template.render(chat, Ending::GenerationPrompt)?;
    Ok(tokenizer.encode(&text, Specials::Omit)?)
}

/// Plain text: BOS and EOS around it where the tokenizer has them, all but BOS a target.
pub fn render_text(tokenizer: &Tokenizer, text: &str) -> Result<Sample, RenderError> {
    render_completion(tokenizer, "", text)
}

/// A prompt and its completion for a model without a chat template: BOS, both texts as one, EOS;
/// the completion and EOS are targets.
pub fn render_completion(tokenizer: &Tokenizer, prompt: &str, completion: &str) -> Result<Sample, RenderError> {
    let text = [prompt, completion].concat();
    let mut sample = mark(tokenizer, &text, std::slice::from_ref(&(prompt.len()..text.len())))?;
    if let Some(bos) = tokenizer.leading_bos() {
        sample.ids.insert(0, bos.id);
        sample.is_target.insert(0, false);
    }
    if let Some(eos) = tokenizer.eos() {
        sample.ids.push(eos.id);
        sample.is_target.push(true);
    }
    Ok(sample)
}

/// Tokenizes a text; the tokens that touch a span are targets. Spans are in order and disjoint.
fn mark(tokenizer: &Tokenizer, text: &str, spans: &[Range<usize>]) -> Result<Sample, TokenizerError> {
    let encoded = tokenizer.encode_with_offsets(text)?;
    let touches = |token: &Range<usize>| {
        let span_idx = spans.partition_point(|span| span.end <= token.start);
        spans.get(span_idx).is_some_and(|span| span.start < token.end)
    };
    let is_target = encoded.offsets.iter().map(touches).collect();
    Ok(Sample { ids: encoded.ids, is_target })
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
