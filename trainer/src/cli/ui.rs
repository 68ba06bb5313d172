//! Terminal output: results go to stdout, notes to stderr.

use anyhow::Result;
use candlewick_runtime::terminal::{print_line, print_log, print_note};

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
        print_line(text).map(|()| ExitCode::Ok)
    }

    /// Prints a line of the log to stderr, unless quiet.
    pub fn log(&self, text: &str) {
        if !self.quiet {
            print_log(text);
        }
    }

    /// Prints a note to stderr, unless quiet.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            print_note(text);
        }
    }
}
