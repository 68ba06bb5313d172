//! Parser of `key=value` pairs and JSON objects on the command line, with lm-eval's value types.

use candlewick_text::source::parse_value;
use serde_json::{Map, Value as Json};

use crate::task::literal_eval;

/// Parses the values of an option into one object. Each value is a JSON object or comma-separated `key=value` pairs.
/// Commas inside brackets and quotes do not separate. A repeated key is an error.
pub(super) fn key_values(option: &str, words: &[String]) -> Result<Map<String, Json>, String> {
    let mut all = Map::new();
    let mut put = |key: String, value: Json| {
        let problem = format!("{option}: {key} is given twice; remove one of the values");
        all.insert(key, value).map_or(Ok(()), |_| Err(problem))
    };
    for word in words {
        if word.trim_start().starts_with('{') {
            let object = parse_value(word)
                .map_err(|error| format!("{option} is not a JSON object: {error}; write strings in double quotes"))?;
            object.as_object().cloned().unwrap_or_default().into_iter().try_for_each(|(key, value)| put(key, value))?;
            continue;
        }
        for pair in split(word) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(format!("{option}: {pair:?} is not key=value"));
            };
            put(key.trim().to_owned(), value_of(value.trim()))?;
        }
    }
    Ok(all)
}

/// Splits at commas outside of brackets and quotes.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth, mut quote) = (Vec::new(), 0, 0_usize, None);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(open), _) => quote = Some(open).filter(|open| *open != c),
            (None, '"' | '\'') => quote = Some(c),
            (None, '[' | '(' | '{') => depth += 1,
            (None, ']' | ')' | '}') => depth = depth.saturating_sub(1),
            (None, ',') if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts.retain(|part| !part.trim().is_empty());
    parts
}

/// Parses a boolean, a number or another Python literal; anything else is a string.
fn value_of(text: &str) -> Json {
    match text.to_lowercase().as_str() {
        "true" => return Json::Bool(true),
        "false" => return Json::Bool(false),
        _ => {}
    }
    let is_count = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let count = || text.parse::<u64>().ok().filter(|_| is_count).map(Json::from);
    let number = || text.parse::<f64>().ok().filter(|number| number.is_finite()).map(Json::from);
    count().or_else(number).or_else(|| literal_eval(text).ok()).unwrap_or_else(|| text.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(words: &[&str], want: Json) {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        assert_eq!(Json::Object(key_values("--gen-kwargs", &words).unwrap()), want);
    }

    // lm-eval 0.4.13 parses the same words to these values.
    #[test]
    fn values_have_the_types_of_lm_eval() {
        check(
            &["temperature=0.5,do_sample=True,until='7',max_gen_toks=8,x=None"],
            json!({"temperature": 0.5, "do_sample": true, "until": "7", "max_gen_toks": 8, "x": null}),
        );
        check(&[r"until=['\n']"], json!({"until": ["\n"]}));
        check(&[r#"until=["a","b"],top_p=.9"#], json!({"until": ["a", "b"], "top_p": 0.9}));
        check(&["until=[\"a, b\", 'c']", "max_gen_toks=8"], json!({"until": ["a, b", "c"], "max_gen_toks": 8}));
        check(
            &["a={'b': [1, (2, 3)]},c=x=y,d=-1,e=1e2"],
            json!({"a": {"b": [1, [2, 3]]}, "c": "x=y", "d": -1.0, "e": 100.0}),
        );
        check(&["until=\\n,,a="], json!({"until": "\\n", "a": ""}));
    }

    #[test]
    fn an_object_may_be_json() {
        check(&[r#"{"until": ["a,b"], "top_k": 3}"#], json!({"until": ["a,b"], "top_k": 3}));
        check(&[r#" {"a": {"b": true}}"#, "c=1"], json!({"a": {"b": true}, "c": 1}));
    }

    #[test]
    fn a_key_that_is_given_twice_is_refused() {
        for words in [&["a=1,b=2,a=2"][..], &["a=1", "a=1"], &[r#"{"a": 1}"#, "a=2"]] {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            assert!(key_values("--gen-kwargs", &words).unwrap_err().contains("--gen-kwargs: a is given twice"));
        }
        assert!(key_values("--gen-kwargs", &[r#"{"a": 1, "a": 2}"#.to_owned()]).is_err());
    }

    #[test]
    fn arguments_that_are_no_pairs_are_refused() {
        let refused = |word: &str| key_values("--gen-kwargs", &[word.to_owned()]).unwrap_err();
        assert!(refused("greedy").contains("--gen-kwargs: \"greedy\" is not key=value"));
        assert!(refused("{'a': 1}").contains("double quotes"));
    }
}
