//! Limits on the cost of templates, which come from untrusted sources.

use std::io::{self, Write};

use minijinja::{Error, ErrorKind};

/// Instruction limit of one rendering. A chat of a thousand messages takes some hundred thousand.
pub(super) const FUEL: u64 = 50_000_000;
/// Output limit of one rendering, in bytes.
pub const MAX_OUTPUT: usize = 64 << 20;
/// Length limit of a list that an operator creates.
const MAX_ITEMS: usize = 1 << 20;
/// Size limit of a template's source, in bytes. The longest templates in use have 20,000.
pub(super) const MAX_SOURCE: usize = 256 << 10;

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
        _ => Err(Error::new(ErrorKind::InvalidOperation, too_large())),
    }
}

/// Returns an error if a list would exceed [`MAX_ITEMS`] items. `None` means that its length overflows.
pub(super) fn check_items(n_items: Option<usize>) -> Result<(), Error> {
    match n_items {
        Some(n) if n <= MAX_ITEMS => Ok(()),
        _ => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a list is longer than {MAX_ITEMS} items, the maximum"),
        )),
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
