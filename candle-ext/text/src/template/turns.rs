//! Which part of a rendered chat is whose: pieces of text by message, and of an assistant's piece
//! the part that the model itself writes.

use std::ops::Range;

use super::markers::Mark;

/// Why the assistant's text was not found in a rendering.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TurnError {
    /// The template reacts to markers, or prints characters that Unicode reserves.
    #[error("the template prints something else when its turns are marked")]
    Disturbed,
    /// An assistant message left no text.
    #[error("message {message} (assistant) leaves no text of its own in the rendering")]
    Missing {
        /// Which message, from 0.
        message: usize,
    },
    /// An assistant message left text in several places.
    #[error("message {message} (assistant) is printed in several places")]
    Scattered {
        /// Which message, from 0.
        message: usize,
    },
    /// The assistant's turn does not begin as the generation prompt does.
    #[error("message {message} (assistant) does not begin with the generation prompt {prompt:?}")]
    Header {
        /// Which message, from 0.
        message: usize,
        /// What the template prints to make the model speak.
        prompt: String,
    },
    /// A `generation` block is not closed where it should be.
    #[error("a generation block begins or ends inside another one")]
    Blocks,
}

/// What lies between the marks of `generation` blocks.
pub(super) fn generation_spans(marks: &[(usize, Mark)]) -> Result<Vec<Range<usize>>, TurnError> {
    let mut spans = Vec::new();
    let mut start = None;
    for (at, mark) in marks {
        match (mark, start) {
            (Mark::GenerationOpens, None) => start = Some(*at),
            (Mark::GenerationCloses, Some(from)) => {
                spans.push(from..*at);
                start = None;
            }
            _ => return Err(TurnError::Blocks),
        }
    }
    spans.retain(|span| !span.is_empty());
    match start {
        None => Ok(spans),
        Some(_) => Err(TurnError::Blocks),
    }
}

/// A stretch of text printed while a loop stood at a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) message: usize,
    pub(super) range: Range<usize>,
}

/// Splits a text by the innermost loop over messages. Text outside of all of them (a hoisted
/// system prompt, a generation prompt at the end) is nobody's.
pub(super) fn pieces(marks: &[(usize, Mark)]) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut open: Vec<(usize, usize)> = Vec::new();
    let mut start = 0;
    for (at, mark) in marks {
        if let Some((_, message)) = open.last() {
            push(&mut pieces, Piece { message: *message, range: start..*at });
        }
        start = *at;
        let (Mark::Turn { loop_id, .. } | Mark::LoopCloses { loop_id }) = mark else { continue };
        if let Some(depth) = open.iter().position(|(open_id, _)| open_id == loop_id) {
            open.truncate(depth);
        }
        if let Mark::Turn { message, .. } = mark {
            open.push((*loop_id, *message));
        }
    }
    pieces
}

fn push(pieces: &mut Vec<Piece>, piece: Piece) {
    match pieces.last_mut() {
        _ if piece.range.is_empty() => {}
        Some(last) if last.message == piece.message && last.range.end == piece.range.start => {
            last.range.end = piece.range.end;
        }
        _ => pieces.push(piece),
    }
}

/// What stands around the model's words in an assistant's piece. Learnt once a template, from
/// chats of our own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Frame {
    /// What may stand before the words: beginnings of the generation prompt, shortest first.
    headers: Vec<String>,
    /// What stands behind the words of every turn, longest first: the end of turn, which is the
    /// model's to write, and white space, which is not.
    footers: Vec<String>,
}

/// The same place of a chat filled with two different words.
pub(super) struct Probe {
    pub(super) first: String,
    pub(super) second: String,
}

impl Frame {
    /// Learns from the generation prompt and from turns that differ in their words only: what two
    /// such turns share at their beginning is not the words, and is a header as far as the prompt
    /// says it too. `tail` is what the template prints behind the last turn unasked; templates
    /// older than `add_generation_prompt` always print the prompt there.
    pub(super) fn learn(prompt: &str, tail: &str, probes: &[Probe]) -> Self {
        let shared = |probe: &Probe| common_prefix(&probe.first, &probe.second).to_owned();
        let mut headers: Vec<String> = if prompt.is_empty() {
            let is_prompt = !tail.is_empty()
                && probes.iter().any(|probe| shared(probe).starts_with(tail));
            is_prompt.then(|| tail.to_owned()).into_iter().collect()
        } else {
            let starts = probes.iter().map(|probe| common_prefix(prompt, &shared(probe)).to_owned());
            starts.chain([prompt.to_owned()]).collect()
        };
        let mut footers: Vec<String> = probes
            .iter()
            .map(|probe| common_suffix(&probe.first, &probe.second).to_owned())
            .filter(|footer| !footer.trim_end().is_empty())
            .collect();
        headers.retain(|header| !header.is_empty());
        headers.sort_by_key(String::len);
        headers.dedup();
        footers.sort_by_key(|footer| std::cmp::Reverse(footer.len()));
        footers.dedup();
        Self { headers, footers }
    }

    /// The part of an assistant's piece that the model writes: its words and the end of its turn.
    pub(super) fn written(&self, text: &str, piece: &Piece) -> Result<Range<usize>, TurnError> {
        let (before, turn) = (&text[..piece.range.start], &text[piece.range.clone()]);
        let message = piece.message;
        let start = self.end_of_header(before, turn).ok_or_else(|| TurnError::Header {
            message,
            prompt: self.headers.last().cloned().unwrap_or_default(),
        })?;
        let footer = self.footers.iter().find(|footer| turn[start..].ends_with(footer.as_str()));
        let blank = footer.map_or(0, |footer| footer.len() - footer.trim_end().len());
        let written = piece.range.start + start..piece.range.end - blank;
        if written.is_empty() { Err(TurnError::Missing { message }) } else { Ok(written) }
    }

    fn end_of_header(&self, before: &str, turn: &str) -> Option<usize> {
        let Some(shortest) = self.headers.first() else { return Some(0) };
        let Some(at) = turn.find(shortest.as_str()) else {
            // Some templates print it at the end of the turn before.
            return self.headers.iter().any(|header| before.ends_with(header.as_str())).then_some(0);
        };
        let longest = self.headers.iter().rfind(|header| turn[at..].starts_with(header.as_str()));
        longest.map(|header| at + header.len())
    }
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

    fn turn(loop_id: usize, message: usize) -> Mark {
        Mark::Turn { loop_id, message }
    }

    fn close(loop_id: usize) -> Mark {
        Mark::LoopCloses { loop_id }
    }

    #[test]
    fn text_belongs_to_the_innermost_turn() {
        let marks = [
            (3, turn(1, 0)), (3, turn(1, 1)), (3, close(1)), // a scan that prints nothing
            (3, turn(2, 0)), (5, turn(3, 1)), (7, turn(3, 2)), (7, close(3)), (8, turn(2, 3)),
            (9, close(2)),
        ];
        let got: Vec<_> = pieces(&marks).into_iter().map(|p| (p.message, p.range)).collect();
        assert_eq!(got, [(0, 3..5), (1, 5..7), (0, 7..8), (3, 8..9)]);
    }

    #[test]
    fn unbalanced_generation_blocks_are_refused() {
        let (open, close) = (Mark::GenerationOpens, Mark::GenerationCloses);
        assert_eq!(generation_spans(&[(1, open), (4, close), (4, open), (4, close)]), Ok(vec![1..4]));
        assert_eq!(generation_spans(&[(1, open), (2, open)]), Err(TurnError::Blocks));
        assert_eq!(generation_spans(&[(1, close)]), Err(TurnError::Blocks));
        assert_eq!(generation_spans(&[(1, open)]), Err(TurnError::Blocks));
    }

    fn frame(prompt: &str, tail: &str, probes: &[(&str, &str)]) -> Frame {
        let probe = |(first, second): &(&str, &str)| Probe {
            first: (*first).to_owned(),
            second: (*second).to_owned(),
        };
        Frame::learn(prompt, tail, &probes.iter().map(probe).collect::<Vec<_>>())
    }

    #[track_caller]
    fn check(frame: &Frame, before: &str, turn: &str, want: &str) {
        let text = format!("{before}{turn}");
        let piece = Piece { message: 0, range: before.len()..text.len() };
        assert_eq!(&text[frame.written(&text, &piece).unwrap()], want);
    }

    #[test]
    fn a_header_is_as_much_of_the_prompt_as_the_turn_repeats() {
        let frame = frame("<a><think>", "", &[("<a>xx</a>\n", "<a>yy</a>\n")]);
        check(&frame, "", "<a>hi</a>\n", "hi</a>");
        check(&frame, "", "<a><think>hi</a>\n", "hi</a>");
        check(&frame, "", "<s>system</s><a>hi <a></a>\n", "hi <a></a>");
        check(&frame, "<a>", "hi \n", "hi \n");
        let piece = Piece { message: 5, range: 0..2 };
        let error = frame.written("hi", &piece).unwrap_err();
        assert_eq!(error, TurnError::Header { message: 5, prompt: "<a><think>".into() });
    }

    #[test]
    fn a_prompt_that_is_always_printed_is_a_prompt() {
        let turns = [("<a>xx</a>", "<a>yy</a>")];
        check(&frame("", "<a>", &turns), "", "<a>hi</a>", "hi</a>");
        check(&frame("", "</s>", &turns), "", "<a>hi</a>", "<a>hi</a>");
    }

    #[test]
    fn white_space_behind_nothing_else_is_the_models_own() {
        check(&frame("", "", &[("xx\n", "yy\n")]), "", "hi\n", "hi\n");
    }

    #[test]
    fn prefixes_and_suffixes_end_between_letters() {
        assert_eq!(common_prefix("aéx", "aèx"), "a");
        assert_eq!(common_suffix("éx", "èx"), "x");
        assert_eq!(common_prefix("ab", "abc"), "ab");
        assert_eq!(common_suffix("", "abc"), "");
    }
}
