//! WikiText: scores the detokenized text, but counts words and bytes of the original.

use std::sync::LazyLock;

use serde_json::{Value as Json, json};

use super::{BuiltIn, Doc, text};
use crate::task::metric::MetricValue;
use crate::task::python::pattern::PythonRegex;
use crate::task::response_value::ResponseValue;

pub(super) const BUILT_INS: &[(&str, BuiltIn)] = &[
    ("wikitext/preprocess_wikitext.wikitext_detokenizer", BuiltIn::Field(detokenize)),
    ("wikitext/preprocess_wikitext.process_results", BuiltIn::Results(results)),
];

/// Replacements that remove the spaces around punctuation, in order.
const JOINED: [(&str, &str); 9] = [
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
];

/// Patterns of brackets and quotes whose inner whitespace is removed.
const PAIRS: [(&str, char, char); 5] = [
    (r"\(\s*([^\)]*?)\s*\)", '(', ')'),
    (r"\[\s*([^\]]*?)\s*\]", '[', ']'),
    (r"{\s*([^}]*?)\s*}", '{', '}'),
    ("\"\\s*([^\"]*?)\\s*\"", '"', '"'),
    (r"'\s*([^']*?)\s*'", '\'', '\''),
];

const LAST: [(&str, &str); 8] = [
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \u{b0} ", "\u{b0}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
];

fn detokenize(doc: &Doc) -> Result<Json, String> {
    static RULES: LazyLock<Vec<(PythonRegex, char, char)>> = LazyLock::new(|| {
        let compile = |pattern| PythonRegex::new(pattern).expect("the pattern is a constant");
        PAIRS.iter().map(|(pattern, open, close)| (compile(pattern), *open, *close)).collect()
    });
    static SLASHES: LazyLock<PythonRegex> =
        LazyLock::new(|| PythonRegex::new("/' [0-9]/").expect("the pattern is a constant"));
    let text = text(doc, "page")?.replace("s '", "s'");
    let mut text = SLASHES.replace(&text, |_| "/'[0-9]/".to_owned())?;
    for (from, to) in JOINED {
        text = text.replace(from, to);
    }
    for (pattern, open, close) in RULES.iter() {
        text = pattern.replace(&text, |found| format!("{open}{}{close}", found.groups[0]))?;
    }
    for (from, to) in LAST {
        text = text.replace(from, to);
    }
    Ok(json!(text))
}

fn results(doc: &Doc, answers: &[ResponseValue]) -> Result<Vec<(String, MetricValue)>, String> {
    let [ResponseValue::Rolling(logprob)] = answers else { return Err("expected a single log-probability".into()) };
    let page = text(doc, "page")?;
    let (n_words, n_bytes) = (count_words(page)? as i64, page.len() as i64);
    let weighted =
        |name: &str, n: i64| (name.to_owned(), MetricValue::pair(MetricValue::Number(*logprob), MetricValue::Count(n)));
    Ok(vec![
        weighted("word_perplexity", n_words),
        weighted("byte_perplexity", n_bytes),
        weighted("bits_per_byte", n_bytes),
    ])
}

/// Counts the parts between whitespace, as `re.split(r"\s+", text)`. Leading or trailing whitespace adds an empty
/// part.
pub(crate) fn count_words(text: &str) -> Result<usize, String> {
    static BLANKS: LazyLock<PythonRegex> =
        LazyLock::new(|| PythonRegex::new(r"\s+").expect("the pattern is a constant"));
    Ok(BLANKS.split(text)?.len())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn blanks_at_the_ends_are_words() {
        assert_eq!(count_words(" a b ").unwrap(), 4);
        assert_eq!(count_words("").unwrap(), 1);
    }
}
