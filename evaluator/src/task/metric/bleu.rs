//! Corpus BLEU as in sacrebleu: tokenizer 13a, n-grams up to order 4, exponential smoothing.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::statistic::Statistic;
use crate::task::python::pattern::PythonRegex;
use crate::task::python::text::{rstrip, words};

const ORDER: usize = 4;

/// BLEU statistics of each text pair.
pub(super) struct BleuCounts(Vec<Counts>);

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    length: f64,
    reference_length: f64,
    right: [f64; ORDER],
    total: [f64; ORDER],
}

impl BleuCounts {
    /// Counts n-grams of (reference, hypothesis) pairs.
    pub(super) fn new(texts: &[(&str, &str)]) -> Self {
        Self(texts.iter().map(|(reference, text)| Counts::new(reference, text)).collect())
    }
}

impl Statistic for BleuCounts {
    fn compute(&self, indices: &mut dyn Iterator<Item = usize>) -> f64 {
        indices.fold(Counts::default(), |sum, i| sum.plus(&self.0[i])).bleu()
    }
}

impl Counts {
    fn new(reference: &str, text: &str) -> Self {
        let (reference, text) = (tokenize(reference), tokenize(text));
        let (references, tokens) = (split(&reference), split(&text));
        let known = ngrams(&references);
        let mut counts =
            Self { length: tokens.len() as f64, reference_length: references.len() as f64, ..Self::default() };
        for (ngram, count) in ngrams(&tokens) {
            let order = ngram.len() - 1;
            counts.total[order] += count as f64;
            counts.right[order] += count.min(known.get(ngram).copied().unwrap_or(0)) as f64;
        }
        counts
    }

    fn plus(mut self, other: &Self) -> Self {
        self.length += other.length;
        self.reference_length += other.reference_length;
        for n in 0..ORDER {
            self.right[n] += other.right[n];
            self.total[n] += other.total[n];
        }
        self
    }

    fn bleu(&self) -> f64 {
        if self.right.iter().all(|right| *right == 0.0) {
            return 0.0;
        }
        let is_short = self.length < self.reference_length;
        let penalty = if is_short { (1.0 - self.reference_length / self.length).exp() } else { 1.0 };
        let (mut smooth, mut precisions) = (1.0, [0.0; ORDER]);
        for (n, precision) in precisions.iter_mut().enumerate() {
            if self.total[n] == 0.0 {
                break;
            }
            if self.right[n] == 0.0 {
                smooth *= 2.0;
                *precision = 100.0 / (smooth * self.total[n]);
            } else {
                *precision = 100.0 * self.right[n] / self.total[n];
            }
        }
        let log = |p: &f64| if *p == 0.0 { -9_999_999_999.0 } else { p.ln() };
        penalty * (precisions.iter().map(log).sum::<f64>() / ORDER as f64).exp()
    }
}

fn ngrams<'a>(tokens: &'a [&'a str]) -> HashMap<&'a [&'a str], usize> {
    let mut counts = HashMap::new();
    for ngram in (1..=ORDER).flat_map(|n| tokens.windows(n)) {
        *counts.entry(ngram).or_insert(0) += 1;
    }
    counts
}

fn split(text: &str) -> Vec<&str> {
    words(text).collect()
}

/// Tokenizes a text as mteval-v13a does, with spaces between the tokens.
fn tokenize(text: &str) -> String {
    static RULES: LazyLock<[(PythonRegex, &str); 4]> = LazyLock::new(|| {
        let rule = |pattern| PythonRegex::new(pattern).expect("the pattern is a constant");
        [
            (rule(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])"), " 1 "),
            (rule(r"([^0-9])([\.,])"), "1 2 "),
            (rule(r"([\.,])([^0-9])"), " 1 2"),
            (rule(r"([0-9])(-)"), "1 2 "),
        ]
    });
    let text = rstrip(text).replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    let text = text.replace("&quot;", "\"").replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">");
    RULES.iter().fold(format!(" {text} "), |text, (pattern, order)| {
        let write = |groups: &[String]| order.chars().map(|c| piece(c, groups)).collect();
        pattern.replace(&text, |found| write(&found.groups)).unwrap_or(text.clone())
    })
}

/// Replacement of one rule: a capture group by its digit, or a space.
fn piece(c: char, groups: &[String]) -> String {
    let group = c.to_digit(10).and_then(|digit| groups.get(digit as usize - 1));
    group.cloned().unwrap_or_else(|| c.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn tokens(text: &str, want: &[&str]) {
        assert_eq!(words(&tokenize(text)).collect::<Vec<_>>(), want);
    }

    #[test]
    fn tokens_are_those_of_13a() {
        tokens(
            "Hello, world! It's 3.5-4 &amp; (x).",
            &["Hello", ",", "world", "!", "It's", "3.5", "-", "4", "&", "(", "x", ")", "."],
        );
        tokens("a-\nb\nc", &["ab", "c"]);
    }

    #[test]
    fn equal_texts_score_100_and_disjoint_texts_0() {
        let text = "the quick brown fox jumps";
        let all = BleuCounts::new(&[(text, text)]).compute(&mut (0..1));
        assert!((all - 100.0).abs() < 1e-9);
        assert_eq!(BleuCounts::new(&[("a b", "c d")]).compute(&mut (0..1)), 0.0);
    }
}
