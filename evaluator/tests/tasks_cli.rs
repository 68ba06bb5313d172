//! The commands that list, show and compare tasks, through the program.

#![allow(clippy::unwrap_used, missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value as Json, json};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lm_eval")
}

fn evaluator(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_evaluator")).args(args).env("HF_HUB_OFFLINE", "1").output().unwrap()
}

#[track_caller]
fn said(args: &[&str]) -> String {
    let output = evaluator(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn refused(args: &[&str], code: i32, words: &[&str]) {
    let output = evaluator(args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{error}");
    for word in words {
        assert!(error.contains(word), "{word:?} is not in {error}");
    }
}

/// A file of its own in a folder that lasts as long as the test.
fn file(folder: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    path.to_string_lossy().into_owned()
}

#[test]
fn built_in_tasks_groups_and_tags_are_listed() {
    let tasks: Vec<Json> = serde_json::from_str(&said(&["ls", "tasks", "--json"])).unwrap();
    let names: Vec<&str> = tasks.iter().map(|task| task["name"].as_str().unwrap()).collect();
    let wanted = [
        "arc_easy",
        "boolq",
        "gsm8k",
        "hellaswag",
        "humaneval",
        "ifeval",
        "lambada_openai",
        "openbookqa",
        "piqa",
        "truthfulqa_mc2",
        "wikitext",
        "winogrande",
        "gpqa_diamond_n_shot",
        "bbh_zeroshot_snarks",
    ];
    for name in wanted {
        assert!(names.contains(&name), "{name}");
    }
    assert_eq!(names.iter().filter(|name| name.starts_with("mmlu_") && !name.contains("_pro_")).count(), 57);
    assert!(said(&["ls", "groups"]).contains("mmlu_stem"));
    assert!(said(&["ls", "tags"]).contains("arc_challenge, arc_easy"));
}

#[test]
fn a_prompt_is_shown_as_it_is_asked() {
    let data = format!("gsm8k={}", fixtures().join("data/gsm8k").display());
    let text = said(&["show", "gsm8k", "--doc", "1", "--data", &data, "--num-fewshot", "1", "--compat", "lm-eval"]);
    assert!(text.starts_with("gsm8k: document 1 of 3, 1 examples\n"), "{text}");
    assert!(text.contains("Question: 600 twice?\nAnswer:\n"), "{text}");
    // The examples of lm-eval depend on the documents before: what its records say about document 1.
    let expected: Json =
        serde_json::from_str(&fs::read_to_string(fixtures().join("expected/gsm8k.json")).unwrap()).unwrap();
    let record = &expected["samples"]["gsm8k"][1]["arguments"]["gen_args_0"]["arg_0"];
    let shown = said(&["show", "gsm8k", "--doc", "1", "--data", &data, "--compat", "lm-eval", "--json"]);
    let shown: Json = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown[0]["requests"][0]["context"], *record);
}

#[test]
fn examples_depend_on_nothing_but_seed_task_and_document() {
    let data = format!("gsm8k={}", fixtures().join("data/gsm8k").display());
    let show = |more: &[&str]| said(&[&["show", "gsm8k", "--doc", "2", "--data", &data, "--json"], more].concat());
    assert_eq!(show(&[]), show(&["--fewshot-seed", "1234"]));
    assert_ne!(show(&[]), show(&["--fewshot-seed", "1"]));
}

#[test]
fn what_is_misspelt_is_answered_with_what_may_be_meant() {
    refused(&["show", "arc_eazy"], 2, &["the task \"arc_eazy\"", "did you mean `arc_easy`?"]);
    refused(&["show", "mmlu,mmlu_anatomy"], 2, &["mmlu_anatomy is in both mmlu and mmlu_anatomy"]);
    refused(&["show", "arc_easy", "--data", "arc_easy"], 2, &["write TASK=PATH"]);
    let data = format!("piqa={}", fixtures().join("data/piqa").display());
    refused(&["show", "piqa", "--data", &data, "--doc", "9"], 2, &["it has 3 documents"]);
}

#[test]
fn a_malformed_task_names_file_line_and_key() {
    let folder = tempfile::tempdir().unwrap();
    let check = |name: &str, text: &str, words: &[&str]| {
        let path = file(&folder, name, text);
        refused(&["show", &path], 2, &[&[name], words].concat());
    };
    let good = "task: x\ndataset_path: json\ntest_split: test\ndoc_to_text: a\ndoc_to_target: b\n";
    let with = |line: &str| format!("{good}{line}\n");
    check(
        "key.yaml",
        &with("doc_to_txt: c"),
        &["key.yaml:6:1", "unknown key `doc_to_txt`", "did you mean `doc_to_text`?"],
    );
    check("type.yaml", &with("output_type: multiple_choise"), &["type.yaml:6:14", "did you mean `multiple_choice`?"]);
    check("python.yaml", &with("process_docs: !function utils.mine"), &["python.yaml:6", "has no native twin"]);
    check("class.yaml", &with("class: Mine"), &["class.yaml:6", "Python classes"]);
    check("filter.yaml", &with("filter_list: [{name: a, filter: [{function: regexp}]}]"), &["did you mean `regex`?"]);
    check("metric.yaml", &with("metric_list: [{metric: exact_mach}]"), &["did you mean `exact_match`?"]);
    check("bleu.yaml", &with("metric_list: [{metric: acc}]"), &["acc cannot score output_type generate_until"]);
    check("gen.yaml", &with("generation_kwargs: {temprature: 1}"), &["gen.yaml:6", "did you mean `temperature`?"]);
    check("sampler.yaml", &with("fewshot_config: {sampler: frist_n}"), &["did you mean `first_n`?"]);
    check("yaml.yaml", "task: [x\n", &["yaml.yaml:"]);
    check("include.yaml", "include: nowhere.yaml\ntask: x\n", &["include.yaml:1:1", "nowhere.yaml"]);
    check(
        "split.yaml",
        "task: x\ndataset_path: json\ndoc_to_text: a\ndoc_to_target: b\n",
        &["test_split or validation_split"],
    );
}

#[test]
fn malformed_data_name_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let show = |name: &str, text: &str, words: &[&str]| {
        let path = file(&folder, name, text);
        refused(&["show", "piqa", "--data", &format!("piqa={path}")], 3, words);
    };
    show(
        "cut.jsonl",
        "{\"goal\": \"a\", \"sol1\": \"b\", \"sol2\": \"c\", \"label\": 0}\n{\"goal\": \n",
        &["cut.jsonl:2"],
    );
    show(
        "column.jsonl",
        "{\"gaol\": \"a\", \"sol1\": \"b\", \"sol2\": \"c\", \"label\": 0}\n",
        &["column.jsonl:1", "columns are gaol"],
    );
    show("empty.jsonl", "\n", &["empty.jsonl", "no rows"]);
}

/// Records of a run in which document `i` is right if `right[i]`.
fn records(folder: &Path, time: &str, right: &[bool]) {
    fs::create_dir_all(folder).unwrap();
    let line = |(i, right): (usize, &bool)| {
        let acc = f64::from(u8::from(*right));
        json!({"doc_id": i, "filter": "none", "metrics": ["acc"], "doc_hash": format!("h{i}"), "acc": acc}).to_string()
    };
    let lines: Vec<String> = right.iter().enumerate().map(line).collect();
    fs::write(folder.join(format!("samples_arc_easy_{time}.jsonl")), lines.join("\n")).unwrap();
}

#[test]
fn two_runs_are_compared_sample_by_sample() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a/model"), folder.path().join("b/model"));
    records(&a, "2026-01-01T00-00-00", &[false; 4]);
    records(&a, "2026-01-02T00-00-00", &[true, true, false, true, false, true, true, false]);
    records(&b, "2026-01-01T00-00-00", &[true, false, true, true, false, false, true, false]);
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    let (a, b) = (a.to_str().unwrap(), b.to_str().unwrap());
    let text = said(&["compare", a, b]);
    // The differences are 0, -1, 1, 0, 0, -1, 0, 0: mean -1/8, deviation 0.6409, error 0.2266.
    let want =
        "arc_easy acc,none: 0.6250 -> 0.5000  -0.1250 [-0.5691, +0.3191]  8 samples\n  gained 1: 2\n  lost 2: 1 5\n";
    assert_eq!(text, want);
    said(&["compare", a, b, "--fail-below", "acc=-0.2"]);
    refused(&["compare", a, b, "--fail-below", "acc=-0.01"], 1, &["changed by -0.1250"]);
    said(&["compare", a, b, "--fail-below", "arc_easy:acc=-0.5"]);
    refused(&["compare", a, b, "--fail-below", "f1=-0.01"], 2, &["no task of both runs has the metric"]);
    refused(&["compare", a, folder.path().to_str().unwrap(), "--fail-below", "acc"], 2, &["acc=-0.01"]);
}
