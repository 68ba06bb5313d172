//! JSON schemas of requests: their size, and objects that allow the listed properties alone.

use candlewick_text::long_integer;
use serde_json::{Map, Value as Json};

use super::schema_limits::check_limits;

/// Largest text of a schema, in bytes.
const MAX_SCHEMA_BYTES: usize = 64 << 10;

/// Keywords that combine a schema with others.
const COMBINING: [&str; 9] =
    ["$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "$dynamicRef", "unevaluatedProperties"];

/// Returns the schema for constrained decoding. The error completes "field: ".
///
/// An object that lists its properties, and does not mention others, has no others in the result. vLLM and llama.cpp do the same,
/// because a model would add properties without end. The result accepts a part of what the schema accepts.
pub(super) fn constraining(schema: Json) -> Result<Json, String> {
    let text = schema.to_string();
    if text.len() > MAX_SCHEMA_BYTES {
        return Err(format!("the schema has {} bytes, at most {MAX_SCHEMA_BYTES} are possible", text.len()));
    }
    if matches!(long_integer::to_text(&text), std::borrow::Cow::Owned(_)) {
        return Err("the schema has an integer beyond 64 bits; use a smaller one".to_owned());
    }
    if !matches!(schema, Json::Object(_) | Json::Bool(_)) {
        return Err("the schema is not an object".to_owned());
    }
    check_limits(&schema)?;
    Ok(if is_combined(&schema) { schema } else { closed(schema) })
}

/// Returns true if a schema of properties is combined with another one, whose properties it must then allow.
fn is_combined(schema: &Json) -> bool {
    match schema {
        Json::Object(fields) => {
            let has_other = COMBINING.iter().any(|keyword| fields.contains_key(*keyword));
            (has_other && fields.contains_key("properties"))
                || fields.contains_key("allOf")
                || fields.values().any(is_combined)
        }
        Json::Array(items) => items.iter().any(is_combined),
        _ => false,
    }
}

fn closed(schema: Json) -> Json {
    match schema {
        Json::Object(mut fields) => {
            if may_be_closed(&fields) {
                fields.insert("additionalProperties".to_owned(), Json::Bool(false));
            }
            // Values of these keywords are data, not schemas.
            let is_data = |key: &str| matches!(key, "const" | "enum" | "default" | "examples");
            let close = |(key, value): (String, Json)| {
                let value = if is_data(&key) { value } else { closed(value) };
                (key, value)
            };
            Json::Object(fields.into_iter().map(close).collect())
        }
        Json::Array(items) => items.into_iter().map(closed).collect(),
        other => other,
    }
}

/// Returns true for a schema whose object needs no other properties than the listed ones.
fn may_be_closed(fields: &Map<String, Json>) -> bool {
    let Some(properties) = fields.get("properties").and_then(Json::as_object) else { return false };
    let required = fields.get("required").and_then(Json::as_array);
    let is_listed = |name: &Json| name.as_str().is_some_and(|name| properties.contains_key(name));
    // Without a schema as value, `properties` is the name of a property.
    properties.values().all(|value| value.is_object() || value.is_boolean())
        && required.is_none_or(|required| required.iter().all(is_listed))
        && ["additionalProperties", "patternProperties", "minProperties"].iter().all(|key| !fields.contains_key(*key))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(schema: Json, want: Json) {
        assert_eq!(constraining(schema).unwrap(), want);
    }

    #[test]
    fn objects_with_listed_properties_allow_no_others() {
        check(
            json!({"type": "object", "properties": {"a": {"properties": {"b": {}}}}}),
            json!({"type": "object", "properties": {"a": {"properties": {"b": {}}, "additionalProperties": false}},
                   "additionalProperties": false}),
        );
        check(
            json!({"anyOf": [{"properties": {"a": true}}, {"type": "null"}]}),
            json!({"anyOf": [{"properties": {"a": true}, "additionalProperties": false}, {"type": "null"}]}),
        );
    }

    #[test]
    fn a_schema_that_needs_other_properties_is_unchanged() {
        for schema in [
            json!({"type": "object"}),
            json!({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}),
            json!({"properties": {"a": {}}, "required": ["a", "b"]}),
            json!({"properties": {"a": {}}, "minProperties": 2}),
            json!({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}),
            json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}),
            json!({"const": {"properties": {"a": {}}}}),
        ] {
            check(schema.clone(), schema);
        }
    }

    #[test]
    fn a_schema_has_a_bounded_size_and_is_an_object() {
        for (schema, want) in [
            (json!({"description": "a".repeat(MAX_SCHEMA_BYTES)}), "at most 65536"),
            (json!([1]), "not an object"),
            (long_integer::parse("{\"maximum\": 99999999999999999999999}").unwrap(), "beyond 64 bits"),
        ] {
            assert!(constraining(schema).unwrap_err().contains(want), "{want}");
        }
    }
}
