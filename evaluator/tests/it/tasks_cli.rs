//! Commands that list, show and compare tasks, through the program.

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

/// Writes a file in a temporary folder.
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
fn a_prompt_is_shown_as_it_is_sent_to_the_model() {
    let data = format!("gsm8k={}", fixtures().join("data/gsm8k").display());
    let text = said(&["show", "gsm8k", "--doc", "1", "--data", &data, "--num-fewshot", "1", "--compat", "lm-eval"]);
    let head = format!(
        "gsm8k: document 1 of 3, 1 example\ntest = {folder}/test.jsonl (3 documents), examples: train = {folder}/train.jsonl",
        folder = fixtures().join("data/gsm8k").display()
    );
    assert!(text.starts_with(&head), "{text}");
    assert!(text.contains("Question: 600 twice?\nAnswer:\n"), "{text}");
    // With `compat` the few-shot examples depend on earlier documents; the fixture records document 1.
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

/// Without another split, the few-shot examples come from the evaluated split.
#[test]
fn a_document_is_not_its_own_example() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<String> = (0..4).map(|i| json!({"q": format!("question {i}"), "a": "x"}).to_string()).collect();
    let data = file(&folder, "test.jsonl", &rows.join("\n"));
    let task = |splits: &str| {
        let head =
            format!("task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}\n");
        file(&folder, "own.yaml", &format!("{head}{splits}doc_to_text: q\ndoc_to_target: a\nnum_fewshot: 3\n"))
    };
    let shown = |task: &str, doc: usize, more: &[&str]| {
        let shown = said(&[&["show", task, "--doc", &doc.to_string(), "--json"], more].concat());
        let shown: Json = serde_json::from_str(&shown).unwrap();
        shown[0]["requests"][0]["context"].as_str().unwrap().to_owned()
    };
    let n_own = |task: &str, more: &[&str]| -> usize {
        (0..4).map(|doc| shown(task, doc, more).matches(&format!("question {doc}")).count() - 1).sum()
    };
    let fallback = task("test_split: test\n");
    assert_eq!(n_own(&fallback, &[]), 0);
    // lm-eval does not detect that both names are the same split.
    assert!(n_own(&fallback, &["--compat", "lm-eval"]) > 0);
    let named = task("test_split: test\nfewshot_split: test\n");
    assert_eq!(n_own(&named, &[]) + n_own(&named, &["--compat", "lm-eval"]), 0);
    // Two split names with the same file are one split.
    let other = task("test_split: test\ntraining_split: train\n");
    assert_eq!(n_own(&other, &[]), 0);
    // A single file has no other split for few-shot examples.
    let one_file = format!("own={data}");
    refused(&["show", &other, "--data", &one_file], 2, &["is one file", "come from \"train\"", "name a folder"]);
    said(&["show", &other, "--data", &one_file, "--num-fewshot", "0"]);
    assert_eq!(n_own(&task("test_split: test\n"), &["--data", &one_file]), 0);
}

/// Creates a folder with files of these names; each row contains its file's name.
fn folder_of(files: &[(&str, usize)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, n_rows) in files {
        let row = json!({"question": name, "choices": ["a", "b", "c", "d"], "answer": 1});
        fs::create_dir_all(folder.path().join(name).parent().unwrap()).unwrap();
        file(&folder, name, &format!("{row}\n").repeat(*n_rows));
    }
    folder
}

#[test]
fn one_file_named_after_the_task_is_its_split() {
    let folder = folder_of(&[("anatomy_test.jsonl", 3), ("virology_test.jsonl", 2), ("virology_dev.jsonl", 4)]);
    let path = folder.path().to_str().unwrap();
    let data = format!("mmlu_*={path}");
    let text = said(&["show", "mmlu_virology", "--data", &data, "--num-fewshot", "1"]);
    let head = format!(
        "mmlu_virology: document 0 of 2, 1 example\ntest = {path}/virology_test.jsonl (2 documents), examples: dev = \
         {path}/virology_dev.jsonl (4 documents)\n"
    );
    assert!(text.starts_with(&head), "{text}");
    let shown: Json = serde_json::from_str(&said(&["show", "mmlu_anatomy", "--data", &data, "--json"])).unwrap();
    assert_eq!(shown[0]["data"]["files"], json!([format!("{path}/anatomy_test.jsonl")]));
    assert_eq!(shown[0]["data"]["documents"], 3);
    refused(
        &["show", "mmlu_virology,mmlu_astronomy", "--data", &data],
        3,
        &[
            "task mmlu_astronomy",
            "2 files",
            "none is named mmlu_astronomy or astronomy",
            "Write --data mmlu_astronomy=FILE",
        ],
    );
    // A pattern selects all matching files.
    let all = format!("mmlu_virology={path}/*.jsonl");
    assert!(said(&["show", "mmlu_virology", "--data", &all]).contains("document 0 of 5,"));
}

#[test]
fn data_for_a_task_that_is_not_selected_are_refused() {
    refused(&["show", "arc_easy", "--data", "arc-easy=/nope"], 2, &["--data arc-easy", "did you mean `arc_easy`?"]);
    let good = folder_of(&[("test.jsonl", 1)]);
    let good = format!("arc_easy={}", good.path().display());
    let run = ["run", "--model", "/nope", "--tasks", "arc_easy", "--data", &good, "--data", "arc_easyy=/nope"];
    refused(&run, 2, &["--data arc_easyy: no selected task has that name; did you mean `arc_easy`?"]);
}

#[test]
fn a_limit_that_is_no_number_of_documents_is_refused() {
    for limit in ["-1", "nan", "0"] {
        refused(&["run", "--model", "x", "--tasks", "arc_easy", "--limit", limit], 2, &["greater than 0"]);
    }
}

#[test]
fn a_backend_of_lm_eval_is_refused_by_name() {
    let run = ["run", "--model", "vllm", "--model_args", "pretrained=/nope", "--tasks", "arc_easy"];
    refused(&run, 2, &["--model vllm", "only `hf` is supported", "remove --model vllm"]);
}

#[test]
fn misspelt_names_are_errors_with_suggestions() {
    refused(&["show", "arc_eazy"], 2, &["the task \"arc_eazy\"", "did you mean `arc_easy`?"]);
    refused(&["show", "mmlu,mmlu_anatomy"], 2, &["mmlu and mmlu_anatomy select the task mmlu_anatomy"]);
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
    check(
        "python.yaml",
        &with("process_docs: !function utils.mine"),
        &["python.yaml:6", "has no built-in implementation"],
    );
    check("class.yaml", &with("class: Mine"), &["class.yaml:6", "Python classes"]);
    check("filter.yaml", &with("filter_list: [{name: a, filter: [{function: regexp}]}]"), &["did you mean `regex`?"]);
    check("metric.yaml", &with("metric_list: [{metric: exact_mach}]"), &["did you mean `exact_match`?"]);
    check("bleu.yaml", &with("metric_list: [{metric: acc}]"), &["acc cannot score output_type generate_until"]);
    check("gen.yaml", &with("generation_kwargs: {temprature: 1}"), &["gen.yaml:6", "did you mean `temperature`?"]);
    check("sampler.yaml", &with("fewshot_config: {sampler: frist_n}"), &["did you mean `first_n`?"]);
    check("yaml.yaml", "task: [x\n", &["yaml.yaml:"]);
    check("twice.yaml", &with("doc_to_text: c"), &["twice.yaml:6:1", "`doc_to_text` is given twice, first in line 4"]);
    check(
        "name.yaml",
        &good.replace("task: x", &format!("task: {}", "x".repeat(300))),
        &["name.yaml:1:7", "300 bytes"],
    );
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

/// Writes the records of a run in which document `i` is correct if `right[i]`.
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
    // The differences are 0, -1, 1, 0, 0, -1, 0, 0: mean -1/8, deviation 0.6409, standard error 0.2266.
    let want =
        "arc_easy acc,none: 0.6250 -> 0.5000  -0.1250 [-0.5691, +0.3191]  8 samples\n  gained 1: 2\n  lost 2: 1 5\n";
    assert_eq!(text, want);
    said(&["compare", a, b, "--fail-below", "acc=-0.2"]);
    refused(&["compare", a, b, "--fail-below", "acc=-0.01"], 1, &["changed by -0.1250"]);
    said(&["compare", a, b, "--fail-below", "arc_easy:acc=-0.5"]);
    refused(&["compare", a, b, "--fail-below", "f1=-0.01"], 2, &["no task in both runs has the metric"]);
    refused(&["compare", a, folder.path().to_str().unwrap(), "--fail-below", "acc"], 2, &["acc=-0.01"]);
    refused(&["compare", a, b, "--fail-below", "acc=nan"], 2, &["acc=-0.01"]);
}

/// `--fail-below` must not pass on a subset of the samples.
#[test]
fn a_bound_fails_if_samples_are_in_one_run_only() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    records(&a, "2026", &[true; 8]);
    records(&b, "2026", &[true; 2]);
    let (a, b) = (a.to_str().unwrap(), b.to_str().unwrap());
    let bounded = ["compare", a, b, "--fail-below", "acc=-0.5"];
    refused(&bounded, 1, &["arc_easy: 6 samples of acc,none are in one run only, 2 in both", "--allow-unpaired"]);
    said(&[&bounded[..], &["--allow-unpaired"]].concat());
    said(&["compare", a, b]);
}

/// `--fail-below` must not pass on a subset of the tasks, filters and metrics either.
#[test]
fn a_bound_fails_if_a_task_a_filter_or_a_metric_is_in_one_run_only() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, scores: &[(&str, &str, &str)]| {
        let run = folder.path().join(name);
        fs::create_dir_all(&run).unwrap();
        for (task, ..) in scores {
            let record = |(_, filter, metric): &(&str, &str, &str)| {
                json!({"doc_id": 0, "doc_hash": "h", "filter": filter, "metrics": [metric], *metric: 1.0}).to_string()
            };
            let lines: Vec<String> = scores.iter().filter(|score| score.0 == *task).map(record).collect();
            fs::write(run.join(format!("samples_{task}_2026.jsonl")), lines.join("\n")).unwrap();
        }
        run.to_str().unwrap().to_owned()
    };
    let one = run("one", &[("x", "none", "acc")]);
    let both = [("x", "none", "acc"), ("y", "none", "f1")];
    for (name, scores, bound, want) in [
        (
            "task",
            &[("x", "none", "acc"), ("tz", "none", "acc")][..],
            "acc=-1",
            "tz: acc,none is not compared: only the",
        ),
        (
            "filter",
            &[("x", "none", "acc"), ("x", "strict", "acc")],
            "acc=-1",
            "x: acc,strict is not compared: only the",
        ),
        ("metric", &[("x", "none", "f1"), ("tz", "none", "acc")], "acc=-1", "x: acc,none is not compared: no document"),
        ("bounded", &[("x", "none", "acc"), ("tz", "none", "acc")], "tz:acc=-1", "tz: acc,none is not compared: only"),
    ] {
        let other = run(name, scores);
        for (a, b) in [(&one, &other), (&other, &one)] {
            refused(&["compare", a, b, "--fail-below", bound], 1, &[want, "--allow-unpaired"]);
            said(&["compare", a, b]);
        }
    }
    let (more, both) = (folder.path().join("task"), run("both", &both));
    said(&["compare", &one, more.to_str().unwrap(), "--fail-below", "acc=-1", "--allow-unpaired"]);
    let only_unpaired = ["compare", &one, more.to_str().unwrap(), "--fail-below", "tz:acc=-1", "--allow-unpaired"];
    refused(&only_unpaired, 2, &["no task in both runs has the metric"]);
    said(&["compare", &one, &both, "--fail-below", "acc=-1"]);
}

#[test]
fn a_bound_fails_if_its_metric_cannot_be_compared() {
    let folder = tempfile::tempdir().unwrap();
    let record = json!({"doc_id": 0, "doc_hash": "h", "metrics": ["acc", "odd"], "acc": 1, "odd": ["a", 1]});
    let run = file(&folder, "run.jsonl", &record.to_string());
    refused(
        &["compare", &run, &run, "--fail-below", "odd=-1"],
        1,
        &["odd,none is not compared: its values", "TASK:METRIC"],
    );
    said(&["compare", &run, &run, "--fail-below", "acc=-1"]);
}

/// A run compared with itself reproduces every metric of lm-eval's results file.
#[test]
fn metrics_are_put_together_as_the_results_have_them() {
    for (case, task) in [
        ("choices", "fx_choices"),
        ("wikitext", "wikitext"),
        ("lambada", "lambada_openai"),
        ("letters", "fx_texts"),
        ("ifeval", "ifeval"),
    ] {
        let expected = fs::read_to_string(fixtures().join(format!("expected/{case}.json"))).unwrap();
        let expected: Json = serde_json::from_str(&expected).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let lines: Vec<String> = expected["samples"][task].as_array().unwrap().iter().map(Json::to_string).collect();
        file(&folder, &format!("samples_{task}_2026.jsonl"), &lines.join("\n"));
        let run = folder.path().to_str().unwrap();
        let found: Json = serde_json::from_str(&said(&["compare", run, run, "--json"])).unwrap();
        assert_eq!(found["left_out"], json!([]), "{case}");
        let is_value = |key: &&String| key.contains(',') && !key.contains("_stderr,");
        let results = expected["results"][task].as_object().unwrap();
        let mut n_found = 0;
        for key in results.keys().filter(is_value) {
            let named =
                |d: &&Json| format!("{},{}", d["metric"].as_str().unwrap(), d["filter"].as_str().unwrap()) == **key;
            let d =
                found["differences"].as_array().unwrap().iter().find(named).unwrap_or_else(|| panic!("{task} {key}"));
            let (a, want) = (d["a"].as_f64().unwrap(), results[key].as_f64().unwrap());
            assert!((a - want).abs() <= 1e-12 * want.abs(), "{task} {key}: {a} {want}");
            assert_eq!((&d["difference"], &d["interval"]), (&json!(0.0), &json!([0.0, 0.0])), "{task} {key}");
            let metric = d["metric"].as_str().unwrap();
            assert_eq!(d["higher_is_better"], expected["higher_is_better"][task][metric], "{task} {key}");
            n_found += 1;
        }
        assert_eq!(found["differences"].as_array().unwrap().len(), n_found, "{case}");
    }
}

#[test]
fn a_bound_is_about_which_way_is_better() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, logprobs: &[f64]| {
        let path = folder.path().join(name);
        fs::create_dir_all(&path).unwrap();
        let record = |(i, logprob): (usize, &f64)| {
            json!({"doc_id": i, "doc_hash": format!("h{i}"), "metrics": ["perplexity", "odd"], "perplexity": logprob,
                   "odd": ["a", 1]})
            .to_string()
        };
        let lines: Vec<String> = logprobs.iter().enumerate().map(record).collect();
        fs::write(path.join("samples_lambada_openai_2026.jsonl"), lines.join("\n")).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (good, bad) = (run("good", &[-1.0, -2.0, -3.0]), run("bad", &[-2.0, -2.0, -4.0]));
    let text = said(&["compare", &good, &bad]);
    assert!(text.contains("perplexity,none: 7.3891 -> 14.3919  +7.0029") && text.contains("lower is better"), "{text}");
    assert!(text.contains("odd,none: not compared: its values, such as [\"a\",1]"), "{text}");
    refused(&["compare", &good, &bad, "--fail-below", "perplexity=-0.5"], 1, &["perplexity,none changed by +7.0029"]);
    said(&["compare", &bad, &good, "--fail-below", "perplexity=-0.5"]);
    said(&["compare", &good, &bad, "--fail-below", "perplexity=-8"]);
}

#[test]
fn a_filter_of_one_run_is_named_whichever_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, filters: &[&str]| {
        let record = |filter| json!({"doc_id": 0, "doc_hash": "h", "filter": filter, "metrics": ["acc"], "acc": 1.0});
        let lines: Vec<String> = filters.iter().map(|filter| record(filter).to_string()).collect();
        file(&folder, name, &lines.join("\n"))
    };
    let (one, two) = (run("one.jsonl", &["none"]), run("two.jsonl", &["none", "strict"]));
    let text = said(&["compare", &one, &two]);
    assert!(text.contains("acc,strict: not compared: only the second run has the filter"), "{text}");
    let text = said(&["compare", &two, &one]);
    assert!(text.contains("acc,strict: not compared: only the first run has the filter"), "{text}");
}

/// A built-in implementation is valid for one version of a Python file, and reads the data in it.
#[test]
fn another_python_file_is_refused_unless_it_is_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let math = folder.path().join("leaderboard/math");
    fs::create_dir_all(&math).unwrap();
    fs::write(
        math.join("utils.py"),
        "def list_fewshot_samples() -> list[dict]:\n    return [\n        {'problem': 'One?', 'solution': 'It is '\n         '$1$.', \
         'few_shot': '1'},\n    ]\n\n\ndef more():\n    return [2]\n",
    )
    .unwrap();
    let data = file(
        &folder,
        "test.jsonl",
        &[("Level 5", "Two?"), ("Level 1", "Easy?"), ("Level 5", "Three?")]
            .map(|(level, problem)| json!({"problem": problem, "solution": "\\boxed{2}", "level": level}).to_string())
            .join("\n"),
    );
    let task = math.join("hard.yaml");
    fs::write(
        &task,
        format!(
            "task: hard\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n\
             process_docs: !function utils.process_docs\ndoc_to_text: !function utils.doc_to_text\n\
             doc_to_target: \"{{{{answer if few_shot is undefined else solution}}}}\"\n\
             process_results: !function utils.process_results\nnum_fewshot: 1\n\
             fewshot_config: {{sampler: first_n, samples: !function utils.list_fewshot_samples}}\n\
             metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true, hf_evaluate: true}}]\n"
        ),
    )
    .unwrap();
    let task = task.to_str().unwrap();
    refused(&["show", task], 2, &["hard.yaml:", "utils.py differs from lm-eval 0.4.13", "--allow-changed-python"]);
    let text = said(&["show", task, "--doc", "1", "--allow-changed-python"]);
    let want = "hard: document 1 of 2, 1 example\ntest = DATA (2 documents)\n\n--- request 1 of 1: generate_until ---\n\
                Problem:\nOne?\n\nSolution: It is $1$.\n\nProblem:\nThree?\n\nSolution:\n\n--- target ---\n\"2\"";
    assert!(text.starts_with(&want.replace("DATA", &data)), "{text}");
}

#[test]
fn a_single_choice_metric_refuses_several_gold_choices_before_any_request() {
    let folder = tempfile::tempdir().unwrap();
    let data = file(&folder, "test.jsonl", &json!({"q": "a", "choices": ["x", "y"], "gold": [0, 1]}).to_string());
    let task = format!(
        "task: many\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n\
         output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: choices\ndoc_to_target: gold\n\
         metric_list: [{{metric: brier_score}}]\n"
    );
    let task = file(&folder, "many.yaml", &task);
    refused(&["show", &task], 3, &["test.jsonl:1", "brier_score needs one correct choice"]);
}

#[test]
fn choices_in_a_csv_file_are_a_list_or_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let csv = |name: &str, choices: &str| {
        file(&folder, name, &format!("question,subject,choices,answer\nWhich?,virology,\"{choices}\",1\n"))
    };
    let show = |path: String| format!("mmlu_virology={path}");
    let list = show(csv("list.csv", "['red', 'green', 'blue', 'grey']"));
    let text = said(&["show", "mmlu_virology", "--num-fewshot", "0", "--data", &list]);
    assert!(text.contains("A. red") && text.contains("D. grey"), "{text}");
    let broken = show(csv("broken.csv", "red; green; blue; grey"));
    let arguments = ["show", "mmlu_virology", "--num-fewshot", "0", "--data", &broken];
    refused(&arguments, 3, &["broken.csv:2", "column `choices`", "expected a JSON or Python list"]);
}

#[test]
fn former_commands_are_hidden() {
    let help = said(&["--help"]);
    for command in ["chat", "generate", "answer", "perplexity"] {
        assert!(!help.lines().any(|line| line.trim_start().starts_with(command)), "{command}: {help}");
    }
}

#[test]
fn generate_without_an_input_names_both_options() {
    refused(&["generate", "--model", "nowhere"], 2, &["--prompt <PROMPT>|--messages <FILE>"]);
}
