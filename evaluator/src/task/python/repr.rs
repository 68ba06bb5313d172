//! Python's `str()` and `repr()` of JSON values.

use std::fmt::Write as _;
use std::sync::LazyLock;

use fancy_regex::Regex;
use serde_json::{Number, Value as Json};

/// Implements `str(value)`.
pub(crate) fn str(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        other => repr(other),
    }
}

/// Implements `repr(value)`.
pub(crate) fn repr(value: &Json) -> String {
    let mut out = String::new();
    write_repr(&mut out, value);
    out
}

fn write_repr(out: &mut String, value: &Json) {
    match value {
        Json::Null => out.push_str("None"),
        Json::Bool(true) => out.push_str("True"),
        Json::Bool(false) => out.push_str("False"),
        Json::Number(number) => out.push_str(&self::number(number)),
        Json::String(text) => write_text(out, text),
        Json::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                write_repr(out, item);
            }
            out.push(']');
        }
        Json::Object(fields) => {
            out.push('{');
            for (i, (key, item)) in fields.iter().enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                write_text(out, key);
                out.push_str(": ");
                write_repr(out, item);
            }
            out.push('}');
        }
    }
}

/// Implements `repr` of an int or a float.
pub(crate) fn number(number: &Number) -> String {
    match number.as_f64().filter(|_| number.is_f64()) {
        Some(value) => float(value),
        None => number.to_string(),
    }
}

/// Implements `repr` of a float: the shortest digits that round-trip, with an exponent below 1e-4 and from 1e16 on.
pub(crate) fn float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() { "nan".into() } else { if value > 0.0 { "inf" } else { "-inf" }.into() };
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').expect("`{:e}` prints an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is an integer");
    if (-4..16).contains(&exponent) {
        let fixed = format!("{value}");
        return if fixed.contains('.') { fixed } else { fixed + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
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
fn is_printable(c: char) -> bool {
    static UNPRINTABLE: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"[\p{C}\p{Z}]").expect("the pattern is a constant"));
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    !UNPRINTABLE.is_match(c.encode_utf8(&mut [0; 4])).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_print_as_python_prints_them() {
        let value = json!([1, 1.0, 1e-5, 1e16, 123456789012345680.0, -0.5, null, true, {"a b": ["x"]}]);
        let want = "[1, 1.0, 1e-05, 1e+16, 1.2345678901234568e+17, -0.5, None, True, {'a b': ['x']}]";
        assert_eq!(repr(&value), want);
    }

    #[test]
    fn texts_choose_their_quotes_and_escapes() {
        assert_eq!(repr(&json!("it's")), "\"it's\"");
        assert_eq!(repr(&json!("it's \"x\"\n")), r#"'it\'s "x"\n'"#);
        assert_eq!(repr(&json!("\u{7f}\u{a0}\u{200b}é\u{1f600}\\")), "'\\x7f\\xa0\\u200bé\u{1f600}\\\\'");
        assert_eq!(str(&json!("it's")), "it's");
    }
}
