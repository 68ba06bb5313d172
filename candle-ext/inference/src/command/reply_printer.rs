//! Printer of a chat's replies, with the thinking in another style than the content.

use std::io::{self, Stdout, Write};

use anstream::{AutoStream, ColorChoice};
use candlewick_runtime::terminal::GeneratedTextStyle;
use clap::builder::styling::Style;

use crate::reasoning::ReplyText;

/// Prints replies as they are generated.
pub(super) struct ReplyPrinter<W> {
    out: W,
    text_style: GeneratedTextStyle,
    style: ThinkingStyle,
    /// True if the reply has printed thinking and no content.
    is_thinking: bool,
}

/// Style of the thinking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ThinkingStyle {
    Hidden,
    /// Dimmed by terminal escapes.
    Dimmed,
    /// As the content.
    Plain,
}

impl ThinkingStyle {
    /// Returns the style of visible thinking: dimmed if stdout shows styles. `NO_COLOR` and `CLICOLOR_FORCE` apply.
    pub(super) fn of_stdout() -> Self {
        match AutoStream::choice(&io::stdout()) {
            ColorChoice::Never => Self::Plain,
            _ => Self::Dimmed,
        }
    }
}

impl ReplyPrinter<Stdout> {
    pub(super) fn of_stdout(style: ThinkingStyle) -> Self {
        Self::new(io::stdout(), GeneratedTextStyle::of_stdout(), style)
    }
}

impl<W: Write> ReplyPrinter<W> {
    fn new(out: W, text_style: GeneratedTextStyle, style: ThinkingStyle) -> Self {
        Self { out, text_style, style, is_thinking: false }
    }

    /// Prints the newest part of a reply. An empty line separates the thinking from the content.
    pub(super) fn print(&mut self, text: &ReplyText) -> io::Result<()> {
        let [reasoning, content] = [&text.reasoning, &text.content].map(|text| self.text_style.apply(text));
        if !reasoning.is_empty() && self.style != ThinkingStyle::Hidden {
            let style = if self.style == ThinkingStyle::Dimmed { Style::new().dimmed() } else { Style::new() };
            write!(self.out, "{style}{reasoning}{style:#}")?;
            self.is_thinking = true;
        }
        if !content.is_empty() {
            let separator = if std::mem::take(&mut self.is_thinking) { "\n\n" } else { "" };
            write!(self.out, "{separator}{content}")?;
        }
        self.out.flush()
    }

    /// Ends the line of a reply.
    pub(super) fn end(&mut self) -> io::Result<()> {
        self.is_thinking = false;
        writeln!(self.out)?;
        self.out.flush()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(style: ThinkingStyle, want: &str) {
        let mut out = Vec::new();
        let mut printer = ReplyPrinter::new(&mut out, GeneratedTextStyle::Unchanged, style);
        let part =
            |reasoning: &str, content: &str| ReplyText { reasoning: reasoning.to_owned(), content: content.to_owned() };
        let replies = [vec![part("a", ""), part("b", "c"), part("", "d")], vec![part("e", "")], vec![part("", "f")]];
        for reply in &replies {
            reply.iter().for_each(|part| printer.print(part).unwrap());
            printer.end().unwrap();
        }
        assert_eq!(String::from_utf8(out).unwrap(), want, "{style:?}");
    }

    #[test]
    fn thinking_is_dimmed_plain_or_hidden() {
        check(ThinkingStyle::Plain, "ab\n\ncd\ne\nf\n");
        check(ThinkingStyle::Hidden, "cd\n\nf\n");
        let dimmed = "\u{1b}[2ma\u{1b}[0m\u{1b}[2mb\u{1b}[0m\n\ncd\n\u{1b}[2me\u{1b}[0m\nf\n";
        check(ThinkingStyle::Dimmed, dimmed);
    }

    #[test]
    fn control_characters_of_a_model_are_escaped_in_a_terminal() {
        let reply = ReplyText { reasoning: "\u{1b}[2J".to_owned(), content: "a\u{9b}31m\n\u{202e}".to_owned() };
        for (text_style, want) in [
            (GeneratedTextStyle::Escaped, "\\u001b[2J\n\na\\u009b31m\n\\u202e"),
            (GeneratedTextStyle::Unchanged, "\u{1b}[2J\n\na\u{9b}31m\n\u{202e}"),
        ] {
            let mut out = Vec::new();
            ReplyPrinter::new(&mut out, text_style, ThinkingStyle::Plain).print(&reply).unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), want);
        }
    }
}
