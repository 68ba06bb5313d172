//! minijinja environment configured like Jinja in transformers.
//!
//! Whitespace rules, filters, functions and tests are the same, as are the Python methods of strings, lists and
//! dicts.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat;

use super::clock::Clock;
use super::{json, limits, markers};

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
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", json::tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", is_sequence);
    environment.add_test("number", |value: &Value| value.is_number() || is_bool(value));
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
    Err(invalid(message.to_string()))
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Converts to an integer, with a default of 0 for other values as in Jinja. minijinja fails on them.
fn int(
    state: &mut State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    options: Kwargs,
) -> Result<Value, Error> {
    let default = default_or(default, &options, Value::from(0))?;
    filters::int(state, &trimmed(value), Some(default), base, options)
}

fn float(state: &mut State<'_, '_>, value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = default_or(default, &options, Value::from(0.0))?;
    filters::float(state, &trimmed(value), Some(default), options)
}

fn trimmed(value: &Value) -> Value {
    value.as_str().map_or_else(|| value.clone(), |text| Value::from(text.trim()))
}

fn default_or(given: Option<Value>, options: &Kwargs, otherwise: Value) -> Result<Value, Error> {
    let named = options.get::<Option<Value>>("default")?;
    Ok(given.or(named).unwrap_or(otherwise))
}

fn is_bool(value: &Value) -> bool {
    value.kind() == ValueKind::Bool
}

/// Returns true for values with a length and items, as Python does: strings and dicts too.
fn is_sequence(value: &Value) -> bool {
    let kind = value.kind();
    matches!(kind, ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
}

/// Calls a Python method: one of minijinja-contrib's, or one of those it lacks.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match value.as_str() {
        Some(text) => text_method(text, name, args)?,
        None => None,
    };
    match own {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn text_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let parts = text.split_once(separator).filter(|_| !separator.is_empty());
            parts.map_or_else(|| three(text, "", ""), |(before, after)| three(before, separator, after))
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let parts = text.rsplit_once(separator).filter(|_| !separator.is_empty());
            parts.map_or_else(|| three("", "", text), |(before, after)| three(before, separator, after))
        }
        "rsplit" => return rsplit(text, args),
        _ => return Ok(None),
    }))
}

fn three(before: &str, separator: &str, after: &str) -> Value {
    Value::from(Tuple::from([before, separator, after].map(Value::from).to_vec()))
}

/// Implements `rsplit` with a limit. Without one it equals `split`, which minijinja-contrib provides.
fn rsplit(text: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let (separator, limit, _): (&str, Option<usize>, Rest<Value>) = from_args(args)?;
    if separator.is_empty() {
        return Err(invalid("rsplit: the separator is empty".into()));
    }
    let n_parts = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
    let mut parts: Vec<Value> = text.rsplitn(n_parts, separator).map(Value::from).collect();
    parts.reverse();
    Ok(Some(Value::from(parts)))
}
