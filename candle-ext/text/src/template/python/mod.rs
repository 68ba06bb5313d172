//! Python's behavior in Jinja templates: printed values, operators, methods, filters, tests and functions that
//! minijinja lacks or evaluates differently.
//!
//! Chat templates and templates of evaluation tasks share it. A fixture compares both with Jinja in Python.

mod filters;
mod globals;
mod json;
mod methods;
mod operators;
mod percent;
mod print;
pub mod text;
mod value;

use std::borrow::Cow;

use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value};

pub(super) use json::tojson;
pub use json::{html_safe_json, indented_json};
pub(super) use operators::rewritten;
pub use print::{float, repr, repr_of_json, str};
pub use value::{LongInteger, from_json, number_text};

/// Sets up an environment: its formatter, methods, filters, tests and functions.
pub fn install(environment: &mut Environment<'_>) {
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_formatter(print_value);
    environment.set_unknown_method_callback(methods::call);
    operators::install(environment);
    filters::install(environment);
    globals::install(environment);
}

/// Prints a value of a template as Python's `str` does.
fn print_value(out: &mut Output, _: &mut State, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&str(value)?),
    };
    Ok(written?)
}

/// Returns `str(value)`, or an error for an undefined value if the environment is strict.
fn text_of<'a>(state: &State, value: &'a Value) -> Result<Cow<'a, str>, Error> {
    match value.as_str() {
        Some(text) => Ok(Cow::Borrowed(text)),
        None => check_defined(state, value).and_then(|()| str(value)).map(Cow::Owned),
    }
}

/// Returns an error for an undefined value if the environment is strict.
fn check_defined(state: &State, value: &Value) -> Result<(), Error> {
    match value.is_undefined() && state.undefined_behavior() == UndefinedBehavior::Strict {
        true => Err(Error::from(ErrorKind::UndefinedError)),
        false => Ok(()),
    }
}

/// Creates an error of a template operation.
pub fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}
