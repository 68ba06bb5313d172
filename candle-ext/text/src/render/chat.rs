//! Rendering of chats, and their loss masks.
//!
//! Turns with loss are byte ranges of the rendered text: the assistant's from the template, the contents of other
//! roles from markers. `eos` adds or removes the ends of turns. A token has loss if it overlaps a range.

use std::ops::Range;

use super::{EmptyAnswerLoss, EmptyThinkLoss, EosLoss, LossMask, RenderError, RenderOptions, Sample, no_tokens};
use crate::conversation::{ChatRole, Conversation, Message};
use crate::sample_warning::{SampleWarning, SampleWarnings};
use crate::template::{AddGenerationPrompt, ChatTemplate, MessageSpan, PrintedChat};
use crate::tokenizer::{Encoding, SpecialTokens, Tokenizer};

/// Renders a chat with the template, and sets loss on the tokens that `options` select.
///
/// The text is rendered and tokenized once. A token has loss if it overlaps text with loss. The template writes BOS;
/// no special tokens are added.
pub fn render_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    chat: &Conversation,
    options: RenderOptions,
) -> Result<Sample, RenderError> {
    let printed = template.print(chat, AddGenerationPrompt::No)?;
    let (mut sample_warnings, lost) = examine(&printed, chat);
    let has_loss_on_ends = matches!(options.eos, EosLoss::Turn | EosLoss::All);
    if options.targets == LossMask::AllTokens && has_loss_on_ends {
        let ids = tokenizer.encode(printed.text(), SpecialTokens::Exclude)?;
        return Ok(Sample { is_target: vec![true; ids.len()], ids, sample_warnings });
    }
    let is_empty = |idx: usize| lost[idx] == Some(SampleWarning::EmptyResponse) && chat.messages[idx].is_trained_on();
    if options.roles.contains(ChatRole::Assistant) && (0..lost.len()).any(is_empty) {
        sample_warnings.insert(SampleWarning::EmptyResponse);
    }
    let is_trained_on = |idx: usize| {
        let is_kept = match lost[idx] {
            Some(SampleWarning::EmptyResponse) => options.empty_answers == EmptyAnswerLoss::Include,
            lost => lost.is_none(),
        };
        is_kept && chat.messages[idx].is_trained_on()
    };
    let turns = TurnsWithLoss::find(&printed, chat, options, is_trained_on)?;
    let encoded = tokenizer.encode_with_offsets(&turns.text)?;
    refuse_dropped_text(tokenizer, &turns.text, &encoded)?;
    if turns.assistant.iter().any(|span| begins_in_prompt(&encoded, &span.range)) {
        sample_warnings.insert(SampleWarning::TokenSpansPromptBoundary);
    }
    let is_target = turns.mask(tokenizer, &printed.ends_of_turn(), &encoded, options);
    Ok(Sample { ids: encoded.ids, is_target, sample_warnings })
}

/// A rendered chat and its turns with loss.
struct TurnsWithLoss {
    text: String,
    /// The assistant's text with the ends of its turns, ascending.
    assistant: Vec<MessageSpan>,
    /// The contents of other roles' messages, ascending.
    contents: Vec<MessageSpan>,
}

impl TurnsWithLoss {
    fn find(
        printed: &PrintedChat<'_>,
        chat: &Conversation,
        options: RenderOptions,
        is_trained_on: impl Fn(usize) -> bool,
    ) -> Result<Self, RenderError> {
        let role = |idx: usize| ChatRole::of(chat.messages[idx].role()).filter(|role| options.roles.contains(*role));
        let is_content = |idx: usize| role(idx).is_some_and(|role| role != ChatRole::Assistant) && is_trained_on(idx);
        let has_contents = options.targets != LossMask::AllTokens && (0..chat.messages.len()).any(is_content);
        let contents = if has_contents { printed.content_spans(is_content)? } else { Vec::new() };
        let needs_answers = options.roles.contains(ChatRole::Assistant) && options.targets != LossMask::AllTokens;
        let assistant = match needs_answers {
            true => spans_with_loss(printed.template(), chat, printed.turns()?, is_trained_on)?,
            false => Vec::new(),
        };
        let mut turns = Self { text: printed.text().to_owned(), assistant, contents };
        if options.targets == LossMask::LastTurn {
            turns.keep_last();
        }
        if options.empty_think == EmptyThinkLoss::Mask {
            for MessageSpan { range, .. } in &mut turns.assistant {
                range.start += empty_think_len(&turns.text[range.clone()]);
            }
        }
        Ok(turns)
    }

    /// Keeps the spans of the last turn, or the last span if turns are unknown.
    fn keep_last(&mut self) {
        let end = |spans: &[MessageSpan]| spans.last().map_or(0, |span| span.range.end);
        let (spans, others) = match end(&self.assistant) >= end(&self.contents) {
            true => (&mut self.assistant, &mut self.contents),
            false => (&mut self.contents, &mut self.assistant),
        };
        others.clear();
        let last = spans.pop();
        let message = last.as_ref().and_then(|span| span.message);
        spans.retain(|span| message.is_some() && span.message == message);
        spans.extend(last);
    }

    /// Returns the loss mask of the tokens.
    fn mask(&self, tokenizer: &Tokenizer, texts: &[String], encoded: &Encoding, options: RenderOptions) -> Vec<bool> {
        let own = self.assistant.iter().map(|span| span.range.clone());
        if options.eos == EosLoss::Turn && self.contents.is_empty() {
            return overlapping(encoded, &own.collect::<Vec<_>>());
        }
        let ends = ends_of_turns(tokenizer, &self.text, texts, encoded, &self.assistant);
        if options.targets == LossMask::AllTokens {
            let kept = if options.eos == EosLoss::Last { ends.len().saturating_sub(1) } else { ends.len() };
            return overlapping(encoded, &ends[..kept]).into_iter().map(|is_end| !is_end).collect();
        }
        let (mut ranges, mut own_ends) = (Vec::new(), Vec::new());
        for range in own {
            let end = end_within(&ends, &range).or_else(|| end_after(&self.text, &ends, &range));
            let until = end.as_ref().map_or(range.end, |end| end.start.min(range.end));
            ranges.push(range.start..until);
            own_ends.extend(end);
        }
        for MessageSpan { range, .. } in &self.contents {
            ranges.push(range.clone());
            own_ends.extend(end_after(&self.text, &ends, range));
        }
        own_ends.sort_by_key(|end| end.start);
        match options.eos {
            EosLoss::Turn => ranges.extend(own_ends),
            EosLoss::Last => ranges.extend(own_ends.pop()),
            EosLoss::All => ranges.extend(ends),
            EosLoss::None => {}
        }
        overlapping(encoded, &disjoint(ranges))
    }
}

/// Returns the ranges of the ends of turns, ascending: the texts that the template prints there, the tokenizer's EOS,
/// and special tokens at the ends of the assistant's text.
fn ends_of_turns(
    tokenizer: &Tokenizer,
    text: &str,
    texts: &[String],
    encoded: &Encoding,
    assistant: &[MessageSpan],
) -> Vec<Range<usize>> {
    let printed = texts.iter().flat_map(|end| text.match_indices(end.as_str()).map(|(at, end)| at..at + end.len()));
    let is_end = |id: u32, range: &Range<usize>| {
        let closes = || assistant.iter().any(|span| span.range.end == range.end);
        tokenizer.eos_ids().contains(&id) || tokenizer.is_special(id) && closes()
    };
    let tokens = encoded.ids.iter().zip(&encoded.offsets).filter(|(id, range)| is_end(**id, range));
    disjoint(printed.chain(tokens.map(|(_, range)| range.clone())).collect())
}

/// Returns the end of a turn that is the end of its text.
fn end_within(ends: &[Range<usize>], range: &Range<usize>) -> Option<Range<usize>> {
    let idx = ends.partition_point(|end| end.end < range.end);
    ends.get(idx).filter(|end| end.end == range.end && end.start >= range.start).cloned()
}

/// Returns the end of a turn that follows its text, directly or after white space.
fn end_after(text: &str, ends: &[Range<usize>], range: &Range<usize>) -> Option<Range<usize>> {
    let idx = ends.partition_point(|end| end.start < range.end);
    ends.get(idx).filter(|end| text[range.end..end.start].trim().is_empty()).cloned()
}

/// Sorts ranges and merges those that overlap.
fn disjoint(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| (range.start, range.end));
    let mut merged: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start < last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// Returns the warnings of a conversation, and for each message the reason to mask it.
fn examine(printed: &PrintedChat<'_>, chat: &Conversation) -> (SampleWarnings, Vec<Option<SampleWarning>>) {
    let unrendered = printed.unrendered_parts();
    let mut sample_warnings = SampleWarnings::default();
    if unrendered.tools {
        sample_warnings.insert(SampleWarning::ToolDefinitionsNotRendered);
    }
    if !unrendered.reasoning.is_empty() && !printed.renders_reasoning() {
        sample_warnings.insert(SampleWarning::ReasoningNotRendered);
    }
    let nothing = |(idx, message): (usize, &Message)| {
        let is_bare = message.is_blank() && !message.has_tool_calls();
        match () {
            () if unrendered.contents.contains(&idx) => Some(SampleWarning::MessageNotRendered),
            () if !message.is_assistant() => None,
            () if unrendered.tool_calls.contains(&idx) => Some(SampleWarning::ResponseNotRendered),
            () if message.is_empty_answer() => Some(SampleWarning::EmptyResponse),
            () if is_bare && unrendered.reasoning.contains(&idx) => match printed.renders_reasoning() {
                // The template omits the reasoning of earlier answers by design.
                true => Some(SampleWarning::EmptyResponse),
                false => Some(SampleWarning::ResponseNotRendered),
            },
            () => None,
        }
    };
    let lost: Vec<_> = chat.messages.iter().enumerate().map(nothing).collect();
    for warning in [SampleWarning::ResponseNotRendered, SampleWarning::MessageNotRendered] {
        if lost.contains(&Some(warning)) {
            sample_warnings.insert(warning);
        }
    }
    (sample_warnings, lost)
}

/// Keeps the spans of the messages that have loss.
fn spans_with_loss(
    template: &ChatTemplate,
    chat: &Conversation,
    mut spans: Vec<MessageSpan>,
    is_trained_on: impl Fn(usize) -> bool,
) -> Result<Vec<MessageSpan>, RenderError> {
    let left_out = (0..chat.messages.len()).find(|idx| chat.messages[*idx].is_assistant() && !is_trained_on(*idx));
    let Some(message) = left_out else { return Ok(spans) };
    let is_an_answer = |span: &MessageSpan| span.message.is_some_and(|message| chat.messages[message].is_assistant());
    if !spans.iter().all(is_an_answer) {
        return Err(RenderError::CannotMaskMessage { message, template: template.name().to_owned() });
    }
    spans.retain(|span| span.message.is_some_and(&is_trained_on));
    Ok(spans)
}

/// Returns a flag for each token: true if it overlaps one of the ranges, which are ascending and disjoint.
pub(super) fn overlapping(encoded: &Encoding, ranges: &[Range<usize>]) -> Vec<bool> {
    encoded.offsets.iter().map(|token| touched(ranges, token).is_some()).collect()
}

/// Returns true if a token begins before a range, in the prompt, and ends within it.
pub(super) fn begins_in_prompt(encoded: &Encoding, range: &Range<usize>) -> bool {
    range.start > 0
        && encoded.offsets.iter().any(|token| token.start < range.start && range.start < token.end && !range.is_empty())
}

fn touched<'a>(ranges: &'a [Range<usize>], token: &Range<usize>) -> Option<&'a Range<usize>> {
    let idx = ranges.partition_point(|range| range.end <= token.start);
    ranges.get(idx).filter(|range| range.start < token.end)
}

/// Rejects text of which only special tokens remain.
pub(super) fn refuse_dropped_text(tokenizer: &Tokenizer, text: &str, encoded: &Encoding) -> Result<(), RenderError> {
    if encoded.ids.iter().any(|id| !tokenizer.is_special(*id)) {
        return Ok(());
    }
    let specials = encoded.ids.iter().filter_map(|id| tokenizer.id_to_token(*id));
    let rest = specials.fold(text.to_owned(), |rest, special| rest.replacen(&special, "", 1));
    if rest.contains(char::is_alphanumeric) { Err(no_tokens(rest.trim())) } else { Ok(()) }
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
