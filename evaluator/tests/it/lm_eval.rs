//! Comparison with lm-evaluation-harness 0.4.13: prompts, records, scores, standard errors, groups and tables.
//! `tests/reference/lm_eval_tasks.py` recorded the harness's results. Both sides compute responses from a hash of the
//! request.

use std::fs;
use std::path::{Path, PathBuf};

use candlewick_inference::request::{Request, Response};
use candlewick_text::hub::{Hub, HubSettings};
use candlewick_text::template::{AddGenerationPrompt, TemplateError};
use evaluator::results::{TaskRun, assemble_results, groups_table, results_table};
use evaluator::task::{ChatFormatter, DataOverrides, Instance, PromptOptions, Task, TaskConfig, TaskRegistry};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

/// Relative tolerance: only the order of summation differs.
const TOLERANCE: f64 = 1e-12;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lm_eval")
}

/// Chat template of `lm_eval_tasks.py`.
struct Tags;

impl ChatFormatter for Tags {
    fn apply_chat_template(
        &self,
        turns: &[(&str, &str)],
        ending: AddGenerationPrompt,
    ) -> Result<String, TemplateError> {
        let turns: String = turns.iter().map(|(role, content)| format!("<{role}>{content}</{role}>")).collect();
        Ok(turns + if ending == AddGenerationPrompt::Yes { "<assistant>" } else { "" })
    }
}

fn digest(parts: &[&str]) -> u32 {
    let hash = Sha256::digest(parts.join("\0"));
    u32::from_be_bytes([hash[0], hash[1], hash[2], hash[3]])
}

/// Returns minus an eighth of a number, and 0 instead of -0.
fn minus(number: u32) -> f64 {
    0.0 - f64::from(number) / 8.0
}

fn canned(instance: &Instance, answers: &[String]) -> Response {
    match &instance.request {
        Request::Loglikelihood { context, continuation } => {
            let number = digest(&[context, continuation]);
            Response::Loglikelihood { logprob: minus(number % 40), is_greedy: number.is_multiple_of(3) }
        }
        Request::LoglikelihoodRolling { text } => Response::LoglikelihoodRolling(minus(digest(&[text]) % 1000)),
        Request::GenerateUntil { context, .. } => {
            let number = digest(&[context, &instance.repeat.to_string()]) as usize;
            Response::Text(answers[number % answers.len()].clone())
        }
    }
}

/// Reads the fixtures' task files, with the path of the data filled in.
fn task_files() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixtures().join("tasks")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap().replace("DATA/", &format!("{}/data/", fixtures().display()));
        fs::write(folder.path().join(path.file_name().unwrap()), text).unwrap();
    }
    folder
}

fn data_overrides(case: &Json, tasks: &[TaskConfig]) -> DataOverrides {
    let folder = |task: &str| {
        let own = case["folders"].get(task).unwrap_or(&case["data"]);
        fixtures().join("data").join(own.as_str().unwrap())
    };
    let files = case.get("files").and_then(Json::as_object);
    let words: Vec<String> =
        files.into_iter().flatten().map(|(task, _)| format!("{task}={}", folder(task).display())).collect();
    DataOverrides::read("--data", &words, tasks).unwrap()
}

fn options(case: &Json) -> PromptOptions<'static> {
    let text = |key: &str| case.get(key).and_then(Json::as_str).map(str::to_owned);
    PromptOptions {
        num_fewshot: case.get("num_fewshot").and_then(Json::as_u64).map(|n| n as usize),
        fewshot_seed: 1234,
        compat: true,
        chat: case.get("chat").map(|_| &Tags as &dyn ChatFormatter),
        system_instruction: text("system_instruction"),
        fewshot_as_multiturn: case.get("fewshot_as_multiturn").is_some(),
        limit: case.get("limit").and_then(Json::as_f64),
        ..PromptOptions::default()
    }
}

#[track_caller]
fn check(name: &str) {
    let expected = fs::read_to_string(fixtures().join(format!("expected/{name}.json"))).unwrap();
    let expected: Json = serde_json::from_str(&expected).unwrap();
    let case = &expected["case"];
    let files = task_files();
    let registry = TaskRegistry::load(&[files.path().to_owned()]).unwrap();
    let names: Vec<&str> = case["tasks"].as_array().unwrap().iter().map(|task| task.as_str().unwrap()).collect();
    let selection = registry.select(&names.join(",")).unwrap();
    let (options, paths) = (options(case), data_overrides(case, &selection.tasks));
    let hub = Hub::new(HubSettings { offline: true, ..HubSettings::new(files.path()) }).unwrap();
    let answers: Vec<String> = serde_json::from_value(case.get("answers").cloned().unwrap_or(json!(["x"]))).unwrap();
    let mut runs = Vec::new();
    for config in selection.tasks {
        let task = Task::open(&hub, config, &paths, &options).unwrap();
        let instances = task.instances(&options).unwrap();
        let responses: Vec<Response> = instances.iter().map(|instance| canned(instance, &answers)).collect();
        let n_resamples = case["bootstrap_iters"].as_u64().unwrap() as usize;
        let scores = task.score(&options, &instances, &responses, n_resamples).unwrap();
        let samples: Vec<Json> = scores.samples.iter().map(|sample| serde_json::to_value(sample).unwrap()).collect();
        let at = format!("{name}: samples.{}", task.config().task);
        same(&at, &Json::Array(samples), &expected["samples"][&task.config().task]);
        let (num_fewshot, generation_kwargs) = (task.num_fewshot(&options), task.generation_kwargs(&options));
        runs.push(TaskRun { num_fewshot, generation_kwargs, config: task.config().clone(), scores });
    }
    let results = assemble_results(&runs, &selection.groups);
    let found = serde_json::to_value(&results).unwrap();
    let keys =
        ["results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples", "task_hashes"];
    for key in keys.into_iter().filter(|key| expected.get(key).is_some()) {
        same(&format!("{name}: {key}"), &found[key], &expected[key]);
    }
    for (task, config) in expected.get("configs").and_then(Json::as_object).into_iter().flatten() {
        let mut found = found["configs"][task].clone();
        let source = found["metadata"]["config_source"].take();
        assert!(source.as_str().is_some_and(|path| path.ends_with(".yaml")), "{name}: {task}: {source}");
        found["metadata"]["config_source"] = json!("FILE");
        let found = found.to_string().replace(&fixtures().display().to_string(), "FIXTURES");
        same(&format!("{name}: configs.{task}"), &serde_json::from_str(&found).unwrap(), config);
    }
    let mut tables = results_table(&results);
    if !results.groups.is_empty() {
        tables += &format!("\n{}", groups_table(&results));
    }
    assert_eq!(tables.trim_end(), expected["table"].as_str().unwrap().trim_end(), "{name}");
}

/// Compares values, but ignores keys that are additions to lm-eval's.
#[track_caller]
fn same(at: &str, found: &Json, wanted: &Json) {
    match (found, wanted) {
        (Json::Object(found), Json::Object(wanted)) => {
            for (key, value) in wanted {
                let other = found.get(key).unwrap_or_else(|| panic!("{at} lacks {key}; it has {found:?}"));
                same(&format!("{at}.{key}"), other, value);
            }
            let more = found
                .keys()
                .filter(|key| !wanted.contains_key(*key) && !["skipped", "empty", "no_target"].contains(&key.as_str()));
            assert_eq!(more.collect::<Vec<_>>(), Vec::<&String>::new(), "{at} has more");
        }
        (Json::Array(found), Json::Array(wanted)) => {
            assert_eq!(found.len(), wanted.len(), "{at}: {found:?}, wanted {wanted:?}");
            for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
                same(&format!("{at}.{i}"), found, wanted);
            }
        }
        (Json::Number(found), Json::Number(wanted)) => {
            let (found, wanted) = (found.as_f64().unwrap(), wanted.as_f64().unwrap());
            let scale = found.abs().max(wanted.abs()).max(1e-300);
            assert!(((found - wanted) / scale).abs() <= TOLERANCE, "{at} is {found:?}, wanted {wanted:?}");
        }
        (found, wanted) => assert_eq!(found, wanted, "{at}"),
    }
}

macro_rules! cases {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                check(stringify!($name));
            }
        )*

        /// Every case of the fixtures must run.
        #[test]
        fn every_expected_file_is_a_case() {
            let mut files: Vec<String> = fs::read_dir(fixtures().join("expected"))
                .unwrap()
                .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
                .collect();
            files.sort();
            let mut names = vec![$(stringify!($name)),*];
            names.sort_unstable();
            assert_eq!(files, names);
        }
    };
}

cases! {
    choices zero_shot inputs generate letters listed groups chat chat_turns described
    arc boolq gsm8k hellaswag lambada openbookqa piqa sciq truthfulqa wikitext winogrande
    mmlu mmlu_pro math gpqa gpqa_cot bbh ifeval leaderboard
}
