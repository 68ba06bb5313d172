//! Result lines on stdout.

use std::io::{self, Write};

use anyhow::{Context, Result};

/// Prints a line to stdout. A closed pipe is not an error.
pub fn print_line(text: &str) -> Result<()> {
    match writeln!(io::stdout().lock(), "{text}") {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("failed to write to stdout"),
    }
}
