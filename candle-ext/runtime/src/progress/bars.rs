//! The progress bars of the process, and a writer that prints above them.

use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget};

/// All progress bars of the process. They are visible only if stderr is a terminal.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Adds a progress bar.
pub fn show_bar(bar: ProgressBar) -> ProgressBar {
    BARS.add(bar)
}

/// A writer to stderr that prints above the progress bars. It drops bytes that cannot be written: the terminal or the reader
/// of a pipe may be gone, and the program shall still save its work.
#[derive(Clone, Copy, Debug, Default)]
pub struct AboveBars;

impl Write for AboveBars {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !io::stderr().is_terminal() {
            // indicatif panics if it cannot draw on a terminal that is lost.
            BARS.set_draw_target(ProgressDrawTarget::hidden());
        }
        let _ = BARS.suspend(|| io::stderr().write_all(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
