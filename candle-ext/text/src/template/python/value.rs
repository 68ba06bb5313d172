//! Conversion of JSON to template values.

use std::fmt;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr};
use serde_json::Value as Json;

use crate::long_integer;

/// Converts a JSON value. An integer beyond 64 bits keeps all of its digits.
pub fn from_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(value), _) => Value::from(value),
            (None, Some(value)) => Value::from(value),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(from_json).collect(),
        Json::Object(fields) => match long_integer::digits(json) {
            Some(digits) => integer(digits),
            None => Value::from_pairs(fields.iter().map(|(key, value)| (key.as_str(), from_json(value)))),
        },
    }
}

/// Returns `str()` of a JSON number.
pub fn number_text(json: &Json) -> Option<String> {
    match json {
        Json::Number(number) if number.is_f64() => number.as_f64().map(float),
        Json::Number(number) => Some(number.to_string()),
        other => long_integer::digits(other).map(str::to_owned),
    }
}

/// Implements `repr` of a float: the shortest digits that round-trip, with an exponent below 1e-4 and from 1e16 on.
pub fn float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() { "nan".into() } else { if value > 0.0 { "inf" } else { "-inf" }.into() };
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').expect("`{:e}` prints an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is an integer");
    if (-4..16).contains(&exponent) {
        return format!("{value:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

fn integer(digits: &str) -> Value {
    let parsed = digits.parse::<i128>().map(Value::from).or_else(|_| digits.parse::<u128>().map(Value::from));
    parsed.unwrap_or_else(|_| Value::from_object(LongInteger(digits.into())))
}

/// Integer beyond 128 bits, which the engine can print but not compute with.
#[derive(Debug)]
pub struct LongInteger(Box<str>);

impl Object for LongInteger {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
