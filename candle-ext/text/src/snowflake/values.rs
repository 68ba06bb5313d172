//! Values of a result, which the API sends as strings.

use serde::Deserialize;
use serde_json::Value;

use crate::long_integer;

/// Column of a result.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct ResultColumn {
    pub(super) name: String,
    #[serde(rename = "type")]
    pub(super) kind: String,
}

/// Returns a value with its column's type: a number, a boolean, an object or a list. Other values stay strings.
pub(super) fn to_json(column: &ResultColumn, value: Value) -> Value {
    let Value::String(text) = &value else { return value };
    let parsed = match column.kind.to_ascii_lowercase().as_str() {
        "fixed" => long_integer::from_digits(text).or_else(|| decimal(text)),
        "real" => text.parse::<f64>().ok().map(Value::from),
        "boolean" => text.parse::<bool>().ok().map(Value::from),
        "variant" | "object" | "array" => long_integer::parse(text).ok(),
        _ => None,
    };
    parsed.unwrap_or(value)
}

/// Returns a number with decimal places.
fn decimal(text: &str) -> Option<Value> {
    text.contains('.').then(|| text.parse::<f64>().ok().map(Value::from))?
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_have_the_type_of_their_column() {
        for (kind, text, want) in [
            ("fixed", "-7", json!(-7)),
            ("fixed", "2.50", json!(2.5)),
            ("FIXED", "99999999999999999999", long_integer::from_digits("99999999999999999999").unwrap_or_default()),
            ("real", "1e3", json!(1000.0)),
            ("boolean", "true", json!(true)),
            ("array", "[1, 2]", json!([1, 2])),
            ("variant", r#"{"role": "user"}"#, json!({"role": "user"})),
            ("text", "12", json!("12")),
            ("date", "18262", json!("18262")),
        ] {
            let column = ResultColumn { name: "c".into(), kind: kind.into() };
            assert_eq!(to_json(&column, json!(text)), want, "{kind}");
        }
        let column = ResultColumn { name: "c".into(), kind: "fixed".into() };
        assert_eq!(to_json(&column, Value::Null), Value::Null);
    }
}
