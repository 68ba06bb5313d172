//! Python's `str()` and `repr()` of template values.

use std::fmt::Write as _;
use std::sync::LazyLock;

use minijinja::value::ValueKind;
use minijinja::{Error, Value};
use regex_automata::meta::Regex;
use serde_json::Value as Json;

use super::globals::PythonRange;
use super::value::{self, from_json};
use crate::template::limits::check_size;

/// Implements `str(value)`. An undefined value is an empty text.
///
/// # Errors
/// If the text exceeds the limit on texts.
pub fn str(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None if value.is_undefined() => Ok(String::new()),
        None => repr(value),
    }
}

/// Implements `repr(value)`.
///
/// # Errors
/// If the text exceeds the limit on texts.
pub fn repr(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    // Values may share parts: a text can be far longer than its value is large.
    write_repr(&mut out, value, &|out| check_size(Some(out.len())))?;
    Ok(out)
}

/// Implements `repr` of a JSON value, without a limit.
pub fn repr_of_json(json: &Json) -> String {
    let mut out = String::new();
    let written = write_repr(&mut out, &from_json(json), &|_| Ok(()));
    written.expect("lists and dicts of JSON have items");
    out
}

type LengthCheck<'a> = &'a dyn Fn(&str) -> Result<(), Error>;

fn write_repr(out: &mut String, value: &Value, check: LengthCheck) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => write_text(out, value.as_str().unwrap_or_default()),
        _ if value.downcast_object_ref::<PythonRange>().is_some() => write!(out, "{value}").unwrap_or_default(),
        ValueKind::Seq | ValueKind::Iterable => write_items(out, value, check)?,
        ValueKind::Map => write_pairs(out, value, check)?,
        _ => write!(out, "{value}").unwrap_or_default(),
    }
    check(out)
}

fn write_items(out: &mut String, value: &Value, check: LengthCheck) -> Result<(), Error> {
    let is_tuple = value.is_tuple();
    out.push(if is_tuple { '(' } else { '[' });
    for (item_idx, item) in value.try_iter()?.enumerate() {
        out.push_str(if item_idx == 0 { "" } else { ", " });
        write_repr(out, &item, check)?;
    }
    out.push_str(match (is_tuple, value.len()) {
        (true, Some(1)) => ",)",
        (true, _) => ")",
        (false, _) => "]",
    });
    Ok(())
}

fn write_pairs(out: &mut String, value: &Value, check: LengthCheck) -> Result<(), Error> {
    out.push('{');
    for (key_idx, key) in value.try_iter()?.enumerate() {
        out.push_str(if key_idx == 0 { "" } else { ", " });
        write_repr(out, &key, check)?;
        out.push_str(": ");
        write_repr(out, &value.get_item(&key)?, check)?;
    }
    out.push('}');
    Ok(())
}

/// Implements `repr` of an int or a float.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => value::float(float),
        _ => value.to_string(),
    }
}

fn write_text(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => escape(out, c),
        }
    }
    out.push(quote);
}

fn escape(out: &mut String, c: char) {
    let written = match u32::from(c) {
        code @ 0..0x100 => write!(out, "\\x{code:02x}"),
        code @ 0x100..0x1_0000 => write!(out, "\\u{code:04x}"),
        code => write!(out, "\\U{code:08x}"),
    };
    written.expect("a String takes all that is written");
}

/// Implements `str.isprintable` for one character: no control character, and no separator except the space.
pub(super) fn is_printable(c: char) -> bool {
    static UNPRINTABLE: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"[\p{C}\p{Z}]").expect("the pattern is a constant"));
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    !UNPRINTABLE.is_match(c.encode_utf8(&mut [0; 4]).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        for (value, want) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.5, "1.5"),
            (1e15, "1000000000000000.0"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e16, "1e+16"),
            (1.25e22, "1.25e+22"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1e100, "1e+100"),
            (5e-324, "5e-324"),
            (f64::NAN, "nan"),
            (-f64::INFINITY, "-inf"),
        ] {
            assert_eq!(value::float(value), want);
        }
    }
}
