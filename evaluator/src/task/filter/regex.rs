//! Filter `regex`: extracts a match of a pattern.

use serde_json::{Map, Value as Json};

use super::{Filter, each_text};
use crate::task::error::ConfigError;
use crate::task::keys::YamlMap;
use crate::task::python::pattern::PythonRegex;
use crate::task::python::text;
use crate::task::response_value::ResponseValue;

/// Filter `regex`: the pattern, the index of the match, and the value if nothing matches.
#[derive(Debug)]
pub(crate) struct RegexExtract {
    pub(crate) pattern: PythonRegex,
    pub(crate) group_select: i64,
    pub(crate) fallback: String,
}

const DEFAULT_PATTERN: &str = r"#### (\-?[0-9\.\,]+)";

impl RegexExtract {
    pub(super) fn read(keys: &YamlMap) -> Result<Self, ConfigError> {
        keys.deny_unknown(&["function", "regex_pattern", "group_select", "fallback"])?;
        Self::open(keys)
    }

    /// Reads all keys except the pattern, which is given.
    pub(crate) fn with_pattern(keys: &YamlMap, pattern: &str) -> Result<Self, ConfigError> {
        Ok(Self {
            pattern: PythonRegex::new(pattern).map_err(|problem| keys.error(format!("regex_pattern: {problem}")))?,
            group_select: keys.integer("group_select")?.unwrap_or(0),
            fallback: keys.text("fallback")?.unwrap_or_else(|| "[invalid]".into()),
        })
    }

    /// Reads the pattern and the other keys.
    pub(crate) fn open(keys: &YamlMap) -> Result<Self, ConfigError> {
        let pattern = keys.text("regex_pattern")?;
        Self::with_pattern(keys, pattern.as_deref().unwrap_or(DEFAULT_PATTERN))
    }

    fn extract(&self, text: &str) -> Result<String, String> {
        let found = self.pattern.find_all(text)?;
        let Some(found) = selected(&found, self.group_select) else { return Ok(self.fallback.clone()) };
        let groups = self.pattern.findall_item(text, found);
        let several = self.pattern.has_several_groups();
        let taken = groups.into_iter().find(|group| !several || !group.is_empty());
        Ok(text::strip(taken.unwrap_or(&self.fallback)).to_owned())
    }
}

/// Implements Python's `items[index]`; `None` if the index is out of range.
pub(super) fn selected<T>(items: &[T], index: i64) -> Option<&T> {
    let index = if index < 0 { index + items.len() as i64 } else { index };
    usize::try_from(index).ok().and_then(|index| items.get(index))
}

impl Filter for RegexExtract {
    fn apply(&self, answers: ResponseValue, _: &Map<String, Json>) -> Result<ResponseValue, String> {
        each_text(answers, |text| self.extract(text).map(ResponseValue::Text))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(pattern: &str, group_select: i64, text: &str, want: &str) {
        let pattern = PythonRegex::new(pattern).unwrap();
        let filter = RegexExtract { pattern, group_select, fallback: "[invalid]".into() };
        assert_eq!(filter.extract(text).unwrap(), want);
    }

    #[test]
    fn the_match_that_is_selected_is_taken() {
        check(DEFAULT_PATTERN, 0, "so #### 1,200\n#### 7", "1,200");
        check(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1, "16 eggs, 7 left", "7");
        check(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1, "7 left of $18.", "$18.");
        check("x(y?)", 0, "x", "");
        check("(a)|(b)|c", 0, "c", "[invalid]");
        check("a", 3, "aa", "[invalid]");
        check("a", 0, "b", "[invalid]");
    }
}
