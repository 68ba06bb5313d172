//! `tokenizer.tokenize_kwargs`: the arguments of a transformers tokenizer that change plain text.

use serde_json::Value;

use super::resolver::Resolver;
use crate::data::DataKind;
use crate::recipe::parse_number;

const KEY: &str = "tokenizer.tokenize_kwargs";

/// Arguments that change other outputs than the token ids.
const INERT: [&str; 6] = [
    "return_attention_mask",
    "return_token_type_ids",
    "return_special_tokens_mask",
    "return_length",
    "return_offsets_mapping",
    "verbose",
];

/// Returns the number of tokens after which a text is cut, and reports arguments without support.
pub(super) fn resolve(resolver: &mut Resolver, kind: DataKind) -> Option<usize> {
    let kwargs = &resolver.recipe().tokenizer.tokenize_kwargs;
    if kind == DataKind::Sft {
        if !kwargs.is_empty() {
            resolver.note(format!("{KEY} has no effect on `type: sft`: the chat template renders the text"));
        }
        return None;
    }
    for (name, value) in kwargs.iter().filter(|(name, value)| !INERT.contains(&name.as_str()) && !value.is_null()) {
        check(resolver, name, value);
    }
    let truncates = kwargs.get("truncation").is_some_and(is_truncation);
    let max_length = kwargs.get("max_length").and_then(whole_number);
    let key = format!("{KEY}.max_length");
    match (truncates, max_length) {
        (true, Some(max_length)) => {
            let origin = resolver.loaded.origin(&[&key, KEY]);
            Some(resolver.record(&key, max_length, origin))
        }
        (true, None) => {
            let message = format!("{KEY}.truncation: the maximum length is missing");
            resolver.report_with_advice(&[&format!("{KEY}.truncation"), KEY], message, format!("set {key}"));
            None
        }
        (false, Some(_)) => {
            resolver.note(format!("{key} has no effect without {KEY}.truncation: true"));
            None
        }
        (false, None) => None,
    }
}

fn check(resolver: &mut Resolver, name: &str, value: &Value) {
    let key = format!("{KEY}.{name}");
    let want = match name {
        "add_special_tokens" if *value == Value::Bool(true) => {
            let message = format!("{key}: true would add BOS and EOS twice");
            let advice = "remove the key; data.add_bos_token and data.add_eos_token set these tokens";
            return resolver.report_with_advice(&[&key, KEY], message, advice);
        }
        "add_special_tokens" if *value == Value::Bool(false) => return,
        "add_special_tokens" => "false",
        "padding" if *value == Value::Bool(false) || value == "do_not_pad" => return,
        "padding" => "false: data.pad_to pads rows",
        "truncation" if is_truncation(value) || *value == Value::Bool(false) || value == "do_not_truncate" => return,
        "truncation" => "true, false, longest_first or only_first",
        "max_length" if whole_number(value).is_some() => return,
        "max_length" => "a whole number of at least 1",
        _ => {
            let advice = format!(
                "remove the key; supported keys: add_special_tokens, padding, truncation, max_length, {}",
                INERT.join(", ")
            );
            return resolver.report_missing(&[&key, KEY], &key, advice);
        }
    };
    resolver.report(&[&key, KEY], format!("{key}: expected {want}, found {value}"));
}

fn is_truncation(value: &Value) -> bool {
    *value == Value::Bool(true) || value == "longest_first" || value == "only_first"
}

fn whole_number(value: &Value) -> Option<usize> {
    let number = value.as_f64().or_else(|| parse_number(value.as_str()?))?;
    (number >= 1.0 && number.fract() == 0.0).then_some(number as usize)
}
