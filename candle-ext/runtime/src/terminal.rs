//! Text for the terminal: results on stdout, notes on stderr.
//!
//! Models, files and servers may put control characters into any text. Only this module and the other files that
//! `tests/tests/it/layers.rs` lists write to the terminal.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use anyhow::{Context, Result};
use candlewick_command_line::with_label_color;
use candlewick_text::printable::{mask_passwords, printable};
use jiff::Timestamp;

use crate::progress::AboveBars;
use crate::terminal_width::stderr_width;
use crate::timestamp::utc_timestamp;

/// Prints a result to stdout, and a line break. Escapes control characters; JSON stays JSON. A closed pipe is not an error.
pub fn print_line(text: &str) -> Result<()> {
    write_line(&printable(text))
}

/// Prints text that a model generated to stdout, and a line break. A file or a pipe gets the text unchanged.
pub fn print_generated(text: &str) -> Result<()> {
    write_line(&GeneratedTextStyle::of_stdout().apply(text))
}

/// Prints a note to stderr, above progress bars. Escapes control characters, masks passwords in URLs, and colours the label of
/// an error or a warning. A closed pipe is not an error.
pub fn print_note(text: &str) {
    let _ = AboveBars.write_all(format!("{}\n", with_label_color(&safe(text))).as_bytes());
}

/// Prints a line of a program's log to stderr like [`print_note`]. It fits the width of a terminal. In a file or a pipe, it
/// begins with the time.
pub fn print_log(text: &str) {
    match stderr_width() {
        Some(width) => print_note(&wrap(text, width)),
        None => {
            let time = utc_timestamp(Timestamp::now());
            let _ = AboveBars.write_all(format!("{time} {}\n", with_label_color(&safe(text))).as_bytes());
        }
    }
}

/// Breaks lines of more than `width` characters between fields, which ` | ` separates, or between words. A longer word, such as a
/// path, stays whole.
pub fn wrap(text: &str, width: usize) -> String {
    let lines: Vec<String> = text.split('\n').map(|line| wrap_line(line, width)).collect();
    lines.join("\n")
}

fn wrap_line(line: &str, width: usize) -> String {
    if line.chars().count() <= width {
        return line.to_owned();
    }
    let separator = if line.contains(FIELD_SEPARATOR) { FIELD_SEPARATOR } else { " " };
    let (indent, words) = line.split_at(line.len() - line.trim_start_matches(' ').len());
    let (mut wrapped, mut columns) = (indent.to_owned(), indent.len());
    for (idx, part) in words.split(separator).enumerate() {
        let n = part.chars().count();
        if idx == 0 {
            columns += n;
        } else if columns + separator.len() + n <= width {
            wrapped += separator;
            columns += separator.len() + n;
        } else {
            wrapped += "\n  ";
            columns = 2 + n;
        }
        wrapped += part;
    }
    wrapped
}

/// Separator of the fields of a log line.
pub const FIELD_SEPARATOR: &str = " | ";

fn safe(text: &str) -> String {
    mask_passwords(&printable(text)).into_owned()
}

/// Prints the prompt of a line that the user types to stderr.
pub fn print_prompt() {
    let _ = AboveBars.write_all(b"> ");
}

/// Presentation of text that a model generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeneratedTextStyle {
    /// Control characters are escaped.
    Escaped,
    /// The text is unchanged.
    Unchanged,
}

impl GeneratedTextStyle {
    /// Returns `Escaped` if stdout is a terminal, else `Unchanged`.
    pub fn of_stdout() -> Self {
        if io::stdout().is_terminal() { Self::Escaped } else { Self::Unchanged }
    }

    /// Returns the text in this style.
    pub fn apply(self, text: &str) -> Cow<'_, str> {
        match self {
            Self::Escaped => printable(text),
            Self::Unchanged => Cow::Borrowed(text),
        }
    }
}

fn write_line(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("failed to write to stdout"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, width: usize, want: &str) {
        let wrapped = wrap(text, width);
        assert_eq!(wrapped, want);
        assert_eq!(wrap(&wrapped, width), want, "it is wrapped twice");
    }

    #[test]
    fn lines_break_between_words_or_fields() {
        check("short", 5, "short");
        check("a line of words", 10, "a line of\n  words");
        check("loss: 1.5 | lr: 1e-3 | time: 3 s", 24, "loss: 1.5 | lr: 1e-3\n  time: 3 s");
        check("one\ntwo three", 8, "one\ntwo\n  three");
        check("saved /a/very/long/path in 3 s", 10, "saved\n  /a/very/long/path\n  in 3 s");
        check("  = indented words", 12, "  = indented\n  words");
        check("", 10, "");
    }
}
