//! `--gen-kwargs`: key=value pairs with commas between them, or JSON.

use serde_json::{Map, Value as Json, json};

pub(super) fn parse(text: &str) -> Result<Map<String, Json>, String> {
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).map_err(|error| format!("expected JSON: {error}"));
    }
    let pair = |word: &str| match word.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => Ok((key.trim().to_owned(), value_of(value.trim()))),
        _ => Err(format!("expected key=value, found `{word}`")),
    };
    text.split(',').filter(|word| !word.is_empty()).map(pair).collect()
}

/// What a value looks like: true, null, a number, or a text, perhaps in quotes.
fn value_of(text: &str) -> Json {
    let is_quoted = |quote| text.len() >= 2 && text.starts_with(quote) && text.ends_with(quote);
    if is_quoted('\'') || is_quoted('"') {
        return json!(text[1..text.len() - 1]);
    }
    match text.to_ascii_lowercase().as_str() {
        "true" => json!(true),
        "false" => json!(false),
        "none" => Json::Null,
        _ => match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(whole), _) => json!(whole),
            (_, Ok(number)) if number.is_finite() => json!(number),
            _ => json!(text),
        },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn values_are_what_they_look_like() {
        let parsed = Json::Object(parse("temperature=0.5,do_sample=True,top_k=3,until='5',x=None,y=a=b").unwrap());
        let want = json!({"temperature": 0.5, "do_sample": true, "top_k": 3, "until": "5", "x": null, "y": "a=b"});
        assert_eq!(parsed, want);
        assert_eq!(Json::Object(parse(r#"{"until": ["\n", ","]}"#).unwrap()), json!({"until": ["\n", ","]}));
        assert!(parse("temperature").unwrap_err().contains("expected key=value"));
    }
}
