//! The progress bars of the process, and a writer that prints above them.

use std::io::{self, IsTerminal, Write};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, TermLike};

use crate::terminal_width::{DEFAULT_WIDTH, stderr_width};

/// All progress bars of the process. They are visible only if stderr is a terminal.
static BARS: LazyLock<MultiProgress> = LazyLock::new(|| {
    let target = match io::stderr().is_terminal() {
        true => ProgressDrawTarget::term_like_with_hz(Box::new(BarArea::default()), DRAWS_PER_SECOND),
        false => ProgressDrawTarget::hidden(),
    };
    MultiProgress::with_draw_target(target)
});

const DRAWS_PER_SECOND: u8 = 20;

/// The columns of the terminal in which bars are drawn. The last ones stay free for the `^C` of a terminal: it would begin a
/// line, and the removal of the bar would leave a part.
#[derive(Debug, Default)]
struct BarArea(Mutex<Vec<u8>>);

const FREE_COLUMNS: usize = 3;

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

impl BarArea {
    fn buffer(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, text: &str) -> io::Result<()> {
        self.buffer().extend(text.as_bytes());
        Ok(())
    }

    /// Adds a control sequence with a count, unless the count is 0, which terminals read as 1.
    fn push_move(&self, n: usize, direction: char) -> io::Result<()> {
        if n == 0 { Ok(()) } else { self.push(&format!("\x1b[{n}{direction}")) }
    }
}

impl TermLike for BarArea {
    fn width(&self) -> u16 {
        let columns = stderr_width().unwrap_or(DEFAULT_WIDTH).saturating_sub(FREE_COLUMNS);
        u16::try_from(columns).unwrap_or(u16::MAX)
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.push_move(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.push_move(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.push_move(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.push_move(n, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.push(text).and_then(|()| self.push("\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.push(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.push("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        let bytes = std::mem::take(&mut *self.buffer());
        // The terminal may be gone, and the program shall still save its work.
        let _ = io::stderr().write_all(&bytes);
        Ok(())
    }
}
