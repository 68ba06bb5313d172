//! chrF and chrF++ as sacrebleu computes them for a corpus: character n-grams up to 6, beta 2, and word n-grams if wanted.

use std::collections::HashMap;
use std::hash::Hash;

use super::statistic::Statistic;
use crate::task::python::text::{PUNCTUATION, words};

const CHARS: usize = 6;
const BETA_SQUARED: f64 = 4.0;

/// chrF statistics of each text pair: n-gram counts of hypothesis, reference and both, for each order.
pub(super) struct ChrfCounts {
    counts: Vec<Vec<[f64; 3]>>,
    n_orders: usize,
}

impl ChrfCounts {
    /// Counts n-grams of (reference, hypothesis) pairs, with word n-grams up to `word_order`.
    pub(super) fn new(texts: &[(&str, &str)], word_order: usize) -> Self {
        let counts = texts.iter().map(|(reference, text)| pair(reference, text, word_order)).collect();
        Self { counts, n_orders: CHARS + word_order }
    }
}

impl Statistic for ChrfCounts {
    fn over(&self, picked: &mut dyn Iterator<Item = usize>) -> f64 {
        let mut sums = vec![[0.0; 3]; self.n_orders];
        for counts in picked.map(|i| &self.counts[i]) {
            for (sum, count) in sums.iter_mut().flatten().zip(counts.iter().flatten()) {
                *sum += count;
            }
        }
        f_score(&sums)
    }
}

fn f_score(counts: &[[f64; 3]]) -> f64 {
    let (mut precision, mut recall, mut n_orders) = (0.0, 0.0, 0.0);
    for [of_text, of_reference, of_both] in counts {
        if *of_text > 0.0 && *of_reference > 0.0 {
            precision += of_both / of_text;
            recall += of_both / of_reference;
            n_orders += 1.0;
        }
    }
    if n_orders == 0.0 || precision + recall == 0.0 {
        return 0.0;
    }
    let (precision, recall) = (precision / n_orders, recall / n_orders);
    100.0 * ((1.0 + BETA_SQUARED) * precision * recall / (BETA_SQUARED * precision + recall))
}

fn pair(reference: &str, text: &str, word_order: usize) -> Vec<[f64; 3]> {
    let chars = |text: &str| words(text).flat_map(str::chars).collect::<Vec<char>>();
    let (reference_chars, text_chars) = (chars(reference), chars(text));
    let (reference_words, text_words) = (separated(reference), separated(text));
    let by_chars = (1..=CHARS).map(|n| count(&text_chars, &reference_chars, n));
    let by_words = (1..=word_order).map(|n| count(&text_words, &reference_words, n));
    by_chars.chain(by_words).collect()
}

/// Returns n-gram counts of hypothesis, reference and their intersection.
fn count<T: Eq + Hash>(text: &[T], reference: &[T], n: usize) -> [f64; 3] {
    let n_ngrams = |items: &[T]| (items.len() + 1).saturating_sub(n) as f64;
    let mut known = HashMap::new();
    for ngram in reference.windows(n) {
        *known.entry(ngram).or_insert(0) += 1;
    }
    let mut both = 0.0;
    for ngram in text.windows(n) {
        if let Some(left) = known.get_mut(ngram).filter(|left| **left > 0) {
            *left -= 1;
            both += 1.0;
        }
    }
    [if reference.len() < n { 0.0 } else { n_ngrams(text) }, n_ngrams(reference), both]
}

/// Splits words, and separates one punctuation mark at either end.
fn separated(text: &str) -> Vec<&str> {
    let is_mark = |c: char| PUNCTUATION.contains(c);
    let mut all = Vec::new();
    for word in words(text) {
        let mut chars = word.chars();
        let (first, last) = (chars.next(), chars.next_back());
        match (first, last) {
            (Some(_), Some(last)) if is_mark(last) => {
                let (head, tail) = word.split_at(word.len() - last.len_utf8());
                all.extend([head, tail]);
            }
            (Some(first), Some(_)) if is_mark(first) => {
                let (head, tail) = word.split_at(first.len_utf8());
                all.extend([head, tail]);
            }
            _ => all.push(word),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_mark_is_taken_off_each_word() {
        assert_eq!(separated("(hi) \"x a. ! b"), ["(hi", ")", "\"", "x", "a", ".", "!", "b"]);
    }

    #[test]
    fn short_texts_count_only_the_orders_they_have() {
        let counts = ChrfCounts::new(&[("ab", "ab")], 0);
        assert!((counts.over(&mut (0..1)) - 100.0).abs() < 1e-9);
        assert_eq!(ChrfCounts::new(&[("", "ab")], 2).over(&mut (0..1)), 0.0);
    }
}
