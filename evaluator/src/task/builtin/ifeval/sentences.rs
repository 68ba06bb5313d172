//! Sentence count for plain English. lm-eval uses NLTK's trained Punkt tokenizer; these rules approximate it.

use crate::task::python::text::words;

/// Abbreviations whose period does not end a sentence.
const ABBREVIATIONS: [&str; 40] = [
    "mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "e.g", "i.e", "u.s", "u.k", "inc", "ltd", "co",
    "corp", "no", "fig", "gen", "col", "capt", "lt", "sgt", "rep", "sen", "gov", "rev", "hon", "jan", "feb", "aug",
    "sept", "oct", "nov", "dec", "a.m", "p.m", "ph.d",
];

/// Returns the number of sentences in a text.
pub(super) fn count(text: &str) -> usize {
    let all: Vec<&str> = words(text).collect();
    let ends = |(i, word): (usize, &&str)| i + 1 < all.len() && ends_sentence(word, all[i + 1]);
    match all.is_empty() {
        true => 0,
        false => 1 + all.iter().enumerate().filter(|(i, word)| ends((*i, word))).count(),
    }
}

fn ends_sentence(word: &str, next: &str) -> bool {
    let bare = word.trim_end_matches(|c: char| "\"')]}”’".contains(c));
    if bare.ends_with(['?', '!']) {
        return true;
    }
    let Some(stem) = bare.strip_suffix('.') else { return false };
    let stem = stem.trim_start_matches(|c: char| !c.is_alphanumeric()).to_lowercase();
    let is_initial = stem.chars().count() == 1 && stem.chars().all(char::is_alphabetic);
    let opens = next.trim_start_matches(|c: char| "\"'([{“‘".contains(c)).chars().next();
    let goes_on = opens.is_some_and(char::is_lowercase);
    let is_abbreviation = is_initial || ABBREVIATIONS.contains(&stem.as_str());
    let is_pause = goes_on && bare.ends_with("...");
    !(is_abbreviation || is_pause || opens.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_of_abbreviations_end_nothing() {
        assert_eq!(count("Dr. Lee met Mrs. Poe at 3.5 p.m. on Monday. They talked! Did they? Yes."), 4);
        assert_eq!(count("one line\nanother line"), 1);
        assert_eq!(count("He said \"stop.\" Then he left."), 2);
        assert_eq!(count("  "), 0);
    }
}
