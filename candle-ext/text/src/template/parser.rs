//! Parsing of templates, whose operators become Python's.

use std::io;
use std::thread;

use minijinja::{Environment, Error, ErrorKind};

use super::python;

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
