//! NLTK's Treebank tokenizer, reduced to the rules that affect the count of capitalized words.

use std::sync::LazyLock;

use crate::task::python::pattern::PythonRegex;
use crate::task::python::text::words;

/// Splits a text into Treebank tokens.
pub(super) fn tokenize(text: &str) -> Vec<String> {
    static RULES: LazyLock<Vec<(PythonRegex, &str)>> = LazyLock::new(|| {
        let rule = |(pattern, write): &(&str, &'static str)| {
            (PythonRegex::new(pattern).expect("the pattern is a constant"), *write)
        };
        SPLITS.iter().map(rule).collect()
    });
    let spaced = RULES.iter().fold(format!(" {text} "), |text, (pattern, write)| {
        let piece = |found: &crate::task::python::pattern::RegexMatch| {
            found
                .groups
                .iter()
                .enumerate()
                .fold((*write).to_owned(), |out, (i, group)| out.replace(&format!("\\{}", i + 1), group))
        };
        pattern.replace(&text, piece).unwrap_or(text.clone())
    });
    words(&spaced).map(str::to_owned).collect()
}

const SPLITS: [(&str, &str); 9] = [
    (r"([\u201c\u201d\u00ab\u00bb])", r" \1 "),
    (r#"(")"#, r" \1 "),
    (r"([:,])([^\d])", r" \1 \2"),
    (r"(\.\.\.|\u2026|--|\u2014)", r" \1 "),
    (r"([;@#$%&?!\[\]\(\)\{\}<>])", r" \1 "),
    (r"([^\.])(\.)(\s*)$", r"\1 \2\3"),
    (r"(\w)('(?:[sSmMdD]|ll|LL|re|RE|ve|VE))(?=\W)", r"\1 \2"),
    (r"(\w)(n't|N'T)(?=\W)", r"\1 \2"),
    (r"\b(can|CAN|Can)(not|NOT)\b", r"\1 \2"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contractions_and_marks_stand_alone() {
        assert_eq!(
            tokenize("DON'T SAY \"NO\", I'M (IN) U.S.A. CANNOT, A/B."),
            [
                "DO", "N'T", "SAY", "\"", "NO", "\"", ",", "I", "'M", "(", "IN", ")", "U.S.A.", "CAN", "NOT", ",",
                "A/B", ".",
            ]
        );
    }
}
