//! Terminal output: results go to stdout, notes to stderr.

use std::io::{self, Write};

use anyhow::Result;
use candlewick_runtime::progress::AboveBars;
use candlewick_text::printable::printable;

use crate::exit::ExitCode;

/// The terminal output of a command. [`crate::metrics::Reporter`] prints the metrics.
#[derive(Clone, Copy, Debug)]
pub struct Ui {
    quiet: bool,
}

impl Ui {
    /// Creates a `Ui` that prints notes unless `quiet`.
    pub fn new(quiet: bool) -> Self {
        Self { quiet }
    }

    /// Prints a command's result to stdout. A closed pipe is no error.
    pub fn print(&self, text: &str) -> Result<ExitCode> {
        let mut stdout = io::stdout().lock();
        match writeln!(stdout, "{}", printable(text)).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(anyhow::Error::new(error).context("failed to write to stdout"))
            }
            _ => Ok(ExitCode::Ok),
        }
    }

    /// Prints a note to stderr, unless quiet.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            // A closed pipe is no error.
            let _ = AboveBars.write_all(format!("{}\n", printable(text)).as_bytes());
        }
    }
}
