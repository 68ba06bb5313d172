//! Terminal output: results go to stdout, notes to stderr.

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use candlewick_text::hub::DownloadCallback;
use candlewick_text::printable::printable;
use indicatif::{ProgressBar, ProgressStyle};

use crate::exit::ExitCode;
use crate::metrics::{AboveBars, show_bar};

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

    /// Returns a callback that shows a progress bar for each download; none if quiet or if stderr is no terminal.
    pub fn downloads(&self) -> DownloadCallback {
        const BAR: &str = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}";
        let by_file: Mutex<HashMap<String, ProgressBar>> = Mutex::default();
        let quiet = self.quiet;
        Arc::new(move |progress| {
            if quiet {
                return;
            }
            let mut by_file = by_file.lock().unwrap_or_else(PoisonError::into_inner);
            let bar = by_file.entry(progress.file.to_owned()).or_insert_with(|| {
                let style = ProgressStyle::with_template(BAR).unwrap_or_else(|_| ProgressStyle::default_bar());
                show_bar(ProgressBar::new(progress.total).with_style(style).with_message(progress.file.to_owned()))
            });
            bar.set_position(progress.done);
            if progress.done >= progress.total {
                bar.finish_and_clear();
            }
        })
    }
}
