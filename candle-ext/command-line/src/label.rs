//! Colours of the labels of messages on stderr.

use std::borrow::Cow;
use std::io::stderr;

use anstream::{AutoStream, ColorChoice};
use clap::builder::Styles;
use clap::builder::styling::{AnsiColor, Style};

/// Returns true if stderr shows colours: a terminal, unless `NO_COLOR`, `CLICOLOR` or `TERM=dumb` forbid them, and anything with
/// `CLICOLOR_FORCE`.
pub fn stderr_has_colors() -> bool {
    AutoStream::choice(&stderr()) != ColorChoice::Never
}

/// Returns a message for stderr. If stderr shows colours, its label `error:` is red and `warning:` yellow, as clap's and
/// cargo's.
pub fn with_label_color(message: &str) -> Cow<'_, str> {
    if stderr_has_colors() { paint(message) } else { Cow::Borrowed(message) }
}

fn paint(message: &str) -> Cow<'_, str> {
    let error = *Styles::styled().get_error();
    let warning = Style::new().bold().fg_color(Some(AnsiColor::Yellow.into()));
    for (label, style) in [("error:", error), ("warning:", warning)] {
        if let Some(rest) = message.strip_prefix(label) {
            return Cow::Owned(format!("{style}{label}{style:#}{rest}"));
        }
    }
    Cow::Borrowed(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_colors_and_the_rest_has_none() {
        assert_eq!(paint("error: no such file"), "\u{1b}[1m\u{1b}[31merror:\u{1b}[0m no such file");
        assert_eq!(paint("warning: slow"), "\u{1b}[1m\u{1b}[33mwarning:\u{1b}[0m slow");
        assert_eq!(paint("note: an error: is here"), "note: an error: is here");
    }
}
