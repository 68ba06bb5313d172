//! `trainer prefetch` and `evaluator prefetch`: lock files, runs that use only them, and the air gap.

mod air_gap;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::{Value, json};
use suite::{program, root};

use crate::hub_server::{HubServer, Repo};

const MODEL: &str = "tiny/base";

/// A folder with a recipe whose model, data and task come from a Hub server.
struct PrefetchFolder {
    folder: tempfile::TempDir,
    server: HubServer,
}

impl PrefetchFolder {
    fn new() -> Self {
        Self::with_model(model_repo())
    }

    fn with_model(model: Repo) -> Self {
        let new = Self {
            // The programs can be hard-linked into a folder next to them.
            folder: tempfile::tempdir_in(program("trainer").parent().unwrap()).unwrap(),
            server: HubServer::start([model, chats(), questions()]),
        };
        fs::write(new.path("more.jsonl"), chat_rows("Local?", 4)).unwrap();
        new.write_recipe(&json!({}));
        new
    }

    /// Writes the recipe of a LoRA run, with other values for some sections.
    fn write_recipe(&self, changes: &Value) {
        let peft = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": "all-linear"});
        let mut recipe = json!({
            "type": "sft", "output_dir": "runs/lora", "train_iters": 2, "device": "cpu",
            "model": {"name_or_path": MODEL, "dtype": "f32", "peft_config": peft},
            "data": {"sources": ["tiny/chats", "more.jsonl"], "eval_sources": ["tiny/chats:test"], "max_length": 128},
            "eval": {"tasks": ["arc_easy"], "limit": 2, "interval": 2, "max_length": 128},
        });
        for (key, value) in changes.as_object().unwrap() {
            recipe[key] = value.clone();
        }
        fs::write(self.path("recipe.yaml"), serde_json::to_string_pretty(&recipe).unwrap()).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, line: &str) -> Output {
        self.run_with(line, &[])
    }

    /// Runs a command line whose words have no spaces.
    fn run_with(&self, line: &str, env: &[(&str, &str)]) -> Output {
        let words: Vec<&str> = line.split(' ').collect();
        let mut command = Command::new(program(words[0]));
        command.args(&words[1..]).current_dir(self.folder.path()).env("RAYON_NUM_THREADS", "2");
        command.env("HF_ENDPOINT", self.server.endpoint()).env("HF_HOME", self.path("hf"));
        command.env("XDG_CACHE_HOME", self.path("cache"));
        for name in ["RUST_BACKTRACE", "RUST_LOG", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN", "RANK", "WORLD_SIZE"] {
            command.env_remove(name);
        }
        command.envs(env.iter().copied()).output().unwrap()
    }

    fn lock(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("recipe.yaml.lock")).unwrap()).unwrap()
    }

    /// Returns the path of a model file in the cache.
    fn cached_model(&self, file: &str) -> PathBuf {
        let commit = self.lock()["repositories"][0]["commit"].as_str().unwrap().to_owned();
        self.path("hf/hub/models--tiny--base/snapshots").join(commit).join(file)
    }
}

/// Returns the repository of a tiny model, trained once for all tests.
fn model_repo() -> Repo {
    static FILES: OnceLock<Vec<(String, Vec<u8>)>> = OnceLock::new();
    let files = FILES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49152,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": true,
        });
        let recipe = json!({
            "type": "sft", "output_dir": "base", "train_iters": 1, "model": {"dtype": "f32", "config": config},
            "tokenizer": {"name_or_path": root().join("candle-ext/text/tests/fixtures/chat/smollm2")},
            "data": {"sources": ["rows.jsonl"], "max_length": 128},
        });
        fs::write(folder.path().join("rows.jsonl"), chat_rows("Why?", 4)).unwrap();
        fs::write(folder.path().join("base.yaml"), recipe.to_string()).unwrap();
        let mut command = Command::new(program("trainer"));
        command.args(["-q", "train", "base.yaml"]).current_dir(folder.path()).env("XDG_CACHE_HOME", folder.path());
        let output = command.env("RAYON_NUM_THREADS", "2").output().unwrap();
        succeeds("base model", &output);
        let entries = fs::read_dir(folder.path().join("base/model/latest")).unwrap().map(Result::unwrap);
        entries.map(|it| (it.file_name().into_string().unwrap(), fs::read(it.path()).unwrap())).collect()
    });
    files.iter().fold(Repo::new("models/tiny/base", &[]), |repo, (path, bytes)| repo.with(path, bytes))
}

fn chats() -> Repo {
    let (train, test) = (chat_rows("Which animal barks?", 12), chat_rows("Which animal purrs?", 4));
    Repo::new("datasets/tiny/chats", &[("README.md", "# Chats"), ("train.jsonl", &train), ("test.jsonl", &test)])
}

/// The data set of the task arc_easy.
fn questions() -> Repo {
    let row = json!({
        "question": "Which animal barks?", "choices": {"text": ["a dog", "a cat"], "label": ["A", "B"]}, "answerKey": "A",
    });
    let rows = format!("{row}\n").repeat(4);
    Repo::new("datasets/allenai/ai2_arc", &[("ARC-Easy/test.jsonl", &rows), ("ARC-Easy/train.jsonl", &rows)])
}

fn chat_rows(question: &str, n: usize) -> String {
    let row = |i: usize| {
        let messages =
            json!([{"role": "user", "content": format!("{i}: {question}")}, {"role": "assistant", "content": "Yes."}]);
        json!({ "messages": messages }).to_string() + "\n"
    };
    (0..n).map(row).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Checks that a command succeeded, and returns its output on stdout and stderr.
#[track_caller]
fn succeeds(line: &str, output: &Output) -> String {
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{line}\n{said}");
    said
}

#[track_caller]
fn refused(output: &Output, code: i32, phrases: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    phrases.iter().for_each(|phrase| assert!(said.contains(phrase), "{phrase:?} is not in {said}"));
    assert!(!said.contains("panicked"), "{said}");
}

#[test]
fn a_prefetched_recipe_trains_without_a_request() {
    let here = PrefetchFolder::new();
    let said = succeeds("prefetch", &here.run("trainer prefetch recipe.yaml"));
    assert!(said.contains("model tiny/base at main: commit ") && said.contains("wrote recipe.yaml.lock"), "{said}");
    let lock = here.lock();
    let ids: Vec<&str> =
        lock["repositories"].as_array().unwrap().iter().map(|repo| repo["id"].as_str().unwrap()).collect();
    assert_eq!(ids, [MODEL, "allenai/ai2_arc", "tiny/chats"]);
    assert_eq!(here.server.count("GET", "/test.jsonl"), 2, "the task's and the evaluation data");
    // The branch moves, and the server stays reachable.
    here.server.replace(model_repo().with("config.json", b"{}"));
    let n_requests = here.server.log().len();
    let said = succeeds("train", &here.run("trainer train recipe.yaml"));
    let commit = &lock["repositories"][0]["commit"].as_str().unwrap()[..12];
    assert!(said.contains("recipe.yaml.lock is in use, without requests to the Hub"), "{said}");
    assert!(said.contains(&format!("model tiny/base at commit {commit}")), "{said}");
    succeeds("check", &here.run("trainer check recipe.yaml --offline"));
    // A stream reads the same files.
    let streamed = "data.streaming=true train_iters=2 output_dir=streamed checkpoint=none";
    succeeds("train", &here.run(&format!("trainer train recipe.yaml {streamed}")));
    succeeds("prefetch --check", &here.run(&format!("trainer prefetch recipe.yaml --check {streamed}")));
    assert_eq!(here.server.log().len(), n_requests);
    // Without the lock, the run takes the newest commit, which is no model.
    fs::remove_file(here.path("recipe.yaml.lock")).unwrap();
    refused(&here.run("trainer prefetch recipe.yaml"), 2, &["config"]);
}

#[test]
fn a_recipe_that_names_another_repository_is_refused_at_its_line() {
    let here = PrefetchFolder::new();
    succeeds("prefetch", &here.run("trainer prefetch recipe.yaml"));
    let n_requests = here.server.log().len();
    for (argument, key) in [
        ("model.name_or_path=tiny/other", "model.name_or_path"),
        ("model.revision=v2", "model.name_or_path"),
        ("tokenizer.name_or_path=tiny/other", "tokenizer.name_or_path"),
        ("data.sources.0.name_or_path=tiny/other", "data.sources.0"),
        ("data.eval_sources=[tiny/other]", "data.eval_sources.0"),
    ] {
        let output = here.run(&format!("trainer train recipe.yaml {argument}"));
        let has = format!("{key}: recipe.yaml.lock has no entry for the ");
        refused(&output, 2, &[&has, "at revision ", "run `trainer prefetch recipe.yaml` with a network"]);
    }
    here.write_recipe(&json!({"model": {"name_or_path": "tiny/new"}}));
    let output = here.run("trainer train recipe.yaml");
    refused(&output, 2, &["recipe.yaml:", "tiny/new", "it has tiny/base at main", "| "]);
    // A data set of a task has no line.
    here.write_recipe(&json!({"eval": {"tasks": ["piqa"], "limit": 2}}));
    refused(&here.run("trainer train recipe.yaml"), 3, &["no entry for the dataset", "trainer prefetch recipe.yaml"]);
    assert_eq!(here.server.log().len(), n_requests);
}

#[test]
fn prefetch_keeps_locked_commits_and_updates_them_on_request() {
    let here = PrefetchFolder::new();
    succeeds("prefetch", &here.run("trainer prefetch recipe.yaml"));
    let (first, n_requests) = (here.lock(), here.server.log().len());
    let generation = br#"{"do_sample": false}"#;
    here.server.replace(model_repo().with("generation_config.json", generation));
    succeeds("again", &here.run("trainer prefetch recipe.yaml"));
    assert_eq!(here.lock(), first);
    assert_eq!(here.server.log().len(), n_requests, "everything is in the cache");
    succeeds("update", &here.run("trainer prefetch recipe.yaml --update"));
    let commits = |lock: &Value| -> Vec<Value> {
        lock["repositories"].as_array().unwrap().iter().map(|repo| repo["commit"].clone()).collect()
    };
    let (before, after) = (commits(&first), commits(&here.lock()));
    assert!(before[0] != after[0] && before[1..] == after[1..], "{before:?} {after:?}");
}

#[test]
fn check_finds_a_damaged_file_and_prefetch_replaces_it() {
    let here = PrefetchFolder::new();
    refused(&here.run("trainer prefetch recipe.yaml --check"), 2, &["read the lock file recipe.yaml.lock"]);
    succeeds("prefetch", &here.run("trainer prefetch recipe.yaml"));
    let said = succeeds("check", &here.run("trainer prefetch recipe.yaml --check"));
    assert!(said.contains("recipe.yaml.lock: ") && said.contains("are whole"), "{said}");
    let weights = fs::canonicalize(here.cached_model("model.safetensors")).unwrap();
    let n_bytes = fs::metadata(&weights).unwrap().len();
    fs::write(&weights, vec![0; n_bytes as usize]).unwrap();
    let output = here.run("trainer prefetch recipe.yaml --check");
    refused(&output, 3, &["model.safetensors of tiny/base: its sha256 is ", "run `trainer prefetch recipe.yaml`"]);
    succeeds("prefetch", &here.run("trainer prefetch recipe.yaml"));
    succeeds("check", &here.run("trainer prefetch recipe.yaml --check"));
    // A recipe that needs more than the lock has is an error of --check, too.
    here.write_recipe(&json!({"model": {"name_or_path": "tiny/new"}}));
    refused(&here.run("trainer prefetch recipe.yaml --check"), 2, &["no entry for the model tiny/new"]);
}

#[test]
fn a_gated_model_needs_the_token_once() {
    let here = PrefetchFolder::with_model(model_repo().gated_by("hf_secret"));
    refused(&here.run("trainer prefetch recipe.yaml"), 3, &["tiny/base", "gated or private", "HF_TOKEN"]);
    assert!(!here.path("recipe.yaml.lock").exists());
    succeeds("prefetch", &here.run_with("trainer prefetch recipe.yaml", &[("HF_TOKEN", "hf_secret")]));
    assert!(!fs::read_to_string(here.path("recipe.yaml.lock")).unwrap().contains("hf_secret"));
    succeeds("train", &here.run("trainer train recipe.yaml"));
}

#[test]
fn an_evaluation_uses_the_commits_of_its_lock() {
    let here = PrefetchFolder::new();
    let options = "--model tiny/base --tasks arc_easy --num-fewshot 1";
    succeeds("prefetch", &here.run(&format!("evaluator prefetch {options}")));
    let n_requests = here.server.log().len();
    here.server.replace(model_repo().with("config.json", b"{}"));
    let run = format!("evaluator run --lock evaluator.lock {options} --limit 2 --max-length 128");
    let said = succeeds("run", &here.run(&run));
    assert!(said.contains("arc_easy"), "{said}");
    assert_eq!(here.server.log().len(), n_requests);
    let output = here.run(&run.replace("arc_easy", "piqa"));
    refused(&output, 3, &["evaluator.lock", "no entry for the dataset", "evaluator prefetch --lock evaluator.lock"]);
    refused(&here.run("evaluator run --lock no.lock --model tiny/base --tasks arc_easy"), 2, &["no.lock"]);
    let said = succeeds("check", &here.run(&format!("evaluator prefetch --check {options}")));
    assert!(said.contains("are whole"), "{said}");
}

#[test]
fn the_output_folder_holds_local_files_and_names_those_outside() {
    let here = PrefetchFolder::new();
    let outside = tempfile::tempdir().unwrap();
    let rows = outside.path().join("rows.jsonl");
    fs::write(&rows, chat_rows("Outside?", 4)).unwrap();
    fs::create_dir(here.path("template")).unwrap();
    fs::write(here.path("template/chat.jinja"), "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    here.write_recipe(&json!({
        "data": {"sources": ["more.jsonl", rows], "max_length": 128},
        "tokenizer": {"name_or_path": MODEL, "chat_template": "template/chat.jinja"},
    }));
    let said = succeeds("prefetch", &here.run("trainer prefetch recipe.yaml --output carry"));
    assert!(said.contains(&format!("left out: {}", rows.display())), "{said}");
    assert!(said.contains("set HF_HOME=hf-home"), "{said}");
    for file in ["recipe.yaml", "recipe.yaml.lock", "more.jsonl", "template/chat.jinja"] {
        let same = |folder: &Path| fs::read(folder.join(file)).unwrap();
        assert!(same(here.folder.path()) == same(&here.path("carry")), "{file}");
    }
    refused(&here.run("trainer prefetch recipe.yaml --output carry"), 2, &["carry", "the folder is not empty"]);
}
