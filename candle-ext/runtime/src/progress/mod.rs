//! Progress of long work, on stderr: a bar in a terminal, else a line every ten seconds.

mod bars;
mod downloads;
mod lines;

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use candlewick_text::printable::printable;
use indicatif::{ProgressBar, ProgressStyle};

use crate::terminal::print_log;

pub use bars::{AboveBars, show_bar};
pub use downloads::show_downloads;
pub use lines::ProgressLines;

/// The display of progress in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgressDisplay {
    /// Bars in a terminal, else lines.
    Bars,
    /// Lines, also in a terminal: log lines would interrupt a bar.
    Lines,
    /// None.
    Hidden,
}

/// The display of new progress, as [`ProgressDisplay`].
static DISPLAY: AtomicU8 = AtomicU8::new(ProgressDisplay::Bars as u8);

/// Sets the display of all progress that starts from now on. A program calls this once, before its work.
pub fn set_progress_display(display: ProgressDisplay) {
    DISPLAY.store(display as u8, Ordering::Relaxed);
}

/// The counted unit of a work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgressUnit {
    /// Things, such as `rows`.
    Count(&'static str),
    /// Bytes.
    Bytes,
}

/// The progress of one work. It disappears when it is dropped.
#[derive(Debug)]
pub struct WorkProgress {
    bar: Option<ProgressBar>,
    lines: Option<ProgressLines>,
    unit: ProgressUnit,
    done: AtomicUsize,
    total: AtomicUsize,
}

impl WorkProgress {
    /// Starts to show a work of `total` units; 0 if the total is not known yet.
    pub fn start(what: &str, unit: ProgressUnit, total: usize) -> Self {
        let display = DISPLAY.load(Ordering::Relaxed);
        let has_bar = display == ProgressDisplay::Bars as u8 && io::stderr().is_terminal();
        let has_lines = !has_bar && display != ProgressDisplay::Hidden as u8;
        let bar = has_bar.then(|| {
            show_bar(ProgressBar::new(total as u64)).with_style(style(unit)).with_message(printable(what).into_owned())
        });
        let name = match unit {
            ProgressUnit::Count(name) => name,
            ProgressUnit::Bytes => "MB",
        };
        let lines = has_lines.then(|| ProgressLines::new(what, name, |line| print_log(&line)));
        let progress = Self { bar, lines, unit, done: AtomicUsize::new(0), total: AtomicUsize::new(total) };
        progress.set(0, total);
        progress
    }

    /// Creates progress without a display.
    pub fn hidden() -> Self {
        let (done, total) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { bar: None, lines: None, unit: ProgressUnit::Bytes, done, total }
    }

    /// Adds finished units.
    pub fn add(&self, n: usize) {
        let done = self.done.fetch_add(n, Ordering::Relaxed) + n;
        self.show(done, self.total.load(Ordering::Relaxed));
    }

    /// Sets the finished units and the total.
    pub fn set(&self, done: usize, total: usize) {
        self.done.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
        self.show(done, total);
    }

    fn show(&self, done: usize, total: usize) {
        if let Some(bar) = &self.bar {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        }
        let scale = if self.unit == ProgressUnit::Bytes { 1_000_000 } else { 1 };
        self.lines.iter().for_each(|lines| lines.set(done / scale, total.div_ceil(scale)));
    }
}

impl Drop for WorkProgress {
    fn drop(&mut self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
    }
}

fn style(unit: ProgressUnit) -> ProgressStyle {
    let template = match unit {
        ProgressUnit::Count(name) => format!("{{msg}} {{wide_bar}} {{pos}}/{{len}} {name} {{eta}}"),
        ProgressUnit::Bytes => "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}".to_owned(),
    };
    ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
