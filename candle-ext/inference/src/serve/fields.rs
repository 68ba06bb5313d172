//! Typed fields of a JSON request. A null field is an absent one, and an unknown field is an error, as in OpenAI's API.

use axum::http::StatusCode;
use candlewick_text::long_integer;
use memchr::memchr3_iter;
use serde_json::{Map, Value as Json};

use super::api_error::ApiError;

/// Largest number of values in a body. A parsed value takes 72 bytes, its text two.
const MAX_VALUES: usize = 1 << 20;

/// Most characters of a field's name in an error.
const MAX_NAME_CHARS: usize = 60;

/// Fields that do not change the response.
const WITHOUT_EFFECT: [&str; 9] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "cache_salt",
];

/// Fields of a request's JSON object.
pub(super) struct Fields(Map<String, Json>);

impl Fields {
    /// Parses a request's body.
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let refused = |problem: String| Err(ApiError::new(StatusCode::BAD_REQUEST, problem));
        if memchr3_iter(b',', b'[', b'{', body).nth(MAX_VALUES).is_some() {
            return refused(format!("the body has more than {MAX_VALUES} values or commas; send smaller requests"));
        }
        let parsed = str::from_utf8(body).map_or_else(|_| serde_json::from_slice(body), long_integer::parse);
        match parsed {
            Ok(Json::Object(fields)) => Ok(Self(fields)),
            Ok(other) => refused(format!("the body is {}, expected a JSON object", shown(&other))),
            Err(error) => refused(format!("the body is not JSON: {error}")),
        }
    }

    /// Creates the fields of a nested object.
    pub(super) fn nested(fields: Map<String, Json>) -> Self {
        Self(fields)
    }

    /// Takes a field of any type.
    pub(super) fn take(&mut self, name: &str) -> Option<Json> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// Takes a number.
    pub(super) fn number(&mut self, name: &'static str) -> Result<Option<f64>, ApiError> {
        let read = |value: &Json| value.as_f64().or_else(|| long_integer::digits(value)?.parse().ok());
        self.typed(name, "a number", |value| read(&value).ok_or(value))
    }

    /// Takes an integer.
    pub(super) fn integer(&mut self, name: &'static str) -> Result<Option<i64>, ApiError> {
        self.typed(name, "an integer", |value| value.as_i64().ok_or(value))
    }

    /// Takes an integer of at least 0.
    pub(super) fn count(&mut self, name: &'static str) -> Result<Option<usize>, ApiError> {
        self.typed(name, "an integer of at least 0", |value| {
            value.as_u64().and_then(|n| n.try_into().ok()).ok_or(value)
        })
    }

    /// Takes a boolean.
    pub(super) fn boolean(&mut self, name: &'static str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", |value| value.as_bool().ok_or(value))
    }

    /// Takes a string.
    pub(super) fn text(&mut self, name: &'static str) -> Result<Option<String>, ApiError> {
        self.typed(name, "a string", |value| match value {
            Json::String(text) => Ok(text),
            value => Err(value),
        })
    }

    /// Takes an object.
    pub(super) fn object(&mut self, name: &'static str) -> Result<Option<Map<String, Json>>, ApiError> {
        self.typed(name, "an object", |value| match value {
            Json::Object(fields) => Ok(fields),
            value => Err(value),
        })
    }

    /// Takes an array.
    pub(super) fn array(&mut self, name: &'static str) -> Result<Option<Vec<Json>>, ApiError> {
        self.typed(name, "an array", |value| match value {
            Json::Array(items) => Ok(items),
            value => Err(value),
        })
    }

    /// Takes a string, or an array of strings.
    pub(super) fn texts(&mut self, name: &'static str) -> Result<Option<Vec<String>>, ApiError> {
        let text = |value: &Json| value.as_str().map(str::to_owned);
        self.typed(name, "a string or an array of strings", |value| {
            let texts = match &value {
                Json::Array(items) => items.iter().map(text).collect(),
                value => text(value).map(|text| vec![text]),
            };
            texts.ok_or(value)
        })
    }

    /// Rejects a field that has another value than its default.
    pub(super) fn refuse(&mut self, name: &'static str, default: &Json, remedy: &str) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !is_equal(&value, default) => {
                Err(ApiError::field(name, format!("{name} is {}, which is not supported; {remedy}", shown(&value))))
            }
            _ => Ok(()),
        }
    }

    /// Fails if a field is left that no one has taken, unless it does not change the response.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        let is_known = |name: &str| WITHOUT_EFFECT.contains(&name);
        match self.0.into_iter().find(|(name, value)| !value.is_null() && !is_known(name)) {
            None => Ok(()),
            Some((name, _)) => {
                let name: String = name.chars().take(MAX_NAME_CHARS).collect();
                let remedy = remedy(&name);
                let problem = format!("{name} is not a field of this request, or not supported; {remedy}");
                Err(ApiError::field(name, problem))
            }
        }
    }

    fn typed<T>(
        &mut self,
        name: &'static str,
        expected: &str,
        read: impl FnOnce(Json) -> Result<T, Json>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let wrong = |value| ApiError::field(name, format!("{name} is {}, expected {expected}", shown(&value)));
        read(value).map(Some).map_err(wrong)
    }
}

/// Returns the remedy for an unknown field: its name here, if other servers have another one.
fn remedy(name: &str) -> &'static str {
    match name {
        "enable_thinking" | "reasoning_effort" => "in chats, send it in chat_template_kwargs",
        "repeat_penalty" => "use repetition_penalty",
        _ => "remove it",
    }
}

/// Compares values; 0 equals 0.0.
fn is_equal(a: &Json, b: &Json) -> bool {
    a == b || a.as_f64().is_some_and(|a| Some(a) == b.as_f64())
}

/// Returns the beginning of a value's JSON text.
pub(super) fn shown(value: &Json) -> String {
    const MAX: usize = 60;
    let text = value.to_string();
    let text = long_integer::to_text(&text);
    match text.char_indices().nth(MAX) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.into_owned(),
    }
}
