//! `exact_match`: equality of text and target after removal of ignored patterns.

use std::sync::Arc;

use crate::task::error::ConfigError;
use crate::task::keys::YamlMap;
use crate::task::python::pattern::PythonRegex;
use crate::task::python::text::PUNCTUATION;

/// Options of `exact_match`: ignored patterns, case, punctuation and numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExactMatch {
    patterns: Arc<Vec<PythonRegex>>,
    case: bool,
    punctuation: bool,
    numbers: bool,
}

pub(super) const KEYS: [&str; 4] = ["regexes_to_ignore", "ignore_case", "ignore_punctuation", "ignore_numbers"];

impl ExactMatch {
    pub(super) fn read(keys: &YamlMap, others: &[&str]) -> Result<Self, ConfigError> {
        keys.deny_unknown(&[others, &KEYS].concat())?;
        let patterns = keys.texts("regexes_to_ignore")?.unwrap_or_default();
        let compile =
            |pattern: &String| PythonRegex::new(pattern).map_err(|p| keys.error(format!("regexes_to_ignore: {p}")));
        Ok(Self {
            patterns: Arc::new(patterns.iter().map(compile).collect::<Result<_, _>>()?),
            case: keys.flag("ignore_case", false)?,
            punctuation: keys.flag("ignore_punctuation", false)?,
            numbers: keys.flag("ignore_numbers", false)?,
        })
    }

    /// Returns true if both texts are equal after normalization.
    pub(crate) fn is_match(&self, prediction: &str, reference: &str) -> Result<bool, String> {
        Ok(self.reduce(prediction)? == self.reduce(reference)?)
    }

    fn reduce(&self, text: &str) -> Result<String, String> {
        let mut text = text.to_owned();
        for pattern in self.patterns.iter() {
            text = pattern.remove(&text)?;
        }
        if self.case {
            text = text.to_lowercase();
        }
        text.retain(|c| !(self.punctuation && PUNCTUATION.contains(c) || self.numbers && c.is_ascii_digit()));
        Ok(text)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ignored_characters_are_removed_from_both_sides() {
        let patterns = [",", r"\$", "(?s).*#### ", r"\.$"].map(|pattern| PythonRegex::new(pattern).unwrap());
        let gsm8k = ExactMatch { patterns: Arc::new(patterns.into()), case: true, ..ExactMatch::default() };
        assert!(gsm8k.is_match("$1,200.", "he adds 3\n#### 1200").unwrap());
        assert!(!gsm8k.is_match("1200.5", "#### 1200").unwrap());
        let bare = ExactMatch { punctuation: true, numbers: true, ..ExactMatch::default() };
        assert!(bare.is_match("(a)1", "A").is_ok_and(|is_match| !is_match));
        assert!(bare.is_match("(a)1", "a!").unwrap());
    }
}
