//! Filters that extract the letter of a choice: by a pattern, by the choice's text, or by a letter after a colon.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use fancy_regex::Regex;
use serde_json::{Map, Value as Json};

use super::regex::{RegexExtract, selected};
use super::{Filter, each_text};
use crate::task::error::ConfigError;
use crate::task::keys::YamlMap;
use crate::task::python::pattern::{PythonRegex, escape};
use crate::task::python::text;
use crate::task::response_value::ResponseValue;

/// Text that is removed before matching: case, punctuation and patterns.
#[derive(Debug)]
pub(crate) struct IgnoredText {
    case: bool,
    punctuation: bool,
    patterns: Vec<PythonRegex>,
}

/// Keys shared by the `multi_choice_regex` filters: the pattern, the index of its match, and the ignored text.
#[derive(Debug)]
pub(crate) struct RegexFilterConfig {
    pub(crate) extract: RegexExtract,
    pub(crate) ignored: IgnoredText,
}

/// Source of a document's choices.
#[derive(Debug)]
pub(super) enum ChoiceSource {
    /// Column `choices`, a list.
    Column,
    /// Column `input`, with a letter in parentheses before each choice.
    Input,
}

/// Filter `multi_choice_regex`.
#[derive(Debug)]
pub(super) struct MultiChoiceRegexFilter {
    family: RegexFilterConfig,
    choices: ChoiceSource,
}

const KEYS: [&str; 7] =
    ["function", "regex_pattern", "group_select", "fallback", "ignore_case", "ignore_punctuation", "regexes_to_ignore"];

/// Reads a `multi_choice_regex` filter that takes the choices from the column `input`.
pub(crate) fn multi_choice_in_input(keys: &YamlMap) -> Result<Arc<dyn Filter>, ConfigError> {
    Ok(Arc::new(MultiChoiceRegexFilter::read(keys, ChoiceSource::Input)?))
}

impl IgnoredText {
    pub(crate) fn read(keys: &YamlMap) -> Result<Self, ConfigError> {
        let patterns = keys.texts("regexes_to_ignore")?.unwrap_or_default();
        let compile =
            |pattern: &String| PythonRegex::new(pattern).map_err(|p| keys.error(format!("regexes_to_ignore: {p}")));
        Ok(Self {
            case: keys.flag("ignore_case", false)?,
            punctuation: keys.flag("ignore_punctuation", false)?,
            patterns: patterns.iter().map(compile).collect::<Result<_, _>>()?,
        })
    }

    /// Removes all ignored text.
    pub(crate) fn remove_from(&self, text: &str) -> Result<String, String> {
        let mut text = text.to_owned();
        for pattern in &self.patterns {
            text = pattern.remove(&text)?;
        }
        if self.case {
            text = text.to_lowercase();
        }
        if self.punctuation {
            static PUNCTUATION: LazyLock<Regex> =
                LazyLock::new(|| Regex::new(r"\p{P}").expect("the pattern is a constant"));
            text = PUNCTUATION.replace_all(&text, "").into_owned();
        }
        Ok(text)
    }
}

impl RegexFilterConfig {
    pub(crate) fn read(keys: &YamlMap, pattern: Option<&str>) -> Result<Self, ConfigError> {
        let extract = match pattern {
            Some(pattern) => RegexExtract::with_pattern(keys, pattern)?,
            None => RegexExtract::open(keys)?,
        };
        Ok(Self { extract, ignored: IgnoredText::read(keys)? })
    }

    /// Returns the match of `pattern` at `group_select`; empty if there is none.
    pub(crate) fn find(&self, pattern: &PythonRegex, text: &str) -> Result<String, String> {
        let found = pattern.find_all(text)?;
        let Some(found) = selected(&found, self.extract.group_select) else { return Ok(String::new()) };
        let several = pattern.has_several_groups();
        let taken = pattern.findall_item(text, found).into_iter().find(|group| !several || !group.is_empty());
        Ok(text::strip(taken.unwrap_or("")).to_owned())
    }

    /// Returns the match of the configured pattern.
    pub(crate) fn find_configured(&self, text: &str) -> Result<String, String> {
        self.find(&self.extract.pattern, text)
    }
}

impl MultiChoiceRegexFilter {
    /// Reads the filter from its keys in a task's `filter_list`.
    pub(super) fn read(keys: &YamlMap, choices: ChoiceSource) -> Result<Self, ConfigError> {
        keys.deny_unknown(&KEYS)?;
        Ok(Self { family: RegexFilterConfig::read(keys, None)?, choices })
    }

    /// Returns the choices without the ignored text.
    fn choices(&self, doc: &Map<String, Json>) -> Result<Vec<String>, String> {
        let found: Vec<String> = match self.choices {
            ChoiceSource::Column => {
                let column = doc.get("choices").and_then(Json::as_array);
                let column = column.ok_or("the document has no list `choices`")?;
                column.iter().map(|choice| choice.as_str().unwrap_or_default().to_owned()).collect()
            }
            ChoiceSource::Input => {
                static BEHIND_LETTER: LazyLock<PythonRegex> =
                    LazyLock::new(|| PythonRegex::new(r"\([A-Z]\)([^\n^(]*)").expect("the pattern is a constant"));
                let input = doc.get("input").and_then(Json::as_str).ok_or("the document has no text `input`")?;
                BEHIND_LETTER.find_all(input)?.into_iter().flat_map(|found| found.groups).collect()
            }
        };
        found.iter().map(|choice| self.family.ignored.remove_from(text::strip(choice))).collect()
    }
}

impl Filter for MultiChoiceRegexFilter {
    fn apply(&self, answers: ResponseValue, doc: &Map<String, Json>) -> Result<ResponseValue, String> {
        let choices = self.choices(doc)?;
        let letters: Vec<char> = (0..choices.len()).map(letter).collect();
        let mut by_text = HashMap::new();
        for (choice, letter) in choices.iter().zip(&letters) {
            by_text.insert(choice.clone(), format!("({letter})"));
        }
        // Longer choices come first, because a choice may be a prefix of another.
        let mut alternatives: Vec<String> = choices.iter().map(|choice| escape(choice)).collect();
        alternatives.sort_by_key(|choice| std::cmp::Reverse(text::len(choice)));
        let by_words = PythonRegex::new(&alternatives.join("|"))?;
        let alternatives: Vec<String> = letters.iter().map(|letter| escape(&letter.to_string())).collect();
        let by_letter = PythonRegex::new(&format!(r":[\s]*({})", alternatives.join("|")))?;
        each_text(answers, |text| {
            let mut found = self.family.find_configured(text)?;
            if found.is_empty() {
                found = self.family.find(&by_words, &self.family.ignored.remove_from(text)?)?;
                found = by_text.get(&found).cloned().unwrap_or(found);
            }
            if found.is_empty() {
                found = self.family.find(&by_letter, text)?;
                found = if found.is_empty() { found } else { format!("({found})") };
            }
            Ok(ResponseValue::Text(if found.is_empty() { self.family.extract.fallback.clone() } else { found }))
        })
    }
}

fn letter(index: usize) -> char {
    char::from_u32('A' as u32 + index as u32).unwrap_or('?')
}
