//! Width of the terminal.

use std::io::{self, IsTerminal};

use terminal_size::{Width, terminal_size_of};

/// Columns of a terminal whose width is unknown.
pub const DEFAULT_WIDTH: usize = 80;

/// Returns the columns of stderr, if it is a terminal.
pub fn stderr_width() -> Option<usize> {
    let stderr = io::stderr();
    stderr.is_terminal().then(|| match terminal_size_of(stderr) {
        Some((Width(columns), _)) if columns > 0 => usize::from(columns),
        _ => DEFAULT_WIDTH,
    })
}
