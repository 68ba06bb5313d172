//! Suggestions for misspelt names.

/// Least Jaro-Winkler similarity of a suggested name.
const SIMILARITY: f64 = 0.84;

/// Largest edit distance of a suggested name, for words of more than [`SHORT`] bytes.
const EDITS: usize = 2;

/// Word length in bytes up to which the edit distance is not used.
const SHORT: usize = 3;

/// Returns the candidate most similar to `word`, if one is similar. Case is ignored.
pub fn nearest<S: AsRef<str>>(word: &str, candidates: impl IntoIterator<Item = S>) -> Option<S> {
    let lower = word.to_lowercase();
    let scored = candidates.into_iter().filter_map(|candidate| {
        let name = candidate.as_ref().to_lowercase();
        let score = strsim::jaro_winkler(&lower, &name);
        let is_near = score > SIMILARITY || word.len() > SHORT && strsim::damerau_levenshtein(&lower, &name) <= EDITS;
        is_near.then_some((score, candidate))
    });
    scored.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, candidate)| candidate)
}

/// Returns "; did you mean `x`?" with the most similar of `known`, or an empty string if none is similar.
pub fn did_you_mean<S: AsRef<str>>(word: &str, known: impl IntoIterator<Item = S>) -> String {
    nearest(word, known).map_or_else(String::new, |name| format!("; did you mean `{}`?", name.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(word: &str, known: &[&str], want: Option<&str>) {
        assert_eq!(nearest(word, known.iter().copied()), want, "{word}");
    }

    #[test]
    fn the_nearest_candidate_is_suggested_if_it_is_near() {
        check("hellaswg", &["hellaswag", "winogrande"], Some("hellaswag"));
        check("ARC_EASY", &["arc_challenge", "arc_easy"], Some("arc_easy"));
        check("mmlu", &["wikitext", "gsm8k"], None);
        check("dpo", &["sft"], None);
        check("", &["sft"], None);
    }

    #[test]
    fn a_suggestion_ends_a_sentence() {
        assert_eq!(did_you_mean("trian", ["train", "test"]), "; did you mean `train`?");
        assert_eq!(did_you_mean("x", ["train", "test"]), "");
    }
}
