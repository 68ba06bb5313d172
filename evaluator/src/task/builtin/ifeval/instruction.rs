//! IFEval's instructions, each a check of a response.

use serde_json::{Map, Value as Json};

use super::language::{LanguageMatch, check_language};
use super::{sentences, tokens};
use crate::task::python::pattern::{Flags, PythonRegex};
use crate::task::python::text::{is_lower, is_upper, strip, words};

/// Arguments of an instruction. A key that is missing, null, 0 or empty counts as absent.
struct InstructionArgs<'a> {
    name: &'a str,
    kwargs: &'a Map<String, Json>,
}

/// Returns true if `text` follows the instruction with this name and these arguments.
pub(super) fn follows(name: &str, kwargs: &Map<String, Json>, text: &str) -> Result<bool, String> {
    let given = InstructionArgs { name, kwargs };
    match name {
        "keywords:existence" => given.all_found(text, "keywords", false),
        "keywords:forbidden_words" => given.none_found(text),
        "keywords:frequency" => {
            let keyword = strip(given.text("keyword")?);
            given.compare(count(keyword, text, IGNORE_CASE)?, "frequency", "relation")
        }
        "keywords:letter_frequency" => {
            let letter = given.text("letter")?.to_lowercase();
            given.compare(text.to_lowercase().matches(&letter).count(), "let_frequency", "let_relation")
        }
        "language:response_language" => Ok(check_language(given.text("language")?, text) != LanguageMatch::No),
        "length_constraints:number_sentences" => given.compare(sentences::count(text), "num_sentences", "relation"),
        "length_constraints:number_words" => given.compare(count(r"\w+", text, PLAIN)?, "num_words", "relation"),
        "length_constraints:number_paragraphs" => paragraphs(text, given.count("num_paragraphs")?),
        "length_constraints:nth_paragraph_first_word" => given.first_word(text),
        "detectable_content:number_placeholders" => {
            Ok(count(r"\[.*?\]", text, PLAIN)? >= given.count("num_placeholders")?)
        }
        "detectable_content:postscript" => postscript(text, strip(given.text("postscript_marker")?)),
        "detectable_format:number_bullet_lists" => {
            let stars = count(r"^\s*\*[^\*].*$", text, LINES)?;
            Ok(stars + count(r"^\s*-.*$", text, LINES)? == given.count("num_bullets")?)
        }
        "detectable_format:constrained_response" => Ok(OPTIONS.iter().any(|option| strip(text).contains(option))),
        "detectable_format:number_highlighted_sections" => Ok(highlights(text)? >= given.count("num_highlights")?),
        "detectable_format:multiple_sections" => {
            let pattern = format!(r"\s?{}\s?\d+\s?", strip(given.text("section_spliter")?));
            Ok(count(&pattern, text, PLAIN)? >= given.count("num_sections")?)
        }
        "detectable_format:json_format" => Ok(is_json(text)),
        "detectable_format:title" => {
            let titles = find("<<[^\n]+>>", text, PLAIN)?;
            Ok(titles.iter().any(|title| !strip(title.trim_start_matches('<').trim_end_matches('>')).is_empty()))
        }
        "combination:two_responses" => Ok(two_responses(text)),
        "combination:repeat_prompt" => {
            let prompt = strip(given.text("prompt_to_repeat")?).to_lowercase();
            Ok(strip(text).to_lowercase().starts_with(&prompt))
        }
        "startend:end_checker" => {
            let end = strip(given.text("end_phrase")?).to_lowercase();
            Ok(strip(text).trim_matches('"').to_lowercase().ends_with(&end))
        }
        "startend:quotation" => {
            let text = strip(text);
            Ok(text.len() > 1 && text.starts_with('"') && text.ends_with('"'))
        }
        "change_case:capital_word_frequency" => {
            let n_capital = tokens::tokenize(text).iter().filter(|token| is_upper(token)).count();
            given.compare(n_capital, "capital_frequency", "capital_relation")
        }
        "change_case:english_capital" => Ok(is_upper(text) && check_language("en", text) != LanguageMatch::No),
        "change_case:english_lowercase" => Ok(is_lower(text) && check_language("en", text) != LanguageMatch::No),
        "punctuation:no_comma" => Ok(!text.contains(',')),
        other => Err(format!("the instruction {other:?} is not one of IFEval's")),
    }
}

const PLAIN: Flags = Flags { ignore_case: false, multi_line: false };
const LINES: Flags = Flags { ignore_case: false, multi_line: true };
const IGNORE_CASE: Flags = Flags { ignore_case: true, multi_line: false };
const OPTIONS: [&str; 3] = ["My answer is yes.", "My answer is no.", "My answer is maybe."];

impl<'a> InstructionArgs<'a> {
    fn get(&self, key: &str) -> Result<&'a Json, String> {
        let is_given = |value: &&Json| match value {
            Json::Null => false,
            Json::String(text) => !text.is_empty(),
            Json::Array(items) => !items.is_empty(),
            Json::Number(number) => number.as_f64() != Some(0.0),
            _ => true,
        };
        let value = self.kwargs.get(key).filter(is_given);
        value.ok_or_else(|| format!("the instruction {} lacks its {key:?}", self.name))
    }

    fn text(&self, key: &str) -> Result<&'a str, String> {
        self.get(key)?.as_str().ok_or_else(|| format!("{key:?} of the instruction {} is not a text", self.name))
    }

    fn texts(&self, key: &str) -> Result<Vec<&'a str>, String> {
        let list = self.get(key)?.as_array().and_then(|list| list.iter().map(Json::as_str).collect());
        list.ok_or_else(|| format!("{key:?} of the instruction {} is not a list of texts", self.name))
    }

    fn count(&self, key: &str) -> Result<usize, String> {
        let count = self.get(key)?.as_f64().filter(|count| *count >= 0.0);
        count.map(|count| count as usize).ok_or_else(|| format!("{key:?} of {} is not a count", self.name))
    }

    fn compare(&self, found: usize, count: &str, relation: &str) -> Result<bool, String> {
        let wanted = self.count(count)?;
        match self.text(relation)? {
            "less than" => Ok(found < wanted),
            "at least" => Ok(found >= wanted),
            other => Err(format!("the relation {other:?} is neither \"less than\" nor \"at least\"")),
        }
    }

    fn all_found(&self, text: &str, key: &str, otherwise: bool) -> Result<bool, String> {
        for keyword in self.texts(key)? {
            if count(keyword, text, IGNORE_CASE)? == 0 {
                return Ok(otherwise);
            }
        }
        Ok(!otherwise)
    }

    fn none_found(&self, text: &str) -> Result<bool, String> {
        for word in self.texts("forbidden_words")? {
            if count(&format!(r"\b{word}\b"), text, IGNORE_CASE)? > 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn first_word(&self, text: &str) -> Result<bool, String> {
        let (n_wanted, nth) = (self.count("num_paragraphs")?, self.count("nth_paragraph")?);
        let paragraphs: Vec<&str> = text.split("\n\n").collect();
        let n_found = paragraphs.iter().filter(|paragraph| !strip(paragraph).is_empty()).count();
        if nth > n_found {
            return Ok(false);
        }
        let Some(word) = words(paragraphs[nth - 1]).next() else { return Ok(false) };
        let word = word.trim_start_matches('\'').trim_start_matches('"');
        let word: String = word.chars().take_while(|c| !".,?!'\"".contains(*c)).flat_map(char::to_lowercase).collect();
        Ok(n_found == n_wanted && word == self.text("first_word")?.to_lowercase())
    }
}

fn find(pattern: &str, text: &str, flags: Flags) -> Result<Vec<String>, String> {
    let found = PythonRegex::with_flags(pattern, flags)?.find_all(text)?;
    Ok(found.iter().map(|found| text[found.start..found.end].to_owned()).collect())
}

fn count(pattern: &str, text: &str, flags: Flags) -> Result<usize, String> {
    find(pattern, text, flags).map(|found| found.len())
}

/// Checks the number of paragraphs separated by `***`. An empty paragraph is an error only between others.
fn paragraphs(text: &str, n_wanted: usize) -> Result<bool, String> {
    let pattern = PythonRegex::new(r"\s?\*\*\*\s?")?;
    let parts = pattern.split(text)?;
    let inner = parts.len().saturating_sub(1).max(1);
    if parts[1..inner].iter().any(|part| strip(part).is_empty()) {
        return Ok(false);
    }
    Ok(parts.iter().filter(|part| !strip(part).is_empty()).count() == n_wanted)
}

fn postscript(text: &str, marker: &str) -> Result<bool, String> {
    let pattern = match marker {
        "P.P.S" => r"\s*p\.\s?p\.\s?s.*$".to_owned(),
        "P.S." => r"\s*p\.\s?s\..*$".to_owned(),
        other => format!(r"\s*{}.*$", other.to_lowercase()),
    };
    Ok(count(&pattern, &text.to_lowercase(), LINES)? > 0)
}

fn highlights(text: &str) -> Result<usize, String> {
    let single = find(r"\*[^\n\*]*\*", text, PLAIN)?;
    let double = find(r"\*\*[^\n\*]*\*\*", text, PLAIN)?;
    let single = single.iter().filter(|part| !strip(part.trim_matches('*')).is_empty()).count();
    let inside =
        |part: &String| part.strip_prefix("**").and_then(|part| part.strip_suffix("**")).map(strip).map(str::len);
    Ok(single + double.iter().filter(|part| inside(part).is_some_and(|n| n > 0)).count())
}

fn is_json(text: &str) -> bool {
    let mut text = strip(text);
    for fence in ["```json", "```Json", "```JSON", "```"] {
        text = text.strip_prefix(fence).unwrap_or(text);
    }
    let text = strip(text.strip_suffix("```").unwrap_or(text));
    // Python's parser also accepts these constants.
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok() || ["NaN", "Infinity", "-Infinity"].contains(&text)
}

fn two_responses(text: &str) -> bool {
    let parts: Vec<&str> = text.split("******").map(strip).collect();
    let last = parts.len() - 1;
    let is_gap = |(i, part): (usize, &&str)| part.is_empty() && i != 0 && i != last;
    let said: Vec<&&str> = parts.iter().filter(|part| !part.is_empty()).collect();
    !parts.iter().enumerate().any(is_gap) && said.len() == 2 && said[0] != said[1]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(name: &str, kwargs: Json, text: &str, want: bool) {
        assert_eq!(follows(name, kwargs.as_object().unwrap(), text), Ok(want), "{name}: {text:?}");
    }

    #[test]
    fn counts_are_compared() {
        check("keywords:frequency", json!({"keyword": "a", "frequency": 2, "relation": "at least"}), "A a", true);
        check(
            "keywords:letter_frequency",
            json!({"letter": "Q", "let_frequency": 1, "let_relation": "less than"}),
            "q",
            false,
        );
        check("length_constraints:number_words", json!({"num_words": 3, "relation": "less than"}), "a b-c d", false);
        check("detectable_format:number_bullet_lists", json!({"num_bullets": 2}), "* a\n- b\n** c", true);
        check("detectable_format:number_highlighted_sections", json!({"num_highlights": 3}), "*a* **b** ** **", false);
        check(
            "detectable_format:multiple_sections",
            json!({"section_spliter": "SECTION", "num_sections": 2}),
            "SECTION 1 a SECTION 2",
            true,
        );
    }

    #[test]
    fn parts_are_found() {
        check("length_constraints:number_paragraphs", json!({"num_paragraphs": 2}), "a\n***\nb\n***\n", true);
        check("length_constraints:number_paragraphs", json!({"num_paragraphs": 2}), "a\n***\n***\nb", false);
        let kwargs = json!({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Hi"});
        check("length_constraints:nth_paragraph_first_word", kwargs, "a\n\n\"hi, you", true);
        check("combination:two_responses", json!({}), "a******b", true);
        check("combination:two_responses", json!({}), "a******a", false);
        check("detectable_content:postscript", json!({"postscript_marker": "P.S."}), "x\np. s. y", true);
        check("detectable_format:json_format", json!({}), "```json\n{\"a\": 1}\n```", true);
        check("detectable_format:title", json!({}), "<<>> <<a>>", true);
        check("startend:end_checker", json!({"end_phrase": "The end."}), "x the END.\"", true);
    }

    #[test]
    fn missing_and_unknown_arguments_are_named() {
        let error = follows("keywords:frequency", &Map::new(), "a").unwrap_err();
        assert!(error.contains("lacks its \"keyword\""), "{error}");
        assert!(follows("keywords:rhyme", &Map::new(), "a").unwrap_err().contains("keywords:rhyme"));
    }
}
