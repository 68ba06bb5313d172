//! WikiText: the text is scored as people write it, but words and bytes are counted as the data set has them.

use std::sync::LazyLock;

use serde_json::{Value as Json, json};

use super::{BuiltIn, Doc, text};
use crate::task::metric::MetricValue;
use crate::task::python::pattern::Pattern;
use crate::task::response_value::ResponseValue;

pub(super) const BUILT_INS: &[(&str, BuiltIn)] = &[
    ("wikitext/preprocess_wikitext.wikitext_detokenizer", BuiltIn::Field(detokenize)),
    ("wikitext/preprocess_wikitext.process_results", BuiltIn::Results(results)),
];

/// What is written together, in the order in which it is put together.
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

/// Blanks inside of a pair of marks are taken out.
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
    static RULES: LazyLock<Vec<(Pattern, char, char)>> = LazyLock::new(|| {
        let compile = |pattern| Pattern::new(pattern).expect("the pattern is a constant");
        PAIRS.iter().map(|(pattern, open, close)| (compile(pattern), *open, *close)).collect()
    });
    static SLASHES: LazyLock<Pattern> = LazyLock::new(|| Pattern::new("/' [0-9]/").expect("the pattern is a constant"));
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
    let [ResponseValue::Rolling(logprob)] = answers else { return Err("there is not one log-probability".into()) };
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

/// The parts between blanks; blanks at the ends have an empty part behind them.
pub(crate) fn count_words(text: &str) -> Result<usize, String> {
    static BLANKS: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(r"\s+").expect("the pattern is a constant"));
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
