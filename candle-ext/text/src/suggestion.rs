//! Suggestions for misspelt names.

/// Returns the candidate with the fewest edits to `word`, if it is a likely misspelling. Case is ignored.
///
/// Words of 3 to 5 letters allow one edit, longer words two, shorter words none. Words of 10 letters allow three if the first
/// letter is right. A name of 4 letters or more that begins the other name is near, too. Names with other digits differ in
/// version or size, so they are no misspellings.
pub fn nearest<S: AsRef<str>>(word: &str, candidates: impl IntoIterator<Item = S>) -> Option<S> {
    let word = word.to_lowercase();
    let near = candidates.into_iter().filter_map(|candidate| {
        let name = candidate.as_ref().to_lowercase();
        let n_edits = strsim::damerau_levenshtein(&word, &name);
        let is_near = n_edits <= most_edits(&word, &name) || is_beginning(&word, &name);
        (is_near && digits(&word) == digits(&name)).then(|| (n_edits, -strsim::jaro_winkler(&word, &name), candidate))
    });
    near.min_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))).map(|(_, _, candidate)| candidate)
}

fn most_edits(word: &str, name: &str) -> usize {
    match word.chars().count() {
        0..=2 => 0,
        3..=5 => 1,
        10.. if word.chars().next() == name.chars().next() => 3,
        _ => 2,
    }
}

/// Returns true if one of the names begins with the other one.
fn is_beginning(word: &str, name: &str) -> bool {
    let (short, long) = if word.len() <= name.len() { (word, name) } else { (name, word) };
    short.chars().count() >= 4 && long.starts_with(short)
}

/// Returns the digits of a word in ascending order: swapped digits are a misspelling.
fn digits(word: &str) -> Vec<char> {
    let mut digits: Vec<char> = word.chars().filter(char::is_ascii_digit).collect();
    digits.sort_unstable();
    digits
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
        check("grpo", &["sft", "dpo"], None);
        check("use_dora", &["use_rslora"], None);
        check("bf61", &["bf16", "f16"], Some("bf16"));
        check("skp", &["stop", "skip"], Some("skip"));
        check("", &["sft"], None);
        check("bf", &["fp"], None);
    }

    #[test]
    fn the_beginning_of_a_name_and_a_long_misspelling_are_near() {
        check("activation_checkpointing", &["activation_checkpoint", "dtype"], Some("activation_checkpoint"));
        check("max_len", &["max_length", "seed"], Some("max_length"));
        check("learn_rate", &["learning_rate", "eps"], Some("learning_rate"));
        check("optimizer.learn_rate", &["optimizer.learning_rate"], Some("optimizer.learning_rate"));
        check("max", &["max_length"], None);
        check("GlmForCausalLM", &["LlamaForCausalLM"], None);
    }

    #[test]
    fn a_name_of_another_version_is_not_suggested() {
        check("qwen3_5", &["qwen2", "qwen3"], None);
        check("olmo2", &["olmoe"], None);
        check("Mistral3ForCausalLM", &["MistralForCausalLM"], None);
        let known =
            ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "OlmoeForCausalLM", "Gemma2ForCausalLM"];
        for name in ["Phi3ForCausalLM", "SmolLM3ForCausalLM", "Olmo2ForCausalLM"] {
            check(name, &known, None);
        }
    }

    #[test]
    fn a_suggestion_ends_a_sentence() {
        assert_eq!(did_you_mean("trian", ["train", "test"]), "; did you mean `train`?");
        assert_eq!(did_you_mean("x", ["train", "test"]), "");
    }
}
