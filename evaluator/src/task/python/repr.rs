//! Python's `str()` and `repr()` of JSON values.

use candlewick_text::template::python::{number_text, repr_of_json};
use serde_json::Value as Json;

pub(crate) use candlewick_text::template::python::{float, repr_of_json as repr};

/// Implements `str(value)`.
pub(crate) fn str(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        other => number_text(other).unwrap_or_else(|| repr_of_json(other)),
    }
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
