//! The progress bars of the process, and a writer that prints above them.

use std::io::{self, Write};
use std::sync::LazyLock;

use indicatif::{MultiProgress, ProgressBar};

/// All progress bars of the process. They are visible only if stderr is a terminal.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Adds a progress bar.
pub fn show_bar(bar: ProgressBar) -> ProgressBar {
    BARS.add(bar)
}

/// A writer to stderr that prints above the progress bars.
#[derive(Clone, Copy, Debug, Default)]
pub struct AboveBars;

impl Write for AboveBars {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        BARS.suspend(|| io::stderr().write_all(bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
