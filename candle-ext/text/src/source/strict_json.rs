//! Strict JSON parsing: UTF-8, no duplicate keys, no trailing text.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::Row;
use crate::long_integer;

/// Size limit of a row in bytes. A longer row means a malformed file.
pub(crate) const MAX_ROW_BYTES: usize = 256 << 20;

/// Problem of a row, its remedy and its line, counted from 1 within the row.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct JsonProblem {
    pub(crate) line: usize,
    pub(crate) problem: String,
    pub(crate) fix: &'static str,
}

/// Parses one JSON object.
pub(crate) fn parse_row(bytes: &[u8]) -> Result<Row, JsonProblem> {
    if bytes.len() > MAX_ROW_BYTES {
        return Err(too_long(bytes.len()));
    }
    let text = std::str::from_utf8(bytes).map_err(|e| not_utf8(bytes, e.valid_up_to()))?;
    match parse_value(text).map_err(|e| not_json(text, &e))? {
        Value::Object(row) => Ok(row),
        other => Err(JsonProblem {
            line: 1,
            problem: format!("the row is {}, not an object", name_of(&other)),
            fix: "write each row as {\"column\": value, ...}",
        }),
    }
}

pub(crate) fn too_long(n_bytes: usize) -> JsonProblem {
    JsonProblem {
        line: 1,
        problem: format!("a row of {n_bytes} bytes is over the limit of {MAX_ROW_BYTES}"),
        fix: "check that each row stands on its own line, or split the row",
    }
}

/// Names a JSON value's type for messages, such as "a list of 3".
pub(crate) fn name_of(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "a boolean".into(),
        Value::Number(_) => "a number".into(),
        _ if long_integer::digits(value).is_some() => "a number".into(),
        Value::String(_) => "a string".into(),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".into(),
    }
}

/// Parses a JSON value. Integers beyond 64 bits keep all digits: see [`long_integer`].
///
/// # Errors
/// If the text is not JSON, or an object has a duplicate key.
pub fn parse_value(text: &str) -> serde_json::Result<Value> {
    long_integer::parse_with(text, |text| {
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let value = Strict.deserialize(&mut deserializer)?;
        deserializer.end()?;
        Ok(value)
    })
}

fn not_utf8(bytes: &[u8], at: usize) -> JsonProblem {
    let before = &bytes[..at];
    let line_start = before.iter().rposition(|&b| b == b'\n').map_or(0, |i| i + 1);
    JsonProblem {
        line: 1 + before.iter().filter(|&&b| b == b'\n').count(),
        problem: format!("byte 0x{:02X} at column {} is not UTF-8", bytes[at], at - line_start + 1),
        fix: "save the file as UTF-8",
    }
}

fn not_json(text: &str, error: &serde_json::Error) -> JsonProblem {
    let message = error.to_string();
    let reason = message.split(" at line ").next().unwrap_or(&message);
    if error.is_eof() {
        let end = excerpt(text, text.len());
        return JsonProblem {
            line: error.line().max(1),
            problem: format!("the row breaks off after {end:?}"),
            fix: "the file may be cut short: fetch or write it again",
        };
    }
    let near = excerpt(text, offset_of(text, error.line(), error.column()));
    JsonProblem {
        line: error.line().max(1),
        problem: format!("not valid JSON at column {}: {reason}, near {near:?}", error.column()),
        fix: "correct or delete the row",
    }
}

fn offset_of(text: &str, line: usize, column: usize) -> usize {
    let start: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    (start + column).min(text.len())
}

/// Returns about 24 bytes before `end`, extended to character boundaries.
fn excerpt(text: &str, end: usize) -> &str {
    let whole = |at: &usize| text.is_char_boundary(*at);
    let end = (end..=text.len()).find(whole).unwrap_or(text.len());
    let start = (0..=end.saturating_sub(24)).rev().find(whole).unwrap_or(0);
    &text[start..end]
}

struct Strict;

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }
    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }
    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }
    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(Number::from_f64(v).map_or(Value::Null, Value::Number))
    }
    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(Strict)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format_args!("key {key:?} appears twice")));
            }
            map.insert(key, access.next_value_seed(Strict)?);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn refused(row: &[u8], want: &str) {
        let fault = parse_row(row).unwrap_err();
        assert!(fault.problem.contains(want), "{want:?} is not in {:?}", fault.problem);
    }

    #[test]
    fn an_object_keeps_its_order() {
        let row = parse_row(br#" {"b": [1, 2.5, null], "a": {"c": "d"}} "#).unwrap();
        assert_eq!(serde_json::to_string(&row).unwrap(), r#"{"b":[1,2.5,null],"a":{"c":"d"}}"#);
    }

    #[test]
    fn a_key_twice_is_refused_at_any_depth() {
        refused(br#"{"a": 1, "a": 2}"#, r#"key "a" appears twice"#);
        refused(br#"{"a": [{"b": 1, "b": 1}]}"#, r#"key "b" appears twice"#);
    }

    #[test]
    fn a_row_that_is_not_an_object_is_named() {
        refused(b"[1, 2]", "the row is a list of 2, not an object");
        refused(b"\"hi\"", "the row is a string");
        refused(b"null", "the row is null");
    }

    #[test]
    fn broken_rows_say_where() {
        refused(b"{\"a\": \xFF}", "byte 0xFF at column 7 is not UTF-8");
        refused(br#"{"a": 1 "b": 2}"#, "column 9");
        refused(br#"{"a": "cut"#, "breaks off after");
        refused(br#"{"a": NaN}"#, "not valid JSON at column 7");
        refused(br#"{"a": 1} trailing"#, "trailing characters");
        assert_eq!(parse_row(b"{\"a\":\n\n oops}").unwrap_err().line, 3);
    }

    #[test]
    fn a_thousand_brackets_do_not_exhaust_the_stack() {
        let deep = [b"{\"a\":".to_vec(), vec![b'['; 100_000]].concat();
        refused(&deep, "recursion limit");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_row_or_a_fault(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_row(&bytes);
        }

        #[test]
        fn any_almost_json_is_a_row_or_a_fault(text in r#"[\{\}\[\]",:a0é\\u\n -]{0,60}"#) {
            let _ = parse_row(text.as_bytes());
        }
    }
}
