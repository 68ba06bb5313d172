//! The launcher's stdout and stderr. Both are often the same terminal, so one lock keeps lines whole.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use crate::streams::StdStream;

static CONSOLE_LOCK: Mutex<()> = Mutex::new(());

/// Writes whole lines. Errors are ignored: a closed or full console does not stop the workers.
pub fn write(stream: StdStream, lines: &[u8]) {
    let _lock = CONSOLE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = match stream {
        StdStream::Out => write_all(&mut io::stdout().lock(), lines),
        StdStream::Err => write_all(&mut io::stderr().lock(), lines),
    };
}

/// Logs a line of the launcher to stderr.
pub fn log(text: &str) {
    write(StdStream::Err, format!("launch: {text}\n").as_bytes());
}

fn write_all(to: &mut impl Write, lines: &[u8]) -> io::Result<()> {
    to.write_all(lines)?;
    to.flush()
}
