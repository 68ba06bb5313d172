//! Operands of template operations: their text, and the check for undefined values.

use std::borrow::Cow;

use minijinja::{Error, ErrorKind, State, UndefinedBehavior, Value};

use super::print::str;

/// Returns `str(value)`, or an error for an undefined value if the environment is strict.
pub(super) fn text_of<'a>(state: &State, value: &'a Value) -> Result<Cow<'a, str>, Error> {
    match value.as_str() {
        Some(text) => Ok(Cow::Borrowed(text)),
        None => check_defined(state, value).and_then(|()| str(value)).map(Cow::Owned),
    }
}

/// Returns an error for an undefined value if the environment is strict.
pub(super) fn check_defined(state: &State, value: &Value) -> Result<(), Error> {
    match value.is_undefined() && state.undefined_behavior() == UndefinedBehavior::Strict {
        true => Err(Error::from(ErrorKind::UndefinedError)),
        false => Ok(()),
    }
}
