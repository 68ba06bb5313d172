//! The input tokens of requests equal lm-evaluation-harness's, as recorded by tests/reference/harness_tokens.py.

use candlewick_inference::answer::encode::RequestEncoder;
use candlewick_inference::answer::rolling::{ScoredSequence, rolling_windows};
use candlewick_text::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Case {
    tokenizer: String,
    max_length: usize,
    add_bos_token: Option<bool>,
    pairs: Vec<(String, String, Option<Seen>)>,
    rolling: Vec<(String, Option<Vec<Seen>>)>,
    prompts: Vec<(String, usize, Vec<u32>)>,
}

#[derive(Debug, PartialEq, Deserialize)]
struct Seen {
    seen: Vec<u32>,
    n_targets: usize,
}

impl From<&ScoredSequence> for Seen {
    fn from(scored: &ScoredSequence) -> Self {
        Self { seen: scored.seen().to_vec(), n_targets: scored.n_targets }
    }
}

fn cases() -> Vec<(Tokenizer, Case)> {
    let text =
        std::fs::read_to_string(crate::support::root().join("evaluator/tests/fixtures/harness_tokens.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
    let load = |case: Case| (Tokenizer::from_directory(crate::support::root().join(&case.tokenizer)).unwrap(), case);
    cases.into_iter().map(load).collect()
}

#[test]
fn pairs_are_cut_and_divided_as_by_the_harness() {
    let mut n_alike = 0;
    for (tokenizer, case) in cases() {
        let encoder = RequestEncoder::new(&tokenizer, case.add_bos_token);
        for (context, continuation, want) in &case.pairs {
            let pair = encoder.pair(context, continuation);
            let Some(want) = want else {
                // The harness fails for an empty continuation, for an empty context, and for a text above the context
                // length.
                let is_refused = pair.as_ref().map_or(true, |pair| pair.continuation.len() > case.max_length);
                assert!(is_refused || context.trim().is_empty(), "{} {context:?} {continuation:?}", case.tokenizer);
                continue;
            };
            let scored = ScoredSequence::new(pair.unwrap(), case.max_length);
            assert_eq!(Seen::from(&scored), *want, "{} {context:?} {continuation:?}", case.tokenizer);
            assert_eq!(scored.ids.len(), want.seen.len() + 1);
            n_alike += 1;
        }
    }
    assert!(n_alike > 200, "{n_alike}");
}

#[test]
fn long_texts_roll_as_in_the_harness() {
    for (tokenizer, case) in cases() {
        let encoder = RequestEncoder::new(&tokenizer, case.add_bos_token);
        for (text, want) in &case.rolling {
            let got =
                rolling_windows(&encoder.text(text).unwrap(), encoder.prefix_token_id().unwrap(), case.max_length);
            let mut got: Vec<Seen> = got.iter().map(Seen::from).collect();
            let mut want: Vec<Seen> = want.iter().flatten().map(|w| Seen { seen: w.seen.clone(), ..*w }).collect();
            // The harness sorts the windows of a batch by length, longest first.
            got.sort_by_key(|window| (window.seen.clone(), window.n_targets));
            want.sort_by_key(|window| (window.seen.clone(), window.n_targets));
            assert_eq!(got, want, "{} {text:?}", case.tokenizer);
        }
    }
}

#[test]
fn prompts_are_cut_as_by_the_harness() {
    for (tokenizer, case) in cases() {
        let encoder = RequestEncoder::new(&tokenizer, case.add_bos_token);
        for (text, max_gen_toks, want) in &case.prompts {
            let ids = encoder.prompt(text).unwrap();
            let n_truncated = ids.len().saturating_sub(case.max_length - max_gen_toks);
            assert_eq!(ids[n_truncated..], *want, "{} {text:?}", case.tokenizer);
        }
    }
}

/// Case of tests/reference/add_bos_eos.py.
#[derive(Deserialize)]
struct AddBosEos {
    tokenizer: String,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    ids: Vec<u32>,
    ids_if_given_false: Vec<u32>,
    ids_if_given_true: Vec<u32>,
}

#[test]
fn the_model_argument_add_bos_token_decides_and_the_tokenizers_config_does_not() {
    let fixtures = crate::support::root().join("candle-ext/text/tests/fixtures/chat");
    let cases: Vec<AddBosEos> =
        serde_json::from_slice(&std::fs::read(fixtures.join("add_bos_eos.json")).unwrap()).unwrap();
    for case in cases {
        let of = fixtures.join(&case.tokenizer);
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(of.join("tokenizer.json"), copy.path().join("tokenizer.json")).unwrap();
        let mut config: Value =
            serde_json::from_slice(&std::fs::read(of.join("tokenizer_config.json")).unwrap()).unwrap();
        config["add_bos_token"] = json!(case.add_bos_token);
        config["add_eos_token"] = json!(case.add_eos_token);
        std::fs::write(copy.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let tokenizer = Tokenizer::from_directory(copy.path()).unwrap();
        for (add_bos, want) in
            [(None, &case.ids), (Some(false), &case.ids_if_given_false), (Some(true), &case.ids_if_given_true)]
        {
            let encoder = RequestEncoder::new(&tokenizer, add_bos);
            assert_eq!(encoder.prompt("Yes.").unwrap(), *want, "{} {config} {add_bos:?}", case.tokenizer);
            assert_eq!(encoder.text("Yes.").unwrap(), *want, "{} {config} {add_bos:?}", case.tokenizer);
        }
    }
}
