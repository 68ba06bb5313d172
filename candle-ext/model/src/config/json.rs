//! Typed access to a JSON object. Errors name the key, the expected type and the actual value.

use std::path::Path;

use candlewick_text::printable::shortened;
use candlewick_text::source::parse_value;
use serde_json::{Map, Value};

use crate::ModelError;

/// A JSON object whose null values count as absent.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a> {
    map: &'a Map<String, Value>,
    /// Prefix of keys in error messages, such as `rope_scaling.`.
    prefix: &'a str,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, prefix: "" }
    }

    pub(crate) fn nested(map: &'a Map<String, Value>, prefix: &'a str) -> Self {
        Self { map, prefix }
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn error(&self, key: &str, problem: impl Into<String>) -> ModelError {
        ModelError::key(&format!("{}{key}", self.prefix), problem)
    }

    fn read<T>(&self, key: &str, want: &str, get: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        get(value).map(Some).ok_or_else(|| self.error(key, format!("expected {want}, found {}", shorten(value))))
    }

    pub(crate) fn count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.read(key, "a whole number of at least 0", |v| v.as_u64().and_then(|n| n.try_into().ok()))
    }

    pub(crate) fn integer(&self, key: &str) -> Result<Option<i64>, ModelError> {
        self.read(key, "a whole number", Value::as_i64)
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.read(key, "a number", Value::as_f64)
    }

    pub(crate) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, ModelError> {
        self.read(key, "a list of numbers", |v| v.as_array()?.iter().map(Value::as_f64).collect())
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.read(key, "a string", Value::as_str)
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, ModelError> {
        self.read(key, "an object", Value::as_object)
    }

    /// Returns the first key whose value is an object.
    pub(crate) fn first_object(&self) -> Option<&'a str> {
        self.map.iter().find(|(_, value)| value.is_object()).map(|(key, _)| key.as_str())
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ModelError> {
        self.read(key, "a list of strings", |v| v.as_array()?.iter().map(Value::as_str).collect())
    }

    /// Reads a token id or a list of token ids.
    pub(crate) fn ids(&self, key: &str) -> Result<Option<Vec<u32>>, ModelError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        self.read(key, "a token id or a list of them", |v| match v {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        })
    }
}

/// Upper bound of any size. Three such sizes multiplied do not overflow.
pub(crate) const MAX_SIZE: usize = 1 << 28;

/// Reads a size between 1 and `most`.
pub(crate) fn size(keys: Keys, key: &str, default: usize, most: usize) -> Result<usize, ModelError> {
    match keys.count(key)?.unwrap_or(default) {
        0 => Err(keys.error(key, "expected at least 1, found 0")),
        n if n > most => Err(keys.error(key, format!("{n} is absurd: at most {most} is supported"))),
        n => Ok(n),
    }
}

/// Maximum size of a JSON file, in bytes.
const MOST_BYTES: u64 = 1 << 26;

/// Reads the object in a JSON file of another program. Errors name the file, line and column. Pipes and devices are rejected.
///
/// If a key appears twice, its last value counts, as in Python.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    parse_object(path, &read_bytes(path)?)
}

/// Reads the object in a JSON file that this program writes, as [`read_object`] does. A key that appears twice is an error.
pub(crate) fn read_object_with_unique_keys(path: &Path) -> Result<Map<String, Value>, ModelError> {
    parse_object_with(path, &read_bytes(path)?, parse_value)
}

/// Reads a small regular file.
pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>, ModelError> {
    let file = std::fs::metadata(path).map_err(ModelError::io("read", path))?;
    if !file.is_file() {
        return Err(ModelError::malformed(path, "it is no regular file"));
    }
    if file.len() > MOST_BYTES {
        let problem = format!("it has {} bytes, and at most {MOST_BYTES} are read", file.len());
        return Err(ModelError::malformed(path, problem));
    }
    std::fs::read(path).map_err(ModelError::io("read", path))
}

/// Parses the object in a JSON file's contents.
pub(crate) fn parse_object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, ModelError> {
    parse_object_with(path, bytes, |text| serde_json::from_str(text))
}

fn parse_object_with(
    path: &Path,
    bytes: &[u8],
    parse: impl FnOnce(&str) -> serde_json::Result<Value>,
) -> Result<Map<String, Value>, ModelError> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let line = bytes[..e.valid_up_to()].iter().filter(|&&b| b == b'\n').count() + 1;
        ModelError::malformed(path, format!("line {line}: not UTF-8 (byte {}); save it as UTF-8 text", e.valid_up_to()))
    })?;
    match parse(text.trim_start_matches('\u{feff}')) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(ModelError::malformed(path, format!("expected a JSON object, found {}", shorten(&other)))),
        Err(e) => Err(ModelError::malformed(path, format!("line {}, column {}: not JSON: {e}", e.line(), e.column()))),
    }
}

/// Returns a value on one short line.
pub(crate) fn shorten(value: &Value) -> String {
    shortened(&value.to_string(), 60).into_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_may_never_end_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert!(read_object(&path).unwrap_err().to_string().contains("it is no regular file"));
        std::fs::remove_file(&path).unwrap();
        std::fs::File::create(&path).unwrap().set_len(MOST_BYTES + 1).unwrap();
        assert!(read_object(&path).unwrap_err().to_string().contains("at most 67108864 are read"));
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_json() {
        assert_eq!(parse_object(Path::new("c.json"), "\u{feff}{\"a\": 1}".as_bytes()).unwrap()["a"], 1);
    }
}
