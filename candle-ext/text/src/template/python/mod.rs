//! Python's behavior in Jinja templates: printed values, operators, methods, filters, tests and functions that
//! minijinja lacks or evaluates differently.
//!
//! Chat templates and templates of evaluation tasks share it. A fixture compares both with Jinja in Python.

mod error;
mod filters;
mod globals;
mod json;
mod methods;
mod operand;
mod operators;
mod percent;
mod print;
pub mod text;
mod value;

use minijinja::{AutoEscape, Environment, Error, Output, State, Value};

pub use error::invalid;
pub(super) use json::tojson;
pub use json::{html_safe_json, indented_json};
use operand::{check_defined, text_of};
pub(super) use operators::rewritten;
pub use print::{repr, repr_of_json, str};
pub use value::{LongInteger, float, from_json, number_text};

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
