//! Limits on the cost of templates, which come from untrusted sources.

use std::io::{self, Write};
use std::thread;

use minijinja::{Environment, Error, ErrorKind};

use super::python;

/// Instruction limit of one rendering. A chat of a thousand messages takes some hundred thousand.
pub(super) const FUEL: u64 = 50_000_000;
/// Output limit of one rendering, in bytes.
pub const MAX_OUTPUT: usize = 64 << 20;
/// Size limit of a template's source, in bytes. The longest templates in use have 20,000.
pub(super) const MAX_SOURCE: usize = 256 << 10;

/// Parses a template on a thread whose stack suffices for the deepest possible nesting. Its operators become Python's.
///
/// # Errors
/// If the source is not a valid template. The error's source is [`ThreadSpawnError`] if there is no memory for the
/// thread.
pub fn add_template(environment: &mut Environment<'static>, name: &'static str, source: String) -> Result<(), Error> {
    // Two bytes open a nesting level. A level needs up to 8 KiB of stack in a debug build.
    let stack = (8 << 20) + source.len() / 2 * (8 << 10);
    let parse = || {
        let source = python::rewritten(environment, source)?;
        environment.add_template_owned(name, source)
    };
    let no_thread = |error: io::Error| {
        let error = ThreadSpawnError { mib: stack >> 20, reason: error.to_string() };
        Error::new(ErrorKind::InvalidOperation, error.to_string()).with_source(error)
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(stack).spawn_scoped(scope, parse).map_err(no_thread)?;
        thread.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::SyntaxError, "the parser failed on it")))
    })
}

/// Error of a thread that the system did not start, for lack of address space or threads.
#[derive(Clone, Debug, thiserror::Error)]
#[error("no memory for a thread with a stack of {mib} MiB: {reason}")]
pub struct ThreadSpawnError {
    mib: usize,
    reason: String,
}

/// Output of one rendering. Writing beyond [`MAX_OUTPUT`] bytes fails.
#[derive(Debug, Default)]
pub(super) struct LimitedOutput(Vec<u8>);

impl LimitedOutput {
    /// Returns the text.
    pub(super) fn into_text(self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

impl Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            return Err(io::Error::other("the output is too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns an error if a text would exceed [`MAX_OUTPUT`] bytes. `None` means that its size overflows.
///
/// # Errors
/// If the text is too long.
pub fn check_size(n_bytes: Option<usize>) -> Result<(), Error> {
    match n_bytes {
        Some(n) if n <= MAX_OUTPUT => Ok(()),
        _ => Err(python::invalid(too_large())),
    }
}

/// Returns the message for a text above [`MAX_OUTPUT`] bytes.
pub fn too_large() -> String {
    format!("a text is longer than {} MiB, the maximum", MAX_OUTPUT >> 20)
}

/// Describes an exceeded limit.
pub(super) fn explain(error: &Error) -> Option<String> {
    match error.kind() {
        ErrorKind::OutOfFuel => Some(format!("it takes more than {FUEL} instructions; a loop may be endless")),
        ErrorKind::WriteFailure => Some(format!("it prints more than {} MiB", MAX_OUTPUT >> 20)),
        _ => None,
    }
}
