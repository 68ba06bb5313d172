//! Responses equal those of single, unbatched requests, for any batching, prefix sharing, number of ranks and
//! resumption.

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

/// Writes scales for all linear layers but the second layer's MLP, as a run stores them.
fn write_fp8_scales(folder: &Path, lm: &Lm, input: f32) {
    let linears = lm.engine().model().layers().flat_map(LayerSpec::linears);
    let modules = linears.map(|linear| linear.module.clone()).filter(|module| !module.contains("layers.1.mlp"));
    let scales = modules.enumerate().map(|(i, module)| {
        (module, vec![Fp8LinearScales { input: input * (1.0 + i as f32 / 7.0), weight: 200.0 + 3.0 * i as f32 }])
    });
    fs::write(folder.join(FP8_SCALES), fp8_scales_to_json(&scales.collect(), lm.engine().model().config())).unwrap();
}

/// Amaxes of a batch would change the bits of a row. Scales that are fixed do not.
#[test]
fn answers_in_fp8_have_the_same_bits_in_every_batch_and_on_any_number_of_ranks() {
    let (folder, of_weights) = model(1);
    let model = folder.path().join("model");
    let requests = requests();
    for dtype in [DType::F32, DType::BF16] {
        write_fp8_scales(&model, &of_weights, 50.0);
        let load = || Lm::load(&model, None, dtype, Device::Cpu).unwrap().with_fp8_scales().unwrap();
        let want = answer(&load(), settings(), &requests);
        let dense = Lm::load(&model, None, dtype, Device::Cpu).unwrap();
        assert_ne!(answer(&dense, settings(), &requests), want, "FP8 has no effect");
        for n in [1, 4, 100] {
            let settings = BackendSettings { batch_size: Some(n), ..settings() };
            assert_eq!(answer(&load(), settings, &requests), want, "batches of {n} {dtype:?}");
        }
        let on_rank = |world: &World| {
            EngineBackend::new(&load(), settings(), InferenceGroup::replicated(world.group()))?.answer(&requests)
        };
        for answers in threads::run(2, Options::default(), on_rank).unwrap() {
            assert_eq!(answers, want, "2 ranks {dtype:?}");
        }
        // At a scale this large all inputs saturate.
        write_fp8_scales(&model, &of_weights, 1e6);
        assert_ne!(answer(&load(), settings(), &requests), want, "the scales have no effect");
    }
}

#[test]
fn fp8_needs_the_scales_of_the_models_layers() {
    let (folder, _lm) = model(1);
    let model = folder.path().join("model");
    let refused = || format!("{:#}", lm(&model).with_fp8_scales().err().unwrap());
    let without = refused();
    assert!(without.contains("has no fp8_scales.json") && without.contains("precision.recipe: delayed"), "{without}");
    let write = |module: &str| {
        let scales = [(module.to_owned(), vec![Fp8LinearScales { input: 1.0, weight: 1.0 }])].into();
        let entries = fp8_scales_to_json(&scales, lm(&model).engine().model().config());
        fs::write(model.join(FP8_SCALES), &entries).unwrap();
        entries
    };
    // Half of the entries, as of another program.
    let entries: serde_json::Map<_, _> = serde_json::from_str(&write("model.layers.1.mlp.up_proj")).unwrap();
    let half: serde_json::Map<_, _> = entries.into_iter().filter(|(module, _)| module.contains("layers.1")).collect();
    fs::write(model.join(FP8_SCALES), serde_json::to_string(&half).unwrap()).unwrap();
    let partial = refused();
    let missing = "it has no entry for model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj,";
    assert!(partial.contains(missing) && partial.contains("and 4 others; take the file of this"), "{partial}");
    assert_eq!(classify(&lm(&model).with_fp8_scales().err().unwrap()), ExitCode::Checkpoint);
    write("model.layers.7.mlp.up_proj");
    let other = refused();
    assert!(other.contains("no linear layer or experts model.layers.7.mlp.up_proj"), "{other}");
    assert!(other.contains("model/fp8_scales.json") && other.contains("export the run again"), "{other}");
    assert_eq!(classify(&lm(&model).with_fp8_scales().err().unwrap()), ExitCode::Checkpoint);
}

/// Loads a model with experts on the ranks of a world.
fn experts(folder: &Path, parallel_config: ParallelConfig, world: &World) -> anyhow::Result<(Lm, InferenceGroup)> {
    let groups = parallel_config.groups(&*world.group())?;
    let lm = Lm::load_sharded(folder, None, DType::F32, Device::Cpu, (parallel_config, &groups))?;
    Ok((lm, InferenceGroup::from_groups(world.group(), &groups, parallel_config.zero3)))
}

/// Some ranks get no request, and compute fillers meanwhile. Tensor parallelism rounds differently.
#[test]
fn ranks_that_divide_experts_give_the_bits_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::support::export_experts(folder.path(), 1);
    let want = answer(&lm(&model), settings(), &requests());
    let (two, single) = (requests().len() / 2, ParallelConfig::SINGLE_RANK);
    for (n_ranks, parallel_config) in [
        (2, ParallelConfig { expert_parallel: 2, ..single }),
        (4, ParallelConfig { expert_parallel: 2, ..single }),
        (4, ParallelConfig { expert_parallel: 2, pipeline_parallel: 2, ..single }),
        (4, ParallelConfig { expert_parallel: 2, zero3: true, ..single }),
    ] {
        // Few requests leave some ranks without one.
        for n_requests in [1, two, two * 2] {
            let on_rank = |world: &World| {
                let (lm, inference_group) = experts(&model, parallel_config, world)?;
                EngineBackend::new(&lm, settings(), inference_group)?.answer(&requests()[..n_requests])
            };
            for answers in threads::run(n_ranks, Options::default(), on_rank).unwrap() {
                assert_eq!(answers, want[..n_requests], "{n_ranks} {parallel_config:?} {n_requests}");
            }
        }
    }
}

/// Writes scales of all experts' matrices, different for each, and of no linear layer.
fn write_scales_of_experts(folder: &Path, lm: &Lm, input: f32) {
    let scales = lm.engine().model().layers().flat_map(LayerSpec::expert_matrices).map(|matrix| {
        let of_expert = |i| Fp8LinearScales { input: input * (1.0 + i as f32 / 7.0), weight: 200.0 + 3.0 * i as f32 };
        (matrix.name.clone(), (0..matrix.n_experts).map(of_expert).collect())
    });
    fs::write(folder.join(FP8_SCALES), fp8_scales_to_json(&scales.collect(), lm.engine().model().config())).unwrap();
}

#[test]
fn experts_in_fp8_have_the_same_bits_in_every_batch_and_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::support::export_experts(folder.path(), 1);
    let requests = requests();
    let dense = answer(&lm(&model), settings(), &requests);
    write_scales_of_experts(&model, &lm(&model), 50.0);
    let load = || lm(&model).with_fp8_scales().unwrap();
    let want = answer(&load(), settings(), &requests);
    assert_ne!(want, dense, "FP8 has no effect");
    for n in [1, 4, 100] {
        let settings = BackendSettings { batch_size: Some(n), ..settings() };
        assert_eq!(answer(&load(), settings, &requests), want, "batches of {n}");
    }
    let parallel_config = ParallelConfig { expert_parallel: 2, ..ParallelConfig::SINGLE_RANK };
    let on_rank = |world: &World| {
        let (lm, inference_group) = experts(&model, parallel_config, world)?;
        EngineBackend::new(&lm.with_fp8_scales()?, settings(), inference_group)?.answer(&requests)
    };
    for answers in threads::run(2, Options::default(), on_rank).unwrap() {
        assert_eq!(answers, want, "experts on two ranks");
    }
    write_scales_of_experts(&model, &lm(&model), 1e6);
    assert_ne!(answer(&load(), settings(), &requests), want, "the scales have no effect");
    let scales = fs::read_to_string(model.join(FP8_SCALES)).unwrap();
    let mut scales: serde_json::Value = serde_json::from_str(&scales).unwrap();
    let (_, first) = scales.as_object_mut().unwrap().iter_mut().next().unwrap();
    for key in ["input", "weight"] {
        first[key].as_array_mut().unwrap().pop();
    }
    fs::write(model.join(FP8_SCALES), scales.to_string()).unwrap();
    let refused = format!("{:#}", lm(&model).with_fp8_scales().err().unwrap());
    assert!(refused.contains("there are FP8 scales of 3 matrices, and the model has 4"), "{refused}");
}

#[test]
fn a_stop_on_one_rank_ends_all_ranks_that_divide_experts() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::support::export_experts(folder.path(), 1);
    let parallel_config = ParallelConfig { expert_parallel: 2, ..ParallelConfig::SINGLE_RANK };
    // The other ranks compute or are idle.
    for n_requests in [2, requests().len()] {
        let on_rank = |world: &World| {
            let (lm, inference_group) = experts(&model, parallel_config, world)?;
            let n_asked = Cell::new(0);
            let asked = || {
                n_asked.set(n_asked.get() + 1);
                world.rank() == 1 && n_asked.get() == 2
            };
            let settings = BackendSettings { batch_size: Some(1), ..settings() };
            let answered =
                EngineBackend::new(&lm, settings, inference_group)?.with_stop(asked).answer(&requests()[..n_requests]);
            Ok::<_, anyhow::Error>(answered.unwrap_err().is::<RequestsInterrupted>())
        };
        assert_eq!(threads::run(4, Options::default(), on_rank).unwrap(), [true; 4]);
    }
}

/// Returns the responses of three ranks. The second rank sleeps for this time before each batch.
fn with_a_slow_rank(
    pause: Duration,
    batch_size: Option<usize>,
    inference_group: impl Fn(&World) -> InferenceGroup + Sync,
) -> Result<Vec<usize>, candlewick_comm::Error> {
    let (folder, _lm) = model(1);
    let (requests, options) = (requests(), Options { timeout: TIMEOUT, ..Options::default() });
    let on_rank = |world: &World| {
        let lm = self::lm(&folder.path().join("model"));
        let slow = |_: RequestProgress| {
            if world.rank() == 1 {
                let _ = world.await_failure(pause);
            }
        };
        let inference_group = inference_group(world).with_keep_alive(world.keep_alive());
        let settings = BackendSettings { batch_size, ..settings() };
        let mut answers = EngineBackend::new(&lm, settings, inference_group)?.with_progress(slow);
        Ok::<_, anyhow::Error>(answers.answer(&requests)?.len())
    };
    threads::run(3, options, on_rank)
}

const TIMEOUT: Duration = Duration::from_secs(1);

#[test]
fn a_rank_with_a_copy_of_its_own_is_waited_for_as_long_as_it_takes() {
    let answered = with_a_slow_rank(2 * TIMEOUT, Some(100), |world| InferenceGroup::replicated(world.group())).unwrap();
    assert_eq!(answered, [requests().len(); 3]);
}

/// Ranks wait for each other during computation, so the watchdog must notice a step that never ends.
#[test]
fn ranks_that_share_a_model_copy_are_waited_for_at_each_step() {
    let together =
        |world: &World| InferenceGroup { replica: world.group(), ..InferenceGroup::replicated(world.group()) };
    let answered = with_a_slow_rank(TIMEOUT / 3, Some(2), together).unwrap();
    assert_eq!(answered, [requests().len(); 3]);
    assert!(with_a_slow_rank(3 * TIMEOUT, Some(2), together).is_err());
}

/// This holds for ranks with replicas, and for ranks that share one model.
#[test]
fn a_stop_on_one_rank_ends_all_of_them() {
    let (folder, _lm) = model(1);
    let requests = requests();
    let inference_groups: [fn(&World) -> InferenceGroup; 2] = [
        |world| InferenceGroup::replicated(world.group()),
        |world| {
            let copy = world.group();
            InferenceGroup {
                world: world.group(),
                data_parallel: Arc::new(Solo),
                reports: copy.rank() == 0,
                replica: copy,
                lockstep: None,
                keep_alive: None,
            }
        },
    ];
    for inference_group in inference_groups {
        let on_rank = |world: &World| {
            let lm = self::lm(&folder.path().join("model"));
            let n_asked = Cell::new(0);
            let asked = || {
                n_asked.set(n_asked.get() + 1);
                world.rank() == 1 && n_asked.get() == 3
            };
            let settings = BackendSettings { batch_size: Some(1), ..settings() };
            let answered =
                EngineBackend::new(&lm, settings, inference_group(world))?.with_stop(asked).answer(&requests);
            Ok::<_, anyhow::Error>((answered.unwrap_err().is::<RequestsInterrupted>(), n_asked.get()))
        };
        let ends = threads::run(2, Options::default(), on_rank).unwrap();
        assert!(ends.iter().all(|(is_stopped, _)| *is_stopped), "{ends:?}");
        assert_eq!(ends[1].1, 3, "nothing is computed after a stop");
    }
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

fn with_log(folder: &Path) -> BackendSettings {
    BackendSettings { cache_folder: Some(folder.to_owned()), ..settings() }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Returns the number of complete lines in all cache files.
fn n_lines(folder: &Path) -> usize {
    let count = |file: &PathBuf| fs::read(file).unwrap().iter().filter(|byte| **byte == b'\n').count();
    files(folder).iter().map(count).sum()
}

#[test]
fn an_interrupted_evaluation_resumes_with_another_number_of_ranks() {
    let (folder, lm) = model(1);
    let requests = requests();
    let want = answer(&lm, settings(), &requests);
    let logs = folder.path().join("logs");
    let on_ranks = |n| {
        let on_rank = |world: &World| {
            let lm = self::lm(&folder.path().join("model"));
            EngineBackend::new(&lm, with_log(&logs), InferenceGroup::replicated(world.group()))?.answer(&requests)
        };
        for answers in threads::run(n, Options::default(), on_rank).unwrap() {
            assert_eq!(answers, want, "{n}");
        }
    };
    on_ranks(3);
    let n_all = n_lines(&logs);
    assert_eq!(files(&logs).len(), 3);
    // Each file is truncated, one of them inside a line.
    for (i, file) in files(&logs).iter().enumerate() {
        let bytes = fs::read(file).unwrap();
        fs::write(file, &bytes[..bytes.len() - 40 * (i + 1)]).unwrap();
    }
    assert!((1..n_all).contains(&n_lines(&logs)), "{} of {n_all}", n_lines(&logs));
    on_ranks(2);
    // Only the missing requests are computed again.
    assert_eq!(n_lines(&logs), n_all);
    on_ranks(1);
    assert_eq!(n_lines(&logs), n_all);
}

#[test]
fn answers_are_read_for_the_same_model_and_for_no_other() {
    let (folder, lm) = model(1);
    let logs = folder.path().join("logs");
    let requests = [scored("Say wolf 4 times.", " wolf")];
    let first = answer(&lm, with_log(&logs), &requests);
    // A response that no model gives shows whether the cache is read.
    let log = &files(&logs)[0];
    let Response::Loglikelihood { logprob, .. } = first[0].response else { panic!("{first:?}") };
    let marked = fs::read_to_string(log).unwrap().replace(&logprob.to_string(), "-12345.5");
    fs::write(log, marked).unwrap();
    let marked = Response::Loglikelihood { logprob: -12345.5, is_greedy: false };
    assert_eq!(answer(&lm, with_log(&logs), &requests)[0].response, marked);
    // Other weights, another context, another dtype, another attention kernel, another tokenizer.
    let (_other, of_another) = model(2);
    assert_ne!(answer(&of_another, with_log(&logs), &requests)[0].response, marked);
    let shorter = BackendSettings { max_length: Some(32), ..with_log(&logs) };
    assert_eq!(answer(&lm, shorter, &requests), first);
    let model = folder.path().join("model");
    let halved = Lm::load(&model, None, DType::BF16, Device::Cpu).unwrap();
    assert_ne!(answer(&halved, with_log(&logs), &requests)[0].response, marked);
    let attention = AttentionChoice { implementation: AttentionImpl::Reference, deterministic: false };
    let other = self::lm(&model).with_attention(attention);
    assert_ne!(answer(&other, with_log(&logs), &requests)[0].response, marked);
    let config = model.join("tokenizer_config.json");
    fs::write(&config, fs::read_to_string(&config).unwrap() + "\n").unwrap();
    assert_eq!(answer(&self::lm(&model), with_log(&logs), &requests), first);
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
