//! Notes and warnings of `evaluator run`, and operations that need confirmation.

use std::fs;
use std::path::Path;
use std::process::Command;

use candlewick_inference::request::{Request, Response};
use candlewick_text::hub::{Hub, HubSettings};
use evaluator::task::{
    DataOverrides, DocCounts, Instance, PromptOptions, Task, TaskError, TaskRegistry, UnsafeCodePolicy,
};
use serde_json::json;

/// Opens a built-in task with the given rows as its data.
fn open(folder: &Path, name: &str, rows: &[serde_json::Value], options: &PromptOptions) -> Task {
    let lines: Vec<String> = rows.iter().map(ToString::to_string).collect();
    let path = folder.join("rows");
    fs::create_dir_all(&path).unwrap();
    for split in ["train", "validation", "test"] {
        fs::write(path.join(format!("{split}.jsonl")), lines.join("\n")).unwrap();
    }
    let config = TaskRegistry::load(&[]).unwrap().select(name).unwrap().tasks.remove(0);
    let hub = Hub::new(HubSettings { offline: true, ..HubSettings::new(folder) }).unwrap();
    let paths =
        DataOverrides::read("--data", &[format!("{name}={}", path.display())], std::slice::from_ref(&config)).unwrap();
    Task::open(&hub, config, &paths, options).unwrap()
}

fn answered(instances: &[Instance], text: &str) -> Vec<Response> {
    let response = |instance: &Instance| match instance.request {
        Request::Loglikelihood { .. } => Response::Loglikelihood { logprob: -1.0, is_greedy: false },
        Request::LoglikelihoodRolling { .. } => Response::LoglikelihoodRolling(-8.0),
        Request::GenerateUntil { .. } => Response::Text(text.to_owned()),
    };
    instances.iter().map(response).collect()
}

#[test]
fn programs_run_only_when_that_is_allowed() {
    if Command::new("python3").arg("-V").output().is_err() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let row =
        json!({"prompt": "def double(x):\n", "entry_point": "double", "test": "def check(f):\n    assert f(2) == 4\n"});
    let options = PromptOptions::default();
    let task = open(folder.path(), "humaneval", &[row.clone(), row], &options);
    let instances = task.instances(&options).unwrap();
    assert!(
        matches!(&instances[0].request, Request::GenerateUntil { settings, .. } if settings.max_gen_toks == Some(1024))
    );
    let mut answers = answered(&instances, "    return x + x\n");
    let refused = task.score(&options, &instances, &answers, 0).unwrap_err();
    assert!(matches!(refused, TaskError::Refused { .. }), "{refused}");
    assert!(refused.to_string().contains("--confirm-run-unsafe-code"), "{refused}");
    let options = PromptOptions { unsafe_code: UnsafeCodePolicy::RunConfined, ..options };
    answers[1] = Response::Text("    return x\n".into());
    let scores = task.score(&options, &instances, &answers, 0).unwrap();
    assert_eq!((scores.metrics[0].metric.as_str(), scores.metrics[0].value), ("pass@1", 0.5));
    assert_eq!(scores.samples[0].filter, "create_test");
}

#[test]
fn documents_with_nothing_to_score_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [json!({"page": "a b c"}), json!({"page": ""}), json!({"page": "d"})];
    for (compat, n, want) in [
        (false, 2, DocCounts { skipped: 1, ..DocCounts::default() }),
        (true, 3, DocCounts { empty: 1, ..DocCounts::default() }),
    ] {
        let options = PromptOptions { compat, ..PromptOptions::default() };
        let task = open(folder.path(), "wikitext", &rows, &options);
        let instances = task.instances(&options).unwrap();
        let scores = task.score(&options, &instances, &answered(&instances, ""), 100).unwrap();
        assert_eq!((scores.sample_len, scores.original, scores.counts), (n, 3, want));
    }
}

#[test]
fn a_choice_that_is_not_there_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let row = |label: i64| json!({"goal": "g", "sol1": "a", "sol2": "b", "label": label});
    let options = PromptOptions::default();
    let task = open(folder.path(), "piqa", &[row(0), row(7)], &options);
    let instances = task.instances(&options).unwrap();
    let scores = task.score(&options, &instances, &answered(&instances, ""), 0).unwrap();
    assert_eq!((scores.metrics[0].value, scores.counts.no_target), (0.5, 1));
}

#[test]
fn a_subset_of_tasks_sends_the_requests_of_the_whole_run() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<_> =
        (0..9).map(|i| json!({"goal": format!("g{i}"), "sol1": "a", "sol2": "b", "label": i % 2})).collect();
    let whole = PromptOptions { num_fewshot: Some(3), fewshot_seed: 1234, ..PromptOptions::default() };
    let task = open(folder.path(), "piqa", &rows, &whole);
    let all = task.instances(&whole).unwrap();
    let part = PromptOptions { samples: Some(vec![7, 4]), ..whole.clone() };
    let some = task.instances(&part).unwrap();
    let of = |doc_id| all.iter().filter(move |instance| instance.doc_id == doc_id);
    assert_eq!(some.iter().collect::<Vec<_>>(), of(4).chain(of(7)).collect::<Vec<_>>());
    let share = PromptOptions { limit: Some(0.2), ..whole };
    assert_eq!(task.doc_ids(&share).unwrap(), [0, 1]);
}

#[test]
fn answers_alone_are_not_scored() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [json!({"question": "1 + 1?", "answer": "#### 2"})];
    let options = PromptOptions { num_fewshot: Some(0), ..PromptOptions::default() };
    let task = open(folder.path(), "gsm8k", &rows, &options).predict_only();
    let instances = task.instances(&options).unwrap();
    let scores = task.score(&options, &instances, &answered(&instances, "#### 2"), 100).unwrap();
    assert_eq!((scores.metrics[0].metric.as_str(), scores.metrics[0].value), ("bypass", 999.0));
}

#[test]
fn groups_hold_what_lm_evals_hold() {
    let select = |names: &str| TaskRegistry::load(&[]).unwrap().select(names).unwrap();
    let mmlu = select("mmlu");
    assert_eq!(mmlu.tasks.len(), 57);
    let names: Vec<&str> = mmlu.groups.iter().map(|group| group.name.as_str()).collect();
    assert_eq!(names, ["mmlu", "mmlu_stem", "mmlu_other", "mmlu_social_sciences", "mmlu_humanities"]);
    let sizes: Vec<usize> = mmlu.groups.iter().map(|group| group.tasks.len()).collect();
    assert_eq!(sizes, [57, 19, 13, 12, 13]);
    assert_eq!(select("bbh_zeroshot").tasks.len(), 27);
    assert_eq!(select("mmlu_pro").tasks.len(), 14);
    assert_eq!(select("hendrycks_math").tasks.len(), 7);
    assert_eq!(select("gpqa").tasks.len(), 9);
    assert_eq!(select("arc_*,boolq").tasks.len(), 3);
}
