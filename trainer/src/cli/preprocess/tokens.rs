//! Tokens as text for the terminal: targets and special tokens are coloured, or targets are in brackets.

use std::io;

use anstream::{AutoStream, ColorChoice};
use candlewick_text::printable::printable;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use clap::builder::styling::{AnsiColor, Style};

/// Prints tokens with their targets.
pub(super) struct TokenPrinter<'a> {
    tokenizer: &'a Tokenizer,
    marking: Marking,
}

/// The way to mark targets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Marking {
    Colours,
    Brackets,
}

impl Marking {
    /// Returns colours if stdout shows them. `NO_COLOR` and `CLICOLOR_FORCE` apply.
    pub(super) fn of_stdout() -> Self {
        match AutoStream::choice(&io::stdout()) {
            ColorChoice::Never => Self::Brackets,
            _ => Self::Colours,
        }
    }

    /// Explains the marks.
    pub(super) fn legend(self) -> &'static str {
        match self {
            Self::Colours => "targets are green, special tokens bold",
            Self::Brackets => "targets are in [[ ]]",
        }
    }
}

/// Consecutive tokens that look alike.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Look {
    is_target: bool,
    is_special: bool,
}

impl<'a> TokenPrinter<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, marking: Marking) -> Self {
        Self { tokenizer, marking }
    }

    /// Returns the text of a sequence with its marks. `is_target` has a flag for each token.
    pub(super) fn text(&self, ids: &[u32], is_target: &[bool]) -> String {
        let look = |idx: usize| Look {
            is_target: is_target[idx],
            is_special: self.marking == Marking::Colours && self.tokenizer.is_special(ids[idx]),
        };
        let looks: Vec<Look> = (0..ids.len()).map(look).collect();
        let (mut text, mut start) = (String::new(), 0);
        for run in looks.chunk_by(|left, right| left == right) {
            let end = start + run.len();
            text += &self.mark(&printable(&self.decode(ids, start, end)), run[0]);
            start = end;
        }
        text
    }

    fn mark(&self, text: &str, look: Look) -> String {
        match self.marking {
            Marking::Brackets if look.is_target => format!("[[{text}]]"),
            Marking::Brackets => text.to_owned(),
            Marking::Colours => {
                let colour = look.is_target.then(|| AnsiColor::Green.into());
                let style = Style::new().fg_color(colour);
                let style = if look.is_special { style.bold() } else { style };
                format!("{style}{text}{style:#}")
            }
        }
    }

    /// Decodes some of the tokens. Decoders drop the space before a first word, so the text before is decoded too.
    fn decode(&self, ids: &[u32], start: usize, end: usize) -> String {
        let decode = |ids: &[u32]| self.tokenizer.decode(ids, SpecialTokens::Include).unwrap_or_default();
        let before = start.saturating_sub(8);
        let (context, whole) = (decode(&ids[before..start]), decode(&ids[before..end]));
        match whole.strip_prefix(&context) {
            Some(text) => text.to_owned(),
            None => decode(&ids[start..end]),
        }
    }
}
