//! The launcher's own stdout and stderr. They often lead to one place, so one lock guards both: whole lines go in turn.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use crate::streams::Stream;

static TURN: Mutex<()> = Mutex::new(());

/// Writes whole lines. A console that is gone or full is no reason to stop, and there is nobody to tell.
pub fn write(stream: Stream, lines: &[u8]) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = match stream {
        Stream::Out => write_all(&mut io::stdout().lock(), lines),
        Stream::Err => write_all(&mut io::stderr().lock(), lines),
    };
}

/// Writes a line of the launcher's own.
pub fn say(text: &str) {
    write(Stream::Err, format!("launch: {text}\n").as_bytes());
}

fn write_all(to: &mut impl Write, lines: &[u8]) -> io::Result<()> {
    to.write_all(lines)?;
    to.flush()
}
