//! The launcher's own stdout and stderr. They often lead to one place, so one lock guards both: whole lines go in turn.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use crate::streams::StdStream;

static CONSOLE_LOCK: Mutex<()> = Mutex::new(());

/// Writes whole lines. A console that is gone or full is no reason to stop, and there is nobody to tell.
pub fn write(stream: StdStream, lines: &[u8]) {
    let _lock = CONSOLE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = match stream {
        StdStream::Out => write_all(&mut io::stdout().lock(), lines),
        StdStream::Err => write_all(&mut io::stderr().lock(), lines),
    };
}

/// Writes a line of the launcher's own.
pub fn log(text: &str) {
    write(StdStream::Err, format!("launch: {text}\n").as_bytes());
}

fn write_all(to: &mut impl Write, lines: &[u8]) -> io::Result<()> {
    to.write_all(lines)?;
    to.flush()
}
