//! Responses equal those of single, unbatched requests, for any batching, prefix sharing, number of ranks and
//! resumption.

mod fp8;
mod ranks;
mod resume;

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::support::CONTEXT;
use candle_core::{DType, Device};
use candlewick_comm::{Options, Solo, World, threads};
use candlewick_inference::answer::encode::RequestEncoder;
use candlewick_inference::answer::rolling::{ScoredSequence, rolling_windows};
use candlewick_inference::answer::stop::{StopCriteria, ThinkEnd};
use candlewick_inference::answer::{
    BackendSettings, EngineBackend, LmBackend, RequestOutput, RequestProgress, RequestsInterrupted,
};
use candlewick_inference::lm::Lm;
use candlewick_inference::parallel_config::{InferenceGroup, ParallelConfig};
use candlewick_inference::request::{GenerationSettings, Request, Response};
use candlewick_model::{FP8_SCALES, LayerSpec, fp8_scales_to_json};
use candlewick_ops::{AttentionChoice, AttentionImpl, Fp8LinearScales};
use candlewick_parallel::KvCache;
use candlewick_runtime::exit::{ExitCode, classify};
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};

fn alone() -> InferenceGroup {
    InferenceGroup::replicated(Arc::new(Solo))
}

fn lm(folder: &Path) -> Lm {
    Lm::load(folder, None, DType::F32, Device::Cpu).unwrap()
}

fn model(seed: u64) -> (tempfile::TempDir, Lm) {
    let folder = tempfile::tempdir().unwrap();
    let lm = lm(&crate::support::export(folder.path(), seed));
    (folder, lm)
}

fn scored(context: &str, continuation: &str) -> Request {
    Request::Loglikelihood { context: context.into(), continuation: continuation.into() }
}

fn greedy(until: &[&str], max_gen_toks: usize) -> GenerationSettings {
    GenerationSettings {
        until: until.iter().map(|stop| (*stop).to_owned()).collect(),
        max_gen_toks: Some(max_gen_toks),
        do_sample: false,
        temperature: 0.0,
        top_p: 1.0,
        top_k: None,
    }
}

fn generate(context: &str, settings: GenerationSettings) -> Request {
    Request::GenerateUntil { context: context.into(), settings }
}

const FEWSHOT: &str = "Q: Is snow cold? A: yes\n\nQ: Is fire cold? A: no\n\nQ: Is the sun hot? A: yes\n\n";

/// Returns requests of all kinds: shared contexts, single-token choices, duplicates, truncated and empty contexts,
/// rolling texts and prompts.
fn requests() -> Vec<Request> {
    let mut requests = Vec::new();
    for question in ["Q: Is ice hot? A:", "Q: Is tea hot? A:", "Q: Is tea cold, or is it not? A: "] {
        for choice in [" yes", " no", " a", " b", " maybe it is", " maybe it is not, who knows"] {
            requests.push(scored(&format!("{FEWSHOT}{question}"), choice));
        }
    }
    requests.extend([
        scored("", "Say wolf 4 times."),
        scored("Say wolf 4 times.", " wolf"),
        scored("Say wolf 4 times.", " wolf"),
        scored(&"Spell the word cloud. ".repeat(20), " c-l-o-u-d"),
        scored("a", "b"),
    ]);
    let text = |n: usize| Request::LoglikelihoodRolling { text: "The quick fox, the lazy dog. ".repeat(n) };
    requests.extend([text(0), text(1), text(3), text(30), text(1)]);
    for (i, prompt) in ["Say wolf 4 times.", "Spell the word cloud.", "Say", "W"].iter().enumerate() {
        requests.push(generate(prompt, greedy(&[], 5 + 3 * i)));
        requests.push(generate(&format!("{FEWSHOT}{prompt}"), greedy(&["e", "\n"], 30)));
        requests.push(generate(&format!("{FEWSHOT}{FEWSHOT}{prompt}"), greedy(&["zq"], 12)));
    }
    requests.push(generate("Say", greedy(&[], 0)));
    requests
}

fn settings() -> BackendSettings {
    BackendSettings::default()
}

fn answer(lm: &Lm, settings: BackendSettings, requests: &[Request]) -> Vec<RequestOutput> {
    EngineBackend::new(lm, settings, alone()).unwrap().answer(requests).unwrap()
}

fn responses(answered: &[RequestOutput]) -> Vec<Response> {
    answered.iter().map(|answered| answered.response.clone()).collect()
}

/// Returns the logits after some tokens of a sequence of `n_tokens`, from a forward pass of these tokens alone.
fn logits(lm: &Lm, ids: &[u32], n_tokens: usize) -> Vec<f64> {
    let cache = KvCache::new(lm.engine().model().n_blocks(), ids.len());
    let class = lm.engine().model().length_class(n_tokens);
    let logits = lm.engine().next_logits(ids, 0, class, &cache).unwrap();
    logits.to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect()
}

fn likeliest(logits: &[f64]) -> usize {
    (0..logits.len()).rev().max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap()
}

/// Scores a sequence token by token.
fn score_alone(lm: &Lm, scored: &ScoredSequence) -> (f64, bool) {
    let (mut sum, mut is_greedy) = (0.0, true);
    for (i, target) in scored.targets().iter().enumerate() {
        let logits = logits(lm, &scored.ids[..=scored.first_row() + i], scored.seen().len());
        let log_sum = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
        sum += logits[*target as usize] - log_sum;
        is_greedy &= likeliest(&logits) == *target as usize;
    }
    (sum, is_greedy)
}

/// Generates with a forward pass of the whole text for each token.
fn generate_alone(lm: &Lm, context: &str, settings: &GenerationSettings) -> String {
    let n_max = settings.max_gen_toks.unwrap();
    let mut ids = lm.tokenizer().encode(context, SpecialTokens::Include).unwrap();
    ids.drain(..ids.len().saturating_sub(CONTEXT - n_max));
    let n_prompt = ids.len();
    let mut text = String::new();
    while ids.len() < n_prompt + n_max {
        let token = likeliest(&logits(lm, &ids, n_prompt + n_max - 1)) as u32;
        if lm.tokenizer().eos_ids().contains(&token) {
            break;
        }
        ids.push(token);
        text = lm.tokenizer().decode(&ids[n_prompt..], SpecialTokens::Exclude).unwrap();
        if settings.until.iter().any(|stop| text.contains(stop)) {
            break;
        }
    }
    settings.until.iter().fold(text, |text, stop| text.split(stop).next().unwrap().to_owned())
}

#[track_caller]
fn assert_near(got: f64, want: f64, request: &Request) {
    assert!((got - want).abs() < 1e-4 * want.abs().max(1.0), "{got} {want}: {request:?}");
}

#[test]
fn answers_are_those_to_each_request_by_itself() {
    check_answers(&model(1).1);
}

/// Requests within and beyond the original context begin with the same tokens.
#[test]
fn answers_with_longrope_are_those_to_each_request_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    check_answers(&lm(&crate::support::export_long_rope(folder.path(), 1, 40)));
}

fn check_answers(lm: &Lm) {
    let encoder = RequestEncoder::new(lm.tokenizer(), None);
    let requests = requests();
    let mut n_greedy = 0;
    for (request, RequestOutput { response, n_truncated, .. }) in requests.iter().zip(answer(lm, settings(), &requests))
    {
        match (request, response) {
            (Request::Loglikelihood { context, continuation }, Response::Loglikelihood { logprob, is_greedy }) => {
                let alone = ScoredSequence::new(encoder.pair(context, continuation).unwrap(), CONTEXT);
                let want = score_alone(lm, &alone);
                assert_near(logprob, want.0, request);
                assert_eq!((is_greedy, n_truncated), (want.1, alone.n_truncated), "{request:?}");
                n_greedy += usize::from(is_greedy);
            }
            (Request::LoglikelihoodRolling { text }, Response::LoglikelihoodRolling(logprob)) => {
                let windows =
                    rolling_windows(&encoder.text(text).unwrap(), encoder.prefix_token_id().unwrap(), CONTEXT);
                let want = windows.iter().map(|window| score_alone(lm, window).0).sum::<f64>();
                assert_near(logprob, want + 0.0, request);
            }
            (Request::GenerateUntil { context, settings }, Response::Text(text)) => {
                assert_eq!(text, generate_alone(lm, context, settings), "{request:?}");
            }
            (request, response) => panic!("{response:?} is no answer to {request:?}"),
        }
    }
    // The model's own generation is greedy, if its text is tokenized to the same tokens.
    for prompt in ["Say wolf 4 times.", "Say", "Spell the word cloud.", "W", "The quick fox", "a b c"] {
        let said = generate_alone(lm, prompt, &greedy(&[], 1));
        if said.is_empty() {
            continue;
        }
        let again = answer(lm, settings(), &[scored(prompt, &said)]);
        let Response::Loglikelihood { is_greedy, .. } = again[0].response else { panic!("{again:?}") };
        assert_eq!(is_greedy, score_alone(lm, &ScoredSequence::new(encoder.pair(prompt, &said).unwrap(), CONTEXT)).1);
        n_greedy += usize::from(is_greedy);
    }
    assert!(n_greedy > 0, "no request has a greedy answer");
}

#[test]
fn answers_have_the_same_bits_in_every_batch() {
    let (folder, _lm) = model(1);
    let requests = requests();
    for dtype in [DType::F32, DType::BF16] {
        let lm = Lm::load(&folder.path().join("model"), None, dtype, Device::Cpu).unwrap();
        let want = answer(&lm, settings(), &requests);
        for n in [1, 2, 5, 100] {
            let settings = BackendSettings { batch_size: Some(n), ..settings() };
            assert_eq!(answer(&lm, settings, &requests), want, "{n} {dtype:?}");
        }
    }
}

#[test]
fn answers_have_the_same_bits_on_any_number_of_ranks() {
    let (folder, _lm) = model(1);
    let requests = requests();
    for (dtype, n_ranks) in [(DType::F32, vec![2, 3, 7]), (DType::BF16, vec![4])] {
        let load = || Lm::load(&folder.path().join("model"), None, dtype, Device::Cpu).unwrap();
        let want = answer(&load(), settings(), &requests);
        for n in n_ranks {
            let on_rank = |world: &World| {
                EngineBackend::new(&load(), settings(), InferenceGroup::replicated(world.group()))?.answer(&requests)
            };
            for answers in threads::run(n, Options::default(), on_rank).unwrap() {
                assert_eq!(answers, want, "{n} {dtype:?}");
            }
        }
    }
}

/// Loads a model with experts on the ranks of a world.
fn experts(folder: &Path, parallel_config: ParallelConfig, world: &World) -> anyhow::Result<(Lm, InferenceGroup)> {
    let groups = parallel_config.groups(&*world.group())?;
    let lm = Lm::load_sharded(folder, None, DType::F32, Device::Cpu, (parallel_config, &groups))?;
    Ok((lm, InferenceGroup::from_groups(world.group(), &groups, parallel_config.zero3)))
}

#[test]
fn samples_depend_on_seed_and_draw_but_not_on_the_batch() {
    let (_folder, lm) = model(1);
    let sampled = GenerationSettings { do_sample: true, temperature: 1.0, ..greedy(&[], 8) };
    let requests: Vec<Request> =
        ["Say", "Spell", "Say", "Say"].iter().map(|prompt| generate(prompt, sampled.clone())).collect();
    let with =
        |seed, batch_size| responses(&answer(&lm, BackendSettings { seed, batch_size, ..settings() }, &requests));
    let one = with(1, None);
    assert_eq!(one, with(1, Some(1)));
    assert_ne!(one, with(2, None));
    assert!(one[0] != one[2] && one[2] != one[3] && one[0] != one[3]);
    // The first sample does not depend on the other requests.
    assert_eq!(responses(&answer(&lm, BackendSettings { seed: 1, ..settings() }, &requests[..1])), one[..1]);
}

#[test]
fn stop_sequences_apply_after_the_thinking() {
    let tokenizer = Tokenizer::from_directory(crate::support::root().join("recipes/quickstart/tokenizer")).unwrap();
    let thought = tokenizer.encode("I stop here. END  The answer. stop it", SpecialTokens::Exclude).unwrap();
    let check = |end: Option<ThinkEnd>, want: &str, n_stops: usize| {
        let stop = StopCriteria::new(&["stop".to_owned()], end, &tokenizer);
        let ended = (1..=thought.len()).find(|n| stop.ends(&thought[..*n], &tokenizer).unwrap()).unwrap();
        assert_eq!(stop.text(&thought[..ended], &tokenizer).unwrap(), want);
        let seen = tokenizer.decode(&thought[..ended], SpecialTokens::Exclude).unwrap();
        assert_eq!(seen.matches("stop").count(), n_stops, "{seen}");
    };
    check(None, "I ", 1);
    check(Some(ThinkEnd::read("END")), "The answer. ", 2);
    // The last token of "END" as an id.
    let is_behind = |n: &usize| tokenizer.decode(&thought[..*n], SpecialTokens::Exclude).unwrap().contains("END");
    let last = (1..=thought.len()).find(is_behind).unwrap() - 1;
    assert!(!thought[last + 1..].contains(&thought[last]));
    check(Some(ThinkEnd::read(&thought[last].to_string())), "The answer. ", 2);
    // Thinking without an end token is part of the response, as in lm-eval.
    let stop = StopCriteria::new(&["stop".to_owned()], Some(ThinkEnd::read("NEVER")), &tokenizer);
    assert!(!stop.ends(&thought, &tokenizer).unwrap());
    assert_eq!(stop.text(&thought, &tokenizer).unwrap(), "I ");
}

#[test]
fn unsupported_requests_are_refused_before_any_computation() {
    let (_folder, lm) = model(1);
    let refused = |request: Request| {
        let error = EngineBackend::new(&lm, settings(), alone()).unwrap().answer(&[request]).unwrap_err();
        format!("{error:#}")
    };
    assert!(refused(scored("a", "")).contains("it has no tokens of its own"));
    let long = "wolf ".repeat(200);
    assert!(refused(scored("a", &long)).contains("the model's context has 64; it begins with \"wolf wolf"));
    assert!(
        refused(generate("a", greedy(&[], 64))).contains("failed to generate 64 tokens: the model's context has 64")
    );
}
