//! Errors of template operations.

use minijinja::{Error, ErrorKind};

/// Creates an error of a template operation.
pub fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}
