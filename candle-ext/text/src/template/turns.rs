//! Location of messages in a rendered chat, and of the assistant's text within its messages.

use std::ops::Range;

use super::markers::Marker;

/// Reason why the assistant's text cannot be located in a rendered chat.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TurnError {
    /// The output changes with markers, or contains characters that Unicode reserves.
    #[error("the template prints something else when its turns are marked")]
    OutputChangedByMarkers,
    /// An assistant message has no text in the output.
    #[error("message {message} (assistant) leaves no text of its own in the rendering")]
    NoText {
        /// Index of the message, from 0.
        message: usize,
    },
    /// The text of an assistant message is not contiguous.
    #[error("message {message} (assistant) is printed in several places")]
    NotContiguous {
        /// Index of the message, from 0.
        message: usize,
    },
    /// The assistant's turn does not begin with the generation prompt.
    #[error("message {message} (assistant) does not begin with the generation prompt {prompt:?}")]
    NoGenerationPrompt {
        /// Index of the message, from 0.
        message: usize,
        /// Generation prompt of the template.
        prompt: String,
    },
    /// The template fails on chats with other answers, which locate the assistant's text.
    #[error("the template fails on example chats, which locate the text, in line {line}: {message}")]
    ExampleFailed {
        /// Line in the template, from 1.
        line: usize,
        /// Message of the template engine.
        message: String,
    },
    /// A `generation` block is nested or not closed.
    #[error("a generation block begins or ends inside another one")]
    UnbalancedBlocks,
}

/// Returns the byte ranges of the `generation` blocks.
pub(super) fn generation_spans(marks: &[(usize, Marker)]) -> Result<Vec<Range<usize>>, TurnError> {
    let mut spans = Vec::new();
    let mut start = None;
    for (at, mark) in marks {
        match (mark, start) {
            (Marker::GenerationOpens, None) => start = Some(*at),
            (Marker::GenerationCloses, Some(from)) => {
                spans.push(from..*at);
                start = None;
            }
            (Marker::GenerationOpens | Marker::GenerationCloses, _) => return Err(TurnError::UnbalancedBlocks),
            _ => {}
        }
    }
    spans.retain(|span| !span.is_empty());
    match start {
        None => Ok(spans),
        Some(_) => Err(TurnError::UnbalancedBlocks),
    }
}

/// Returns the byte ranges of marked contents, with their messages.
pub(super) fn content_spans(marks: &[(usize, Marker)]) -> Vec<(usize, Range<usize>)> {
    let mut spans = Vec::new();
    let mut open = None;
    for (at, mark) in marks {
        match (mark, open) {
            (Marker::ContentOpens { message }, _) => open = Some((*message, *at)),
            (Marker::ContentCloses { message }, Some((opened, from))) if *message == opened => {
                spans.push((*message, from..*at));
                open = None;
            }
            _ => {}
        }
    }
    spans
}

/// Returns the message whose text contains the whole span.
pub(super) fn owner(pieces: &[MessageText], span: &Range<usize>) -> Option<usize> {
    let holds = |piece: &&MessageText| piece.range.start <= span.start && span.end <= piece.range.end;
    pieces.iter().find(holds).map(|piece| piece.message)
}

/// Text printed during a loop iteration over a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MessageText {
    pub(super) message: usize,
    pub(super) range: Range<usize>,
}

/// Splits a text by the innermost loop over messages.
///
/// Text outside of all loops belongs to no message, such as a system prompt or a generation prompt.
pub(super) fn pieces(marks: &[(usize, Marker)]) -> Vec<MessageText> {
    let mut pieces: Vec<MessageText> = Vec::new();
    let mut open: Vec<(usize, usize)> = Vec::new();
    let mut start = 0;
    for (at, mark) in marks {
        if let Some((_, message)) = open.last() {
            push(&mut pieces, MessageText { message: *message, range: start..*at });
        }
        start = *at;
        let (Marker::Turn { loop_id, .. } | Marker::LoopCloses { loop_id }) = mark else { continue };
        if let Some(depth) = open.iter().position(|(open_id, _)| open_id == loop_id) {
            open.truncate(depth);
        }
        if let Marker::Turn { message, .. } = mark {
            open.push((*loop_id, *message));
        }
    }
    pieces
}

fn push(pieces: &mut Vec<MessageText>, piece: MessageText) {
    match pieces.last_mut() {
        _ if piece.range.is_empty() => {}
        Some(last) if last.message == piece.message && last.range.end == piece.range.start => {
            last.range.end = piece.range.end;
        }
        _ => pieces.push(piece),
    }
}

/// Text before and after the assistant's words in its turns, found once per template from example chats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TurnDelimiters {
    /// Headers before the words: prefixes of the generation prompt, shortest first.
    headers: Vec<String>,
    /// Footers after the words of every turn, longest first: the end of turn, which the model writes, and white
    /// space, which it does not.
    footers: Vec<String>,
    /// End of turn of templates that print it between turns and after the last one.
    closing: String,
}

/// Assistant's turn in two example chats that differ in its words only.
pub(super) struct Probe {
    /// Text of the first chat, and the turn's range in it.
    pub(super) text: String,
    pub(super) piece: MessageText,
    /// The turn in the second chat.
    pub(super) other: String,
}

impl Probe {
    fn turn(&self) -> &str {
        &self.text[self.piece.range.clone()]
    }

    /// Returns the beginning that both turns share.
    fn head(&self) -> &str {
        common_prefix(self.turn(), &self.other)
    }
}

/// End of a rendered chat whose next message is the assistant's.
pub(super) struct Prompts<'a> {
    /// Text that `add_generation_prompt` adds.
    pub(super) added: &'a str,
    /// Text after the last turn. It exceeds `added` if the template always prints a prompt, or prints another text
    /// such as EOS.
    pub(super) tail: &'a str,
}

impl TurnDelimiters {
    /// Derives headers and footers from chat ends and from turns that differ in their words only.
    ///
    /// A header is the common beginning of two such turns, as far as the generation prompt agrees.
    pub(super) fn learn(prompts: &Prompts<'_>, probes: &[Probe]) -> Self {
        let footers = probes.iter().map(|probe| common_suffix(probe.turn(), &probe.other).to_owned());
        let mut footers: Vec<String> = footers.filter(|footer| !footer.trim_end().is_empty()).collect();
        footers.sort_by_key(|footer| std::cmp::Reverse(footer.len()));
        footers.dedup();
        let closing = if footers.is_empty() { closing(probes) } else { String::new() };

        let candidates = [prompts.tail, prompts.added].into_iter().filter(|prompt| !prompt.is_empty());
        let with = |headers| Self { headers, footers: footers.clone(), closing: closing.clone() };
        let fitting = candidates
            .map(|prompt| with(headers(prompt, probes)))
            .find(|delimiters| probes.iter().all(|probe| delimiters.fits(probe)));
        // A prompt that matches no turn is kept, so that every turn is rejected.
        let added = [prompts.added.to_owned()].into_iter().filter(|prompt| !prompt.is_empty());
        fitting.unwrap_or_else(|| with(added.collect()))
    }

    /// Returns the texts that end a turn, without white space at their ends. Empty if the template prints none.
    pub(super) fn ends_of_turn(&self) -> Vec<String> {
        let mut ends: Vec<String> =
            self.footers.iter().chain([&self.closing]).map(|text| text.trim().to_owned()).collect();
        ends.retain(|end| !end.is_empty());
        ends.dedup();
        ends
    }

    fn fits(&self, probe: &Probe) -> bool {
        let end = self.end_of_header(&probe.text, &probe.piece.range);
        end.is_some_and(|end| end <= probe.piece.range.start + probe.head().len())
    }

    /// Returns the range that the model writes: its words and the end of turn.
    pub(super) fn written(&self, text: &str, piece: &MessageText) -> Result<Range<usize>, TurnError> {
        let MessageText { message, range } = piece.clone();
        let start = self.end_of_header(text, &range).ok_or_else(|| TurnError::NoGenerationPrompt {
            message,
            prompt: self.headers.last().cloned().unwrap_or_default(),
        })?;
        let words = &text[start..range.end];
        let footer = self.footers.iter().find(|footer| words.ends_with(footer.as_str()));
        let blank = footer.map_or(0, |footer| footer.len() - footer.trim_end().len());
        let closing = if text[range.end..].starts_with(&self.closing) { self.closing.len() } else { 0 };
        let written = start..range.end - blank + closing;
        if written.is_empty() { Err(TurnError::NoText { message }) } else { Ok(written) }
    }

    /// Returns the end of the first header that ends in this range.
    ///
    /// The header may begin before the range: some templates print it, or its first line break, at the end of the
    /// previous turn.
    fn end_of_header(&self, text: &str, piece: &Range<usize>) -> Option<usize> {
        let (Some(shortest), Some(longest)) = (self.headers.first(), self.headers.last()) else {
            return Some(piece.start);
        };
        let mut from = piece.start.saturating_sub(longest.len());
        while !text.is_char_boundary(from) {
            from -= 1;
        }
        let places = text[from..piece.end].match_indices(shortest.as_str());
        let ends = places.filter_map(|(at, _)| {
            let (at, found) = (from + at, &text[from + at..piece.end]);
            let header = self.headers.iter().rfind(|header| found.starts_with(header.as_str()));
            header.map(|header| at + header.len())
        });
        ends.into_iter().find(|end| *end >= piece.start)
    }
}

/// Returns the text after the last turn, if it follows every other turn too.
fn closing(probes: &[Probe]) -> String {
    let behind = |probe: &'_ Probe| probe.text[probe.piece.range.end..].to_owned();
    let last = probes.last().map(behind).unwrap_or_default();
    let closing = last.trim_end();
    let is_closing = probes.iter().all(|probe| behind(probe).starts_with(closing));
    if is_closing { closing.to_owned() } else { String::new() }
}

/// Returns the generation prompt and its shorter forms that begin turns, such as one without `<think>`.
fn headers(prompt: &str, probes: &[Probe]) -> Vec<String> {
    let starts = probes.iter().map(|probe| whole_words(prompt, common_prefix(prompt, probe.head())));
    let mut headers: Vec<String> = starts.chain([prompt]).map(str::to_owned).collect();
    headers.retain(|header| !header.is_empty());
    headers.sort_by_key(String::len);
    headers.dedup();
    headers
}

/// Shortens a common beginning to whole words and tokens: `<|START_` is not a header, though two tokens begin with
/// it.
fn whole_words<'a>(prompt: &'a str, start: &str) -> &'a str {
    let is_end = |at: usize| {
        let closes = |letter: char| letter.is_whitespace() || ">]}):".contains(letter);
        prompt[..at].ends_with(closes) && !prompt[at..].starts_with(char::is_alphanumeric)
    };
    let ends = prompt.char_indices().map(|(at, _)| at).chain([prompt.len()]);
    let end = ends.take_while(|at| *at <= start.len()).filter(|at| is_end(*at)).last();
    &prompt[..end.unwrap_or(0)]
}

fn common_prefix<'a>(left: &'a str, right: &str) -> &'a str {
    let differs = left.char_indices().zip(right.chars()).find(|((_, a), b)| a != b);
    let end = differs.map_or(left.len().min(right.len()), |((at, _), _)| at);
    &left[..end]
}

fn common_suffix<'a>(left: &'a str, right: &str) -> &'a str {
    let shared = left.chars().rev().zip(right.chars().rev()).take_while(|(a, b)| a == b);
    let length: usize = shared.map(|(letter, _)| letter.len_utf8()).sum();
    &left[left.len() - length..]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn turn(loop_id: usize, message: usize) -> Marker {
        Marker::Turn { loop_id, message }
    }

    fn close(loop_id: usize) -> Marker {
        Marker::LoopCloses { loop_id }
    }

    #[test]
    fn text_belongs_to_the_innermost_turn() {
        let marks = [
            (3, turn(1, 0)),
            (3, turn(1, 1)),
            (3, close(1)), // a scan that prints nothing
            (3, turn(2, 0)),
            (5, turn(3, 1)),
            (7, turn(3, 2)),
            (7, close(3)),
            (8, turn(2, 3)),
            (9, close(2)),
        ];
        let got: Vec<_> = pieces(&marks).into_iter().map(|p| (p.message, p.range)).collect();
        assert_eq!(got, [(0, 3..5), (1, 5..7), (0, 7..8), (3, 8..9)]);
    }

    #[test]
    fn unbalanced_generation_blocks_are_refused() {
        let (open, close) = (Marker::GenerationOpens, Marker::GenerationCloses);
        assert_eq!(
            generation_spans(&[(1, open), (4, close), (4, open), (4, close), (4, open), (5, close)]),
            Ok(vec![1..4, 4..5])
        );
        assert_eq!(generation_spans(&[(1, open), (2, open)]), Err(TurnError::UnbalancedBlocks));
        assert_eq!(generation_spans(&[(1, close)]), Err(TurnError::UnbalancedBlocks));
        assert_eq!(generation_spans(&[(1, open)]), Err(TurnError::UnbalancedBlocks));
    }

    /// `probes`: what stands before a turn, and the turn with two different words.
    fn delimiters(added: &str, tail: &str, probes: &[(&str, &str, &str)]) -> TurnDelimiters {
        let probe = |(before, turn, other): &(&str, &str, &str)| Probe {
            text: format!("{before}{turn}"),
            piece: MessageText { message: 1, range: before.len()..before.len() + turn.len() },
            other: (*other).to_owned(),
        };
        TurnDelimiters::learn(&Prompts { added, tail }, &probes.iter().map(probe).collect::<Vec<_>>())
    }

    #[track_caller]
    fn check(delimiters: &TurnDelimiters, before: &str, turn: &str, want: &str) {
        let text = format!("{before}{turn}");
        let piece = MessageText { message: 0, range: before.len()..text.len() };
        assert_eq!(&text[delimiters.written(&text, &piece).unwrap()], want);
    }

    #[track_caller]
    fn refuses(delimiters: &TurnDelimiters, turn: &str, prompt: &str) {
        let error = delimiters.written(turn, &MessageText { message: 5, range: 0..turn.len() }).unwrap_err();
        assert_eq!(error, TurnError::NoGenerationPrompt { message: 5, prompt: prompt.into() });
    }

    #[test]
    fn a_header_is_as_much_of_the_prompt_as_the_turn_repeats() {
        let prompt = "<a><think>";
        let delimiters = delimiters(prompt, prompt, &[("", "<a>xx</a>\n", "<a>yy</a>\n")]);
        check(&delimiters, "", "<a>hi</a>\n", "hi</a>");
        check(&delimiters, "", "<a><think>hi</a>\n", "hi</a>");
        check(&delimiters, "", "<s>system</s><a>hi <a></a>\n", "hi <a></a>");
        check(&delimiters, "<a>", "hi \n", "hi \n");
        refuses(&delimiters, "hi", prompt);
    }

    #[test]
    fn a_header_may_begin_in_the_turn_before() {
        let turns = [("q\n\n", "Answer:\nxx", "Answer:\nyy"), ("é\n\n", "Answer:\nxx", "Answer:\nyy")];
        let delimiters = delimiters("\n\nAnswer:\n", "", &turns);
        check(&delimiters, "é\n\n", "Answer:\nAnswer:\n", "Answer:\n");
        refuses(&delimiters, "Answer:\nhi", "\n\nAnswer:\n");
    }

    #[test]
    fn a_prompt_that_is_printed_unasked_is_a_prompt() {
        let turns = [("", "<a><say>xx</a>", "<a><say>yy</a>")];
        check(&delimiters("", "<a><say>", &turns), "", "<a><say>hi</a>", "hi</a>");
        check(&delimiters("<say>", "<a><say>", &turns), "", "<a><say>hi</a>", "hi</a>");
        check(&delimiters("", "</a>", &turns), "", "<a><say>hi</a>", "<a><say>hi</a>");
        check(&delimiters("", "</s>", &turns), "", "<a><say>hi</a>", "<a><say>hi</a>");
    }

    #[test]
    fn half_a_token_is_no_header() {
        let turns = [("", "<|START_TURN|>xx", "<|START_TURN|>yy")];
        refuses(&delimiters("<|START_ANSWER|>", "", &turns), "<|START_TURN|>hi", "<|START_ANSWER|>");
        let turns = [("", "<|start|>assistant xx", "<|start|>assistant yy")];
        refuses(&delimiters("<|start|>model", "", &turns), "<|start|>assistant hi", "<|start|>model");
    }

    #[test]
    fn trailing_whitespace_belongs_to_the_turn() {
        check(&delimiters("", "", &[("", "xx\n", "yy\n")]), "", "hi\n", "hi\n");
    }

    #[test]
    fn prefixes_and_suffixes_end_between_letters() {
        assert_eq!(common_prefix("aéx", "aèx"), "a");
        assert_eq!(common_suffix("éx", "èx"), "x");
        assert_eq!(common_prefix("ab", "abc"), "ab");
        assert_eq!(common_suffix("", "abc"), "");
    }
}
