//! Integers beyond 64 bits in JSON.
//!
//! `serde_json` rounds them to floats, but rows have them: amounts, hashes and ids. So the parser here replaces each by
//! an object with one reserved key, which holds the digits. Templates, `repr` and [`to_text`] print these digits.
//!
//! The feature `arbitrary_precision` of `serde_json` would keep them too. But it breaks numbers in untagged and
//! flattened types, such as the post-processors of the tokenizers crate.

use std::borrow::Cow;

use serde_json::{Map, Value as Json};

/// Reserved key of the object.
const KEY: &str = "$candlewick::LongInteger";

/// Digits of the shortest integers beyond 64 bits, without a sign.
const MIN_DIGITS: usize = 19;

/// Parses JSON, and keeps all digits of integers beyond 64 bits.
///
/// # Errors
/// If the text is not JSON.
pub fn parse(text: &str) -> serde_json::Result<Json> {
    parse_with(text, |text| serde_json::from_str(text))
}

/// Parses JSON with `parse`, and keeps all digits of integers beyond 64 bits.
pub(crate) fn parse_with<T>(text: &str, parse: impl Fn(&str) -> serde_json::Result<T>) -> serde_json::Result<T> {
    if has_long_number(text.as_bytes())
        && let Ok(parsed) = parse(&with_objects(text))
    {
        return Ok(parsed);
    }
    parse(text)
}

/// Returns the JSON value of an integer of any length.
pub fn from_digits(digits: &str) -> Option<Json> {
    let unsigned = digits.strip_prefix('-').unwrap_or(digits);
    if unsigned.is_empty() || !unsigned.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let short = digits.parse::<i64>().map(Json::from).or_else(|_| digits.parse::<u64>().map(Json::from));
    Some(short.unwrap_or_else(|_| Json::Object(Map::from_iter([(KEY.to_owned(), Json::from(digits))]))))
}

/// Returns the digits of an integer beyond 64 bits.
pub fn digits(json: &Json) -> Option<&str> {
    let fields = json.as_object().filter(|fields| fields.len() == 1)?;
    let digits = fields.get(KEY)?.as_str()?;
    let unsigned = digits.strip_prefix('-').unwrap_or(digits);
    (!unsigned.is_empty() && unsigned.bytes().all(|byte| byte.is_ascii_digit())).then_some(digits)
}

/// Replaces the objects of integers by their digits in JSON text.
pub fn to_text(json: &str) -> Cow<'_, str> {
    let opening = format!("{{\"{KEY}\":\"");
    if !json.contains(&opening) {
        return Cow::Borrowed(json);
    }
    let (mut out, mut rest) = (String::with_capacity(json.len()), json);
    while let Some(at) = rest.find(&opening) {
        let digits = &rest[at + opening.len()..];
        let length = digits.find(|c: char| !c.is_ascii_digit() && c != '-').unwrap_or(digits.len());
        match digits[length..].strip_prefix("\"}") {
            Some(after) if length > 0 => {
                out.extend([&rest[..at], &digits[..length]]);
                rest = after;
            }
            _ => {
                out.push_str(&rest[..at + opening.len()]);
                rest = digits;
            }
        }
    }
    Cow::Owned(out + rest)
}

/// Returns true if the text has [`MIN_DIGITS`] digits in a row. Looks at one byte in [`MIN_DIGITS`].
fn has_long_number(text: &[u8]) -> bool {
    let is_digit = |at: usize| text.get(at).is_some_and(u8::is_ascii_digit);
    (MIN_DIGITS - 1..text.len()).step_by(MIN_DIGITS).any(|at| {
        is_digit(at) && {
            let before = (0..at).rev().take_while(|at| is_digit(*at)).count();
            let after = (at..text.len()).take_while(|at| is_digit(*at)).count();
            before + after >= MIN_DIGITS
        }
    })
}

fn with_objects(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len() + 64), text);
    while let Some(at) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        out.push_str(&rest[..at]);
        let (token, after) = rest[at..].split_at(token_length(&rest[at..]));
        // JSON allows no leading zeros, and the parser must still refuse them.
        let has_zeros = token.trim_start_matches('-').starts_with('0');
        match from_digits(token).filter(|json| json.is_object() && !has_zeros) {
            Some(object) => out.push_str(&object.to_string()),
            None => out.push_str(token),
        }
        rest = after;
    }
    out + rest
}

/// Returns the length of the string or number at the start of `text`.
fn token_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    if bytes[0] != b'"' {
        return bytes.iter().position(|byte| !byte.is_ascii_digit() && !b"+-.eE".contains(byte)).unwrap_or(bytes.len());
    }
    let mut at = 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str) {
        let parsed = parse(text).unwrap();
        assert_eq!(to_text(&parsed.to_string()), text);
    }

    #[test]
    fn all_digits_are_kept_at_any_depth() {
        check("12345678901234567890123");
        check("-12345678901234567890");
        check(&format!("[{}]", i128::MAX));
        check(r#"{"a":[1,{"b":18446744073709551616}],"c":"18446744073709551616 \"-99999999999999999999"}"#);
        check(&format!("[{}]", "9".repeat(1000)));
    }

    #[test]
    fn text_that_is_no_json_is_refused() {
        for text in [
            "[012345678901234567890123]",
            "[12345678901234567890123 1]",
            "--12345678901234567890123",
            "[12345678901234567890123",
            "+12345678901234567890123",
            "12345678901234567890123x",
        ] {
            let (ours, plain) = (parse(text).unwrap_err(), serde_json::from_str::<Json>(text).unwrap_err());
            assert_eq!(ours.to_string(), plain.to_string());
        }
    }

    #[test]
    fn integers_of_64_bits_and_floats_stay_numbers() {
        for text in ["18446744073709551615", "-9223372036854775808", "1.0", "\"99999999999999999999\"", "1e+25"] {
            check(text);
            assert!(!parse(text).unwrap().is_object(), "{text}");
        }
        assert!(parse("[1.0, 12345678901234567890e3]").unwrap()[1].is_f64());
    }

    #[test]
    fn an_object_without_digits_is_an_object() {
        for text in [format!(r#"{{"{KEY}":"x"}}"#), format!(r#"{{"{KEY}":""}}"#), format!(r#"{{"{KEY}":1}}"#)] {
            check(&text);
            assert_eq!(digits(&parse(&text).unwrap()), None);
        }
    }

    #[test]
    fn a_long_number_is_found_at_any_offset() {
        for before in 0..40 {
            for n_digits in [18, 19, 20, 25] {
                let text = format!("{}{}.", " ".repeat(before), "1".repeat(n_digits));
                assert_eq!(has_long_number(text.as_bytes()), n_digits >= MIN_DIGITS, "{text}");
            }
        }
    }
}
