//! BIG-Bench Hard: filters that extract the answer from a chain-of-thought response.

use std::sync::{Arc, LazyLock};

use super::{BuiltIn, Doc, text};
use crate::task::error::ConfigError;
use crate::task::filter::{Filter, RegexFilterConfig, each_text, multi_choice_in_input};
use crate::task::keys::YamlMap;
use crate::task::python::pattern::PythonRegex;
use crate::task::python::text::{strip, words};
use crate::task::response_value::ResponseValue;

pub(super) const BUILT_INS: &[(&str, BuiltIn)] = &[
    ("bbh/zeroshot/utils.MultiChoiceRegexFilter", BuiltIn::FilterClass(multi_choice_in_input)),
    ("bbh/cot_zeroshot/utils.MultiChoiceRegexFilter", BuiltIn::FilterClass(multi_choice_in_input)),
    ("bbh/zeroshot/utils.MapRegexFilter", BuiltIn::FilterClass(map_filter)),
    ("bbh/cot_zeroshot/utils.MapRegexFilter", BuiltIn::FilterClass(map_filter)),
    ("bbh/zeroshot/utils.NumberParseRegexFilter", BuiltIn::FilterClass(number_filter)),
    ("bbh/cot_zeroshot/utils.NumberParseRegexFilter", BuiltIn::FilterClass(number_filter)),
    ("bbh/zeroshot/utils.WordSortFilter", BuiltIn::FilterClass(word_filter)),
    ("bbh/cot_zeroshot/utils.WordSortFilter", BuiltIn::FilterClass(word_filter)),
];

const SHARED: [&str; 6] =
    ["function", "group_select", "fallback", "ignore_case", "ignore_punctuation", "regexes_to_ignore"];

/// Filter that returns the value of the first matching pattern.
#[derive(Debug)]
struct MapFilter {
    family: RegexFilterConfig,
    values: Vec<(PythonRegex, String)>,
}

/// Filter that extracts a number, in digits or English words.
#[derive(Debug)]
struct NumberFilter(RegexFilterConfig);

/// Filter that extracts the document's words, ordered by their last positions in the response.
#[derive(Debug)]
struct WordFilter;

fn map_filter(keys: &YamlMap) -> Result<Arc<dyn Filter>, ConfigError> {
    keys.deny_unknown(&[&SHARED[..], &["regex_pattern_to_value"]].concat())?;
    let values = keys.map("regex_pattern_to_value")?.unwrap_or_default();
    let all: Vec<&str> = values.keys().map(String::as_str).collect();
    let family = RegexFilterConfig::read(keys, Some(&all.join("|")))?;
    let compile = |(pattern, value): (&String, &serde_json::Value)| {
        let pattern = PythonRegex::new(pattern).map_err(|p| keys.error(format!("regex_pattern_to_value: {p}")))?;
        Ok((pattern, crate::task::python::repr::str(value)))
    };
    let values = values.iter().map(compile).collect::<Result<_, ConfigError>>()?;
    Ok(Arc::new(MapFilter { family, values }))
}

fn number_filter(keys: &YamlMap) -> Result<Arc<dyn Filter>, ConfigError> {
    keys.deny_unknown(&[&SHARED[..], &["regex_pattern"]].concat())?;
    Ok(Arc::new(NumberFilter(RegexFilterConfig::read(keys, None)?)))
}

fn word_filter(keys: &YamlMap) -> Result<Arc<dyn Filter>, ConfigError> {
    keys.deny_unknown(&["function"])?;
    Ok(Arc::new(WordFilter))
}

impl Filter for MapFilter {
    fn apply(&self, answers: ResponseValue, _: &Doc) -> Result<ResponseValue, String> {
        let ignored = &self.family.ignored;
        each_text(answers, |text| {
            let found = ignored.remove_from(&self.family.find_configured(&ignored.remove_from(text)?)?)?;
            for (pattern, value) in &self.values {
                if !found.is_empty() && !self.family.find(pattern, &found)?.is_empty() {
                    return Ok(ResponseValue::Text(value.clone()));
                }
            }
            Ok(ResponseValue::Text(self.family.extract.fallback.clone()))
        })
    }
}

impl Filter for NumberFilter {
    fn apply(&self, answers: ResponseValue, _: &Doc) -> Result<ResponseValue, String> {
        each_text(answers, |text| {
            let found = self.0.find_configured(text)?;
            if !found.is_empty() {
                return Ok(ResponseValue::Text(found));
            }
            let named = self.0.find(&NUMBER_WORDS, &text.to_lowercase())?;
            let number = number_of(&named).map(|number| number.to_string());
            Ok(ResponseValue::Text(number.unwrap_or_else(|| self.0.extract.fallback.clone())))
        })
    }
}

impl Filter for WordFilter {
    fn apply(&self, answers: ResponseValue, doc: &Doc) -> Result<ResponseValue, String> {
        let input = text(doc, "input")?;
        let list = input.split("List:").nth(1).ok_or_else(|| format!("the input {input:?} has no \"List:\""))?;
        let alternatives: Vec<String> = words(strip(list)).map(|word| format!(r"\b{word}\b")).collect();
        let pattern = PythonRegex::new(&alternatives.join("|"))?;
        each_text(answers, |text| {
            let mut kept: Vec<&str> = Vec::new();
            for found in pattern.find_all(text)?.iter().rev() {
                let word = &text[found.start..found.end];
                if !kept.contains(&word) {
                    kept.push(word);
                }
            }
            kept.reverse();
            Ok(ResponseValue::Text(kept.join(" ")))
        })
    }
}

/// Number words below one hundred, with their values.
const UNITS: [(&str, u64); 28] = [
    ("zero", 0),
    ("one", 1),
    ("two", 2),
    ("three", 3),
    ("four", 4),
    ("five", 5),
    ("six", 6),
    ("seven", 7),
    ("eight", 8),
    ("nine", 9),
    ("ten", 10),
    ("eleven", 11),
    ("twelve", 12),
    ("thirteen", 13),
    ("fourteen", 14),
    ("fifteen", 15),
    ("sixteen", 16),
    ("seventeen", 17),
    ("eighteen", 18),
    ("nineteen", 19),
    ("twenty", 20),
    ("thirty", 30),
    ("forty", 40),
    ("fifty", 50),
    ("sixty", 60),
    ("seventy", 70),
    ("eighty", 80),
    ("ninety", 90),
];
const SCALES: [(&str, u64); 3] = [("thousand", 1000), ("million", 1_000_000), ("billion", 1_000_000_000)];

/// Number in words, with the separators between them.
static NUMBER_WORDS: LazyLock<PythonRegex> = LazyLock::new(|| {
    let mut names: Vec<&str> = UNITS.iter().chain(&SCALES).map(|(name, _)| *name).chain(["hundred"]).collect();
    names.sort_by_key(|name| std::cmp::Reverse(name.len()));
    let word = format!(r"\b(?:{})\b", names.join("|"));
    let pattern = format!(r"{word}(?:(?:[^\S\r\n]|,|-|and|&)+{word})*");
    PythonRegex::new(&pattern).expect("the pattern is built from constants")
});

/// Returns the value of a number in words.
fn number_of(named: &str) -> Option<u64> {
    let (mut total, mut below) = (0u64, 0u64);
    let mut any = false;
    for word in named.split(|c: char| !c.is_alphabetic()).filter(|word| !["", "and"].contains(word)) {
        any = true;
        let value = |list: &[(&str, u64)]| list.iter().find(|(name, _)| *name == word).map(|(_, value)| *value);
        if word == "hundred" {
            below = below.max(1).checked_mul(100)?;
        } else if let Some(scale) = value(&SCALES) {
            total = total.checked_add(below.max(1).checked_mul(scale)?)?;
            below = 0;
        } else {
            below = below.checked_add(value(&UNITS)?)?;
        }
    }
    any.then_some(total + below)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_words_are_read() {
        let read = |text: &str| {
            let found = &NUMBER_WORDS.find_all(text).unwrap()[0];
            number_of(&text[found.start..found.end])
        };
        assert_eq!(read("there are twenty-one cats"), Some(21));
        assert_eq!(read("two thousand, three hundred and five"), Some(2305));
        assert_eq!(read("fourteen"), Some(14));
    }
}
