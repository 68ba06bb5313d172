//! The forms of numbers in recipes: `1_000`, `10^6`, `1.1e6`, `1.5%`, `4K`, `4Ki`.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};

/// A whole number of at least 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct HumanInt(pub usize);

/// A finite number.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct HumanFloat(pub f64);

/// An interval: a whole number of steps, or a fraction of the run below 1. A percentage is always a fraction.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct StepInterval(pub f64);

/// The largest whole number: 2^53, the last one that f64 represents exactly.
const LARGEST: f64 = 9_007_199_254_740_992.0;

/// Parses a finite number with at most one suffix or exponent: `1_000`, `10^6`, `1.1e6`, `1.5%`, `4K` or `4Ki`.
pub fn parse_number(text: &str) -> Option<f64> {
    let text = text.trim().replace('_', "").to_lowercase();
    let value = if let Some(percent) = text.strip_suffix('%') {
        plain(percent)? / 100.0
    } else if let Some((base, exponent)) = text.split_once('^') {
        let (base, exponent) = (plain(base)?, plain(exponent)?);
        base.abs().powf(exponent).copysign(base)
    } else if let Some((number, factor)) = split_suffix(&text) {
        plain(number)? * factor
    } else if let Some((number, exponent)) = text.split_once('e') {
        // The standard parser rounds once. A multiplication by a power would round twice.
        plain(number)?;
        match exponent.parse::<i32>() {
            Ok(_) => text.parse().ok()?,
            Err(_) => plain(number)? * 10f64.powf(plain(exponent)?),
        }
    } else {
        plain(&text)?
    };
    value.is_finite().then_some(value)
}

fn split_suffix(text: &str) -> Option<(&str, f64)> {
    const SUFFIXES: [(&str, f64); 8] = [
        ("ki", 1024.0),
        ("mi", 1_048_576.0),
        ("gi", 1_073_741_824.0),
        ("ti", 1_099_511_627_776.0),
        ("k", 1e3),
        ("m", 1e6),
        ("b", 1e9),
        ("t", 1e12),
    ];
    SUFFIXES.iter().find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, *factor)))
}

/// Parses digits with at most one sign and one decimal point.
fn plain(text: &str) -> Option<f64> {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let has_digit = digits.bytes().any(|b| b.is_ascii_digit());
    let only_digits = digits.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    (has_digit && only_digits).then(|| text.parse().ok()).flatten()
}

impl HumanInt {
    /// Returns a whole number of at least 0. An error of rounding is ignored.
    pub(crate) fn from_f64(value: f64) -> Option<Self> {
        // A multiplication such as 1.1 * 1e6 may be off by one unit in the last place.
        let rounded = value.round();
        let is_whole = (value - rounded).abs() <= rounded.abs() * f64::EPSILON;
        (is_whole && (0.0..=LARGEST).contains(&rounded)).then_some(Self(rounded as usize))
    }
}

/// Refuses a number above the largest, and reports the bound.
fn refuse_too_large<E: de::Error>(value: f64) -> Result<(), E> {
    match value > LARGEST {
        true => Err(E::custom(format!("the number {value:e} is too large; the largest is 2^53"))),
        false => Ok(()),
    }
}

struct IntVisitor;

impl Visitor<'_> for IntVisitor {
    type Value = HumanInt;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a whole number of at least 0 (such as 1000, 1_000, 10^3, 1e3, 1K or 1Ki)")
    }
    fn visit_u64<E: de::Error>(self, value: u64) -> Result<HumanInt, E> {
        refuse_too_large(value as f64)?;
        HumanInt::from_f64(value as f64)
            .filter(|_| value as f64 <= LARGEST)
            .map(|_| HumanInt(value as usize))
            .ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(value), &self))
    }
    fn visit_i64<E: de::Error>(self, value: i64) -> Result<HumanInt, E> {
        Err(E::invalid_value(de::Unexpected::Signed(value), &self))
    }
    fn visit_f64<E: de::Error>(self, value: f64) -> Result<HumanInt, E> {
        refuse_too_large(value)?;
        HumanInt::from_f64(value).ok_or_else(|| E::invalid_value(de::Unexpected::Float(value), &self))
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<HumanInt, E> {
        refuse_too_large(parse_number(text).unwrap_or(0.0))?;
        parse_number(text)
            .and_then(HumanInt::from_f64)
            .ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
    }
}

/// Reads a number, or a text that `parse` accepts.
struct FloatVisitor {
    expected: &'static str,
    parse: fn(&str) -> Option<f64>,
}

impl Visitor<'_> for FloatVisitor {
    type Value = f64;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.expected)
    }
    fn visit_u64<E: de::Error>(self, value: u64) -> Result<f64, E> {
        Ok(value as f64)
    }
    fn visit_i64<E: de::Error>(self, value: i64) -> Result<f64, E> {
        Ok(value as f64)
    }
    fn visit_f64<E: de::Error>(self, value: f64) -> Result<f64, E> {
        Ok(value)
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<f64, E> {
        (self.parse)(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
    }
}

/// Parses an interval: a percentage is below 100%.
fn parse_interval(text: &str) -> Option<f64> {
    parse_number(text).filter(|value| *value < 1.0 || !text.trim_end().ends_with('%'))
}

impl<'de> Deserialize<'de> for HumanInt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(IntVisitor)
    }
}

impl<'de> Deserialize<'de> for HumanFloat {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a number (such as 0.1, 1e-5, 10% or 10^-5)";
        deserializer.deserialize_any(FloatVisitor { expected, parse: parse_number }).map(HumanFloat)
    }
}

impl<'de> Deserialize<'de> for StepInterval {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a number of steps, or a fraction of the run below 1 (such as 100, 1K, 0.1 or 10%)";
        deserializer.deserialize_any(FloatVisitor { expected, parse: parse_interval }).map(StepInterval)
    }
}

impl Serialize for StepInterval {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        HumanFloat(self.0).serialize(serializer)
    }
}

impl Serialize for HumanInt {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0 as u64)
    }
}

impl Serialize for HumanFloat {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0)
    }
}

const PATTERN: &str = r"^\s*[-+]?[0-9_.]+(%|\^[-+]?[0-9_.]+|[eE][-+]?[0-9_.]+|[kKmMbBtT]|[kKmMgGtT]i)?\s*$";

impl JsonSchema for HumanInt {
    fn schema_name() -> Cow<'static, str> {
        "HumanInt".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A whole number: 1000, 1_000, 10^3, 1e3, 1K (base 10), 1Ki (base 2).",
            "anyOf": [{ "type": "integer", "minimum": 0 }, { "type": "number" }, { "type": "string", "pattern": PATTERN }]
        })
    }
}

impl JsonSchema for HumanFloat {
    fn schema_name() -> Cow<'static, str> {
        "HumanFloat".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A number: 0.1, 1e-5, 10%, 10^-5, 1.5K.",
            "anyOf": [{ "type": "number" }, { "type": "string", "pattern": PATTERN }]
        })
    }
}

impl JsonSchema for StepInterval {
    fn schema_name() -> Cow<'static, str> {
        HumanFloat::schema_name()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        HumanFloat::json_schema(generator)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn int(text: &str) -> Option<usize> {
        parse_number(text).and_then(HumanInt::from_f64).map(|n| n.0)
    }

    #[test]
    fn whole_numbers_have_many_forms() {
        for (text, want) in [
            ("1_000_000", 1_000_000),
            ("10^6", 1_000_000),
            ("1e6", 1_000_000),
            ("1.1e6", 1_100_000),
            ("10e-1", 1),
            ("1K", 1_000),
            ("1.1K", 1_100),
            ("1.25k", 1_250),
            ("1.00001M", 1_000_010),
            ("3m", 3_000_000),
            ("2B", 2_000_000_000),
            ("1T", 1_000_000_000_000),
            ("1Ki", 1024),
            ("4Mi", 4 << 20),
            ("2Gi", 2 << 30),
            ("1Ti", 1 << 40),
            ("2^10", 1024),
            (" 7 ", 7),
            ("100%", 1),
        ] {
            assert_eq!(int(text), Some(want), "{text}");
        }
    }

    #[test]
    fn negative_numbers_are_not_counts() {
        for text in ["-1K", "-10^6", "-1_000", "-1.1e6", "-1Ki", "-1.5%"] {
            assert_eq!(parse_number(text).unwrap(), -parse_number(&text[1..]).unwrap(), "{text}");
            assert_eq!(int(text), None, "{text}");
        }
    }

    #[test]
    fn fractions_are_not_counts() {
        for text in ["1.5", "10%", "1e-3", "1.00001K", "1e16", "1e300", "10^-1"] {
            assert_eq!(int(text), None, "{text}");
        }
        assert_eq!(int("0.5Ki"), Some(512));
    }

    #[test]
    fn fractions_have_many_forms() {
        for (text, want) in [
            ("1.5", 1.5),
            ("1.5%", 0.015),
            ("10.1^3", 10.1f64.powf(3.0)),
            ("1e-3", 0.001),
            ("1.1e-3", 0.0011),
            ("2e-5", 2e-5),
            ("2E-5", 2e-5),
            ("1.1K", 1_100.0),
            (".5", 0.5),
            ("+5", 5.0),
        ] {
            assert_eq!(parse_number(text), Some(want), "{text}");
        }
    }

    #[test]
    fn other_strings_are_not_numbers() {
        for text in [
            "err", "1Ke3", "1^10e2", "1K^2", "1K^2e3", "", "-", ".", "%", "K", "1KK", "1 K", "--1", "1e", "e5", "inf",
            "nan", ".inf", "0x10", "1.2.3", "1%%", "1e999", "10^999", "1^", "^2", "1kib", "é",
        ] {
            assert_eq!(parse_number(text), None, "{text}");
        }
    }
}
