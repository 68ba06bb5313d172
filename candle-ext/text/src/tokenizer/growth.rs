//! Limit on how much the steps of a tokenizer lengthen a text.
//!
//! A byte-level step doubles each byte beyond ASCII, and a replacement may be longer than its pattern. Repeated steps
//! multiply, so a small file could make gigabytes of a short text.

use serde_json::Value as Json;

/// Limit on the factors of all steps, multiplied. Tokenizers in use have at most 6: 3 for a space that becomes `▁`, and
/// 2 for the letters of its bytes.
const MAX_GROWTH: u64 = 256;

/// Checks the normalizer, the pre-tokenizer and the decoder of a tokenizer.json.
pub(super) fn check(json: &Json) -> Result<(), String> {
    let encoding = growth(&json["normalizer"]).saturating_mul(growth(&json["pre_tokenizer"]));
    for (steps, growth) in [("normalizer and pre_tokenizer", encoding), ("decoder", growth(&json["decoder"]))] {
        if growth > MAX_GROWTH {
            return Err(format!(
                "{steps} may make a text {growth} times as long, over the limit of {MAX_GROWTH}; remove repeated \
                 ByteLevel and Replace steps"
            ));
        }
    }
    Ok(())
}

/// Returns the largest factor by which a step lengthens a text.
fn growth(step: &Json) -> u64 {
    let kind = step.get("type").and_then(Json::as_str).unwrap_or_default();
    match kind {
        "Sequence" => {
            let lists = ["normalizers", "pretokenizers", "decoders"].into_iter().filter_map(|key| step.get(key));
            let steps = lists.filter_map(Json::as_array).flatten();
            steps.map(growth).fold(1, u64::saturating_mul)
        }
        "ByteLevel" => 2,
        "Replace" => replacement_growth(step),
        _ => 1,
    }
}

fn replacement_growth(step: &Json) -> u64 {
    let text = |value: Option<&Json>| value.and_then(Json::as_str).map(|text| text.len() as u64);
    let content = text(step.get("content")).unwrap_or(0);
    match text(step.get("pattern").and_then(|pattern| pattern.get("String"))) {
        Some(n_bytes) if n_bytes > 0 => content.div_ceil(n_bytes).max(1),
        // An empty pattern matches between all letters; a regular expression may match one.
        Some(_) => content + 1,
        None => content.max(1),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sequence(key: &str, step: &Json, n: usize) -> Json {
        let kind = format!("{key}s").replace("pre_tokenizers", "pretokenizers");
        json!({key: {"type": "Sequence", kind: vec![step; n]}})
    }

    #[test]
    fn repeated_steps_are_limited() {
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false});
        let doubled = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        let space = json!({"type": "Replace", "pattern": {"Regex": " "}, "content": "▁"});
        for (key, step, most) in [
            ("pre_tokenizer", &byte_level, 8),
            ("normalizer", &doubled, 8),
            ("normalizer", &space, 5),
            ("decoder", &doubled, 8),
        ] {
            assert_eq!(check(&sequence(key, step, most)), Ok(()), "{key}");
            let error = check(&sequence(key, step, most + 1)).unwrap_err();
            assert!(error.contains(key) && error.contains("over the limit of 256"), "{error}");
        }
    }

    #[test]
    fn steps_that_do_not_lengthen_are_not_limited() {
        let quotes = json!({"type": "Replace", "pattern": {"String": "``"}, "content": "\""});
        assert_eq!(check(&sequence("normalizer", &quotes, 100)), Ok(()));
        assert_eq!(check(&json!({"normalizer": null, "pre_tokenizer": {"type": "Whitespace"}})), Ok(()));
        let nothing = json!({"type": "Replace", "pattern": {"String": ""}, "content": "ab"});
        assert!(check(&sequence("normalizer", &nothing, 9)).is_err());
    }
}
