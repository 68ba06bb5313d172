//! Text for the terminal: results on stdout, notes on stderr.
//!
//! Models, files and servers may put control characters into any text. Only this module and the other files that
//! `tests/tests/it/layers.rs` lists write to the terminal.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use anyhow::{Context, Result};
use candlewick_text::printable::{mask_passwords, printable};

use crate::progress::AboveBars;

/// Prints a result to stdout, and a line break. Escapes control characters; JSON stays JSON. A closed pipe is not an error.
pub fn print_line(text: &str) -> Result<()> {
    write_line(&printable(text))
}

/// Prints text that a model generated to stdout, and a line break. A file or a pipe gets the text unchanged.
pub fn print_generated(text: &str) -> Result<()> {
    write_line(&GeneratedTextStyle::of_stdout().apply(text))
}

/// Prints a note to stderr, above progress bars. Escapes control characters and masks passwords in URLs. A closed pipe
/// is not an error.
pub fn print_note(text: &str) {
    let _ = AboveBars.write_all(format!("{}\n", mask_passwords(&printable(text))).as_bytes());
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
