//! minijinja environment configured like Jinja in transformers.
//!
//! Whitespace rules, filters, functions and tests are the same. `python` has those that templates of evaluation tasks
//! share.

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, Value};

use super::clock::Clock;
use super::python::invalid;
use super::{limits, markers, python};

/// Length limit of a date format, in bytes.
const MAX_DATE_FORMAT: usize = 1000;

/// Creates an environment without templates.
pub(super) fn environment(clock: Clock) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the default delimiters differ from each other"));
    environment.set_fuel(Some(limits::FUEL));
    // An error would hold the template's values. These may be nested too deep for the thread that drops it.
    environment.set_debug(false);
    python::install(&mut environment);
    environment.add_filter("tojson", python::tojson);
    environment.add_function("raise_exception", raise_exception);
    markers::install(&mut environment);
    set_clock(&mut environment, clock);
    environment
}

/// Sets the clock of `strftime_now`.
pub(super) fn set_clock(environment: &mut Environment<'_>, clock: Clock) {
    environment.add_function("strftime_now", move |format: &str| {
        if format.len() > MAX_DATE_FORMAT {
            return Err(invalid(format!(
                "strftime_now: the format has {} bytes, the limit is {MAX_DATE_FORMAT}",
                format.len()
            )));
        }
        clock
            .format(format)
            .map_err(|directive| invalid(format!("strftime_now does not know the directive `%{directive}`")))
    });
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(invalid(python::str(message)?))
}
