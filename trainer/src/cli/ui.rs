//! Where words go: answers to stdout, remarks to stderr.

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use candlewick_text::hub::DownloadCallback;
use candlewick_text::printable::printable;
use indicatif::{ProgressBar, ProgressStyle};

use crate::exit::ExitCode;
use crate::metrics::{AboveBars, show_bar};

/// Speaks to the person at the terminal. Metrics have their own way ([`crate::metrics::Reporter`]).
#[derive(Clone, Copy, Debug)]
pub struct Ui {
    quiet: bool,
}

impl Ui {
    /// Makes remarks unless told to be quiet.
    pub fn new(quiet: bool) -> Self {
        Self { quiet }
    }

    /// Prints what was asked for, to stdout. A reader that has gone away is no failure.
    pub fn answer(&self, text: &str) -> Result<ExitCode> {
        let mut stdout = io::stdout().lock();
        match writeln!(stdout, "{}", printable(text)).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(anyhow::Error::new(error).context("failed to write to stdout"))
            }
            _ => Ok(ExitCode::Ok),
        }
    }

    /// Prints a remark to stderr, unless quiet.
    pub fn remark(&self, text: &str) {
        if !self.quiet {
            // A reader that has gone away is no failure.
            let _ = AboveBars.write_all(format!("{}\n", printable(text)).as_bytes());
        }
    }

    /// Shows a bar for each file that is downloaded; none if quiet or if stderr is no terminal.
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
