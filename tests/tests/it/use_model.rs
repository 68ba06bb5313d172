//! Use of a trained model: found by its run folder, merged, chatted with, and evaluated as in training.

mod ranks;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use candle_core::{DType, Device};
use candlewick_inference::lm::Lm;
use serde_json::{Value, json};
use suite::root;

const MESSAGES: &str = r#"{"role": "system", "content": "Be brief."}
{"role": "user", "content": "What comes after 3?"}
{"role": "assistant", "content": "4"}
{"role": "user", "content": "And then?"}
"#;

/// A folder with a full fine-tuning run and a LoRA run on its model.
struct TrainedRuns(tempfile::TempDir);

impl TrainedRuns {
    /// Returns the runs, shared by all tests of a process, which only read them.
    fn shared() -> &'static Self {
        static SHARED: OnceLock<TrainedRuns> = OnceLock::new();
        SHARED.get_or_init(|| {
            let runs = Self(tempfile::tempdir().unwrap());
            runs.write("train.jsonl", &rows(0..60));
            runs.write("eval.jsonl", &rows(60..70));
            let model = json!({
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
                "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": true,
            });
            let tokenizer = root().join("recipes/quickstart/tokenizer");
            runs.train("full", &json!({"dtype": "f32", "config": model}), tokenizer.to_str().unwrap());
            let peft = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": "all-linear"});
            let model = json!({"dtype": "f32", "name_or_path": runs.path("full"), "peft_config": peft});
            runs.train("lora", &model, runs.path("full").to_str().unwrap());
            runs
        })
    }

    fn train(&self, name: &str, model: &Value, tokenizer: &str) {
        let at = |path: &str| self.path(path);
        let recipe = json!({
            "type": "sft", "output_dir": at(name), "train_iters": 24, "micro_batch_size": 2, "eval_interval": 12,
            "device": "cpu", "seed": 7, "model": model, "tokenizer": {"name_or_path": tokenizer},
            "data": {
                "sources": [at("train.jsonl")], "eval_sources": [at("eval.jsonl")], "max_length": 96,
                "cache_dir": at("cache"),
            },
            "optimizer": {"learning_rate": 1e-2}, "scheduler": {"name": "cosine"},
            "checkpoint": [
                {"type": "sharded", "output_dir": at(&format!("{name}/checkpoints")), "save_end_of_training": true},
                {"type": "huggingface", "output_dir": at(&format!("{name}/model")), "save_every_n_steps": 12},
            ],
            "generate": {"prompts": ["Hi", [{"role": "system", "content": "s"}, {"role": "user", "content": "Hello"}]]},
        });
        self.write(&format!("{name}.yaml"), &recipe.to_string());
        let output = ok(self.run("trainer", &["-q", "train", &format!("{name}.yaml")], ""));
        let samples = text(&output.stdout);
        assert!(samples.contains("> Hi\n") && samples.contains("> Hello\n"), "{samples}");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn run(&self, program: &str, arguments: &[&str], stdin: &str) -> Output {
        let mut command = Command::new(suite::program(program));
        command.args(arguments).current_dir(self.0.path()).env("RAYON_NUM_THREADS", "2");
        command.env("HF_ENDPOINT", "http://me:hunter2@127.0.0.1:9").env("HF_HOME", self.path("hf-home"));
        for name in ["RUST_BACKTRACE", "RUST_LOG", "HF_HUB_OFFLINE", "RANK", "WORLD_SIZE"] {
            command.env_remove(name);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // A program that has failed does not read its input.
        let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
        child.wait_with_output().unwrap()
    }

    fn evaluator(&self, arguments: &[&str], stdin: &str) -> Output {
        self.run("evaluator", &[arguments, &["--device", "cpu"]].concat(), stdin)
    }

    fn says(&self, arguments: &[&str], stdin: &str) -> String {
        text(&ok(self.evaluator(arguments, stdin)).stdout)
    }

    #[track_caller]
    fn refuses(&self, output: &Output, code: i32, phrases: &[&str]) {
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}{}", text(&output.stdout));
        phrases.iter().for_each(|phrase| assert!(said.contains(phrase), "{phrase:?} is not in {said:?}"));
        assert!(!said.contains("panicked") && !said.contains("hf_hub") && !said.contains('\u{1b}'), "{said}");
    }

    /// Returns the last eval loss of training.
    fn eval_loss(&self, run: &str) -> f64 {
        let metrics = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        let records = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        records.filter_map(|record| record["loss/eval"].as_f64()).next_back().unwrap()
    }

    fn perplexity(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.says(&[&["score"], arguments].concat(), "")).unwrap()
    }
}

fn rows(numbers: std::ops::Range<usize>) -> String {
    let row = |i: usize| {
        let answer = format!("{} comes after {i}. {}", i + 1, "Yes. ".repeat(i % 5));
        let messages = json!([
            {"role": "user", "content": format!("What comes after {i}?")},
            {"role": "assistant", "content": answer.trim()},
        ]);
        json!({ "messages": messages }).to_string() + "\n"
    };
    numbers.map(row).collect()
}

#[track_caller]
fn ok(output: Output) -> Output {
    assert!(output.status.success(), "{}", text(&output.stderr));
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_runs_folder_names_its_newest_export() {
    let runs = TrainedRuns::shared();
    let at =
        |model: &str| ok(runs.run("trainer", &["generate", model, "--prompt", "Say wolf.", "--device", "cpu"], ""));
    let newest = at("full/model/global_step_24");
    for (model, note) in [("full", "newest of 2"), ("full/model", "newest of 2")] {
        let found = at(model);
        assert_eq!(found.stdout, newest.stdout);
        let note = format!("model: full/model/global_step_24 ({note})\n");
        assert!(text(&found.stderr).starts_with(&note), "{}", text(&found.stderr));
    }
    assert_eq!(at("full/model/latest").stdout, newest.stdout);
    assert_eq!(fs::read_link(runs.path("full/model/latest")).unwrap(), Path::new("global_step_24"));
    let sharded = fs::read_link(runs.path("full/checkpoints/latest")).unwrap();
    assert!(runs.path("full/checkpoints").join(sharded).join("manifest.json").is_file());
}

#[test]
fn an_adapter_brings_its_base() {
    let runs = TrainedRuns::shared();
    let prompt = ["--prompt", "What comes after 5?"];
    let alone = runs.says(&[&["generate", "--model", "lora"], &prompt[..]].concat(), "");
    let both = ["generate", "--model", "full", "--adapter", "lora/model/global_step_24"];
    assert_eq!(alone, runs.says(&[&both[..], &prompt].concat(), ""));
    assert_ne!(runs.eval_loss("full"), runs.eval_loss("lora"), "the adapter has learned something");
    let twice = runs.evaluator(&[&["generate", "--model", "lora", "--adapter", "lora"], &prompt[..]].concat(), "");
    runs.refuses(&twice, 2, &["it is an adapter, and --adapter names another"]);
    let output = runs.run("trainer", &["check", "lora.yaml", "model.name_or_path=lora/model"], "");
    runs.refuses(&output, 2, &["is an adapter, not a model", "model.adapter_name_or_path: lora/model/global_step_24"]);
}

#[test]
fn a_path_without_a_model_is_an_error_before_any_hub_request() {
    let runs = TrainedRuns::shared();
    let at = |model: &str| runs.evaluator(&["generate", "--model", model, "--prompt", "a"], "");
    runs.refuses(&at("full/checkpoints"), 3, &["it holds sharded checkpoints", "trainer export"]);
    runs.refuses(&at("full/modle"), 3, &["neither a folder here nor a Hub id", "did you mean full/model?"]);
    runs.refuses(&at("./ful"), 3, &["did you mean ./full?"]);
    runs.refuses(&at("owner/nope"), 3, &["it is no folder here", "failed to reach http://127.0.0.1:9"]);
    assert!(!text(&at("owner/nope").stderr).contains("hunter2"));
}

#[test]
fn a_merged_model_scores_as_its_adapter() {
    let runs = TrainedRuns::shared();
    let output = ok(runs.run("trainer", &["merge", "lora", "--output", "merged"], ""));
    let said = text(&output.stdout);
    assert!(said.contains("14 matrices changed"), "{said}");
    assert!(said.contains("read back: largest logit difference 0.00e0"), "{said}");
    let unchecked = ok(runs.run("trainer", &["merge", "lora", "--output", "unchecked", "--skip-check"], ""));
    assert!(text(&unchecked.stdout).contains("logits are not compared"), "{}", text(&unchecked.stdout));
    let lm = |folder: &str, adapter: Option<&str>| {
        let adapter = adapter.map(|adapter| runs.path(adapter));
        Lm::load(&runs.path(folder), adapter.as_deref(), DType::F32, Device::Cpu).unwrap()
    };
    let score = |lm: &Lm| -> Vec<f32> {
        let tokens = lm.score("<|im_start|>user\nWhat comes after 5?<|im_end|>\n").unwrap();
        tokens.iter().filter_map(|token| token.logprob).collect()
    };
    let [merged, adapted, base] = [
        ("merged", None),
        ("full/model/global_step_24", Some("lora/model/global_step_24")),
        ("full/model/global_step_24", None),
    ]
    .map(|(folder, adapter)| score(&lm(folder, adapter)));
    let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(distance(&merged, &adapted) < 1e-5, "{merged:?} {adapted:?}");
    assert!(distance(&base, &adapted) > 1e-2);
    for name in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
        assert!(runs.path("merged").join(name).is_file(), "{name}");
    }
    let again = runs.run("trainer", &["merge", "lora", "--output", "merged"], "");
    runs.refuses(&again, 6, &["is not empty"]);
    fs::write(runs.path("merged.txt"), "notes").unwrap();
    let on_file = runs.run("trainer", &["merge", "lora", "--output", "merged.txt"], "");
    runs.refuses(&on_file, 6, &["merged.txt", "it is a file; name a new folder"]);
    assert_eq!(fs::read_to_string(runs.path("merged.txt")).unwrap(), "notes");
    let wrong = runs.run("trainer", &["merge", "full", "--output", "m2"], "");
    runs.refuses(&wrong, 3, &["it is no adapter"]);
}

/// Returns the loss of one training step on the model in a folder.
fn loss_of_a_step(runs: &TrainedRuns, model: &str) -> f64 {
    let recipe = json!({
        "type": "sft", "output_dir": runs.path(&format!("step-{model}")), "train_iters": 1, "device": "cpu",
        "model": {"dtype": "f32", "name_or_path": runs.path(model)},
        "data": {"sources": [runs.path("train.jsonl")], "max_length": 96, "cache_dir": runs.path("cache")},
        "optimizer": {"learning_rate": 1e-3},
    });
    let name = format!("step-{model}.yaml");
    runs.write(&name, &recipe.to_string());
    ok(runs.run("trainer", &["-q", "train", &name], ""));
    let metrics = fs::read_to_string(runs.path(&format!("step-{model}/metrics.jsonl"))).unwrap();
    let records = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter_map(|record| record["loss"].as_f64()).next().unwrap()
}

#[test]
fn an_upcycled_model_scores_and_trains_as_its_dense_model() {
    let runs = TrainedRuns::shared();
    let upcycle = |model: &str, output: &str, sizes: [&str; 3]| {
        let [n, k, g] = sizes;
        let sizes = ["--num-experts", n, "--num-experts-per-tok", k, "--granularity", g];
        runs.run("trainer", &[&["upcycle", model, "--output", output], &sizes[..]].concat(), "")
    };
    let output = ok(upcycle("full", "moe", ["8", "4", "2"]));
    let said = text(&output.stdout);
    assert!(said.contains("MixtralForCausalLM with 8 experts of intermediate size 32"), "{said}");
    let loss = |model: &str| runs.perplexity(&["--model", model, "--data", "eval.jsonl"])["loss"].as_f64().unwrap();
    let (moe, dense) = (loss("moe"), loss("full"));
    assert!((moe - dense).abs() < 1e-5, "{moe} {dense}");
    let (moe, dense) = (loss_of_a_step(runs, "moe"), loss_of_a_step(runs, "full"));
    assert!((moe - dense).abs() < 1e-5, "{moe} {dense}");
    let sizes = ["8", "2", "1"];
    runs.refuses(&upcycle("full", "moe", sizes), 6, &["is not empty"]);
    runs.refuses(&upcycle("moe", "moe2", sizes), 2, &["failed to upcycle moe", "is a mixture of experts already"]);
    runs.refuses(&upcycle("lora", "moe2", sizes), 2, &["is an adapter; merge it first"]);
    runs.refuses(&upcycle("full", "moe2", ["8", "9", "1"]), 2, &["num_experts_per_tok 9"]);
    runs.refuses(&upcycle("full", "moe2", ["8", "2", "5"]), 2, &["--granularity 5: the dense MLP's intermediate_size"]);
    let sizes = ["--num-experts", "8", "--num-experts-per-tok", "2", "--moe-layer-freq", "[1,0,1]"];
    let frequency = runs.run("trainer", &[&["upcycle", "full", "--output", "moe2"], &sizes[..]].concat(), "");
    runs.refuses(&frequency, 2, &["failed to upcycle full", "--moe-layer-freq: the list has 3 entries"]);
    let warned = ok(upcycle("full", "top-1", ["4", "1", "1"]));
    let note = text(&warned.stderr);
    assert!(note.contains("with num_experts_per_tok 1 each weight is 1"), "{note}");
}

#[test]
fn the_perplexity_of_chats_equals_the_eval_loss_of_training() {
    let runs = TrainedRuns::shared();
    for (run, model) in [("full", "full/model/global_step_24"), ("lora", "lora")] {
        let measured = runs.perplexity(&["--model", model, "--data", "eval.jsonl"]);
        let (loss, want) = (measured["loss"].as_f64().unwrap(), runs.eval_loss(run));
        assert!((loss - want).abs() < 1e-6, "{loss} {want}");
        assert_eq!(measured["rows"], 10);
        assert!((measured["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-9);
    }
    // Equal rows with other column names.
    let renamed = fs::read_to_string(runs.path("eval.jsonl"))
        .unwrap()
        .replace("\"user\"", "\"human\"")
        .replace("\"assistant\"", "\"bot\"");
    runs.write("renamed.jsonl", &renamed);
    let want = runs.perplexity(&["--model", "full", "--data", "eval.jsonl"]);
    let mapped = runs.perplexity(&[
        "--model",
        "full",
        "--data",
        "renamed.jsonl",
        "--role-mapping",
        "user=messages.role.human",
        "--role-mapping",
        "assistant=messages.role.bot",
    ]);
    assert_eq!(mapped, want);
    let all = runs.perplexity(&["--model", "full", "--data", "eval.jsonl", "--mask-inputs", "false"]);
    assert!(all["tokens"].as_u64() > want["tokens"].as_u64());
    assert_eq!(runs.perplexity(&["--model", "full", "--data", "eval.jsonl", "--limit", "3"])["rows"], 3);
}

#[test]
fn the_perplexity_of_a_text_equals_the_eval_loss_of_causal_training() {
    let runs = TrainedRuns::shared();
    runs.write("corpus.txt", &"The wolf says yes.\n\nA cloud comes after 3.\n".repeat(37));
    let model = json!({"dtype": "f32", "name_or_path": runs.path("full")});
    let recipe = json!({
        "type": "causal", "output_dir": runs.path("causal"), "train_iters": 1, "device": "cpu", "model": model,
        "data": {
            "sources": [runs.path("corpus.txt")], "eval_sources": [runs.path("corpus.txt")], "max_length": 128,
            "cache_dir": runs.path("cache"),
        },
        "optimizer": {"learning_rate": 1e-3},
    });
    runs.write("causal.yaml", &recipe.to_string());
    ok(runs.run("trainer", &["-q", "train", "causal.yaml"], ""));
    let words = ["--model", "causal", "--data", "corpus.txt", "--truncation", "split"];
    let measured = runs.perplexity(&[&words[..], &["--add-eos-token"]].concat());
    let (loss, want) = (measured["loss"].as_f64().unwrap(), runs.eval_loss("causal"));
    assert!((loss - want).abs() < 1e-6, "{loss} {want}");
    assert_eq!(measured["rows"], 1);
    assert!(measured["tokens"].as_u64() > runs.perplexity(&words)["tokens"].as_u64());
    let lines = runs.perplexity(&[&words[..], &["--sample-by", "line"]].concat());
    assert_eq!(lines["rows"], 2 * 37, "each line that is not blank is a row");
    let whole = runs.evaluator(&["score", "--model", "causal", "--data", "corpus.txt"], "");
    runs.refuses(&whole, 3, &["corpus.txt:1", "tokens, and the model's context has 128", "--truncation split"]);
}

#[test]
fn a_row_longer_than_the_context_is_named_unless_it_may_be_cut() {
    let runs = TrainedRuns::shared();
    let row =
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c ".repeat(100)}]});
    runs.write("long.jsonl", &format!("{}{row}\n", rows(0..1)));
    let arguments = ["score", "--model", "full", "--data", "long.jsonl"];
    runs.refuses(&runs.evaluator(&arguments, ""), 3, &["long.jsonl:2", "context has 128"]);
    let tokens = |truncation: &str| {
        let output = runs.perplexity(&["--model", "full", "--data", "long.jsonl", "--truncation", truncation]);
        output["tokens"].as_u64().unwrap()
    };
    let (dropped, cut, split) = (tokens("drop"), tokens("truncate"), tokens("split"));
    assert!(dropped < cut && cut < split, "{dropped} {cut} {split}");
}

#[test]
fn perplexity_reports_the_oddities_that_training_reports() {
    let runs = TrainedRuns::shared();
    let row = |answer: &Value| json!({"messages": [{"role": "user", "content": "a"}, answer]}).to_string() + "\n";
    let empty = row(&json!({"role": "assistant", "content": ""}));
    runs.write("empty.jsonl", &(rows(0..1) + &empty));
    let output = ok(runs.evaluator(&["score", "--model", "full", "--data", "empty.jsonl"], ""));
    let said = text(&output.stderr);
    for what in ["hold an empty answer", "have no target tokens and are skipped"] {
        assert!(said.contains(&format!("warning: 1 of 2 rows {what}, the first at")), "{said}");
    }
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap()["rows"], 1);
    let call = json!({"type": "function", "function": {"name": "f", "arguments": {}}});
    let calls = row(&json!({"role": "assistant", "content": null, "tool_calls": [call]}));
    runs.write("calls.jsonl", &(rows(0..1) + &calls));
    let refused = runs.evaluator(&["score", "--model", "full", "--data", "calls.jsonl"], "");
    runs.refuses(
        &refused,
        3,
        &[
            "failed to render 1 of 2 rows",
            "tool calls, or answers of reasoning alone, that chat template",
            "calls.jsonl:2",
        ],
    );
}

#[test]
fn max_length_limits_the_sequences_of_perplexity() {
    let runs = TrainedRuns::shared();
    runs.write("words.txt", &"The wolf says yes. ".repeat(60));
    let words = ["--model", "full", "--data", "words.txt", "--truncation", "split"];
    let tokens = |length: &str| runs.perplexity(&[&words[..], &["--max-length", length]].concat())["tokens"].as_u64();
    assert_eq!(tokens("128"), runs.perplexity(&words)["tokens"].as_u64());
    assert!(tokens("32") < tokens("128"), "the first token of a piece has no loss");
    let data = ["score", "--model", "full", "--data", "words.txt", "--max-length"];
    runs.refuses(&runs.evaluator(&[&data[..], &["16"]].concat(), ""), 3, &["words.txt:1", "--max-length is 16"]);
    runs.refuses(&runs.evaluator(&[&data[..], &["129"]].concat(), ""), 2, &["the model's context of 128"]);
}

#[test]
fn a_completion_without_a_chat_template_ends_with_eos() {
    let runs = TrainedRuns::shared();
    let (chat, plain) = (runs.path("full/model/global_step_24"), runs.path("no-template"));
    fs::create_dir(&plain).unwrap();
    for entry in fs::read_dir(chat).unwrap().map(Result::unwrap) {
        let name = entry.file_name();
        if entry.path().is_file() && name != "chat_template.jinja" {
            fs::copy(entry.path(), plain.join(name)).unwrap();
        }
    }
    let config = plain.join("tokenizer_config.json");
    let mut tokenizer: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    tokenizer.as_object_mut().unwrap().remove("chat_template");
    fs::write(config, tokenizer.to_string()).unwrap();
    runs.write("pairs.jsonl", "{\"prompt\": \"The wolf\", \"completion\": \" says yes.\"}\n");
    runs.write("plain.jsonl", "{\"text\": \"The wolf says yes.\"}\n");
    let tokens = |data: &str, eos: &[&str]| {
        let arguments = [&["--model", "no-template", "--data", data], eos].concat();
        runs.perplexity(&arguments)["tokens"].as_u64().unwrap()
    };
    let without = ["--add-eos-token", "false"];
    assert_eq!(tokens("pairs.jsonl", &[]), tokens("pairs.jsonl", &without) + 1);
    assert_eq!(tokens("plain.jsonl", &[]), tokens("plain.jsonl", &without));
}

/// The chat template renders the prompt of a conversation.
#[test]
fn system_messages_and_conversations_reach_the_model() {
    let runs = TrainedRuns::shared();
    let turn = |role: &str, content: &str| format!("<|im_start|>{role}\n{content}<|im_end|>\n");
    let generate =
        |arguments: &[&str], stdin: &str| runs.says(&[&["generate", "--model", "full"], arguments].concat(), stdin);
    let raw = |prompt: &str| generate(&["--raw", "--prompt", &format!("{prompt}<|im_start|>assistant\n")], "");
    let with_system = raw(&(turn("system", "Be brief.") + &turn("user", "Hi")));
    assert_ne!(with_system, raw(&turn("user", "Hi")), "the test sees the system message");
    assert_eq!(generate(&["--system", "Be brief.", "--prompt", "Hi"], ""), with_system);
    assert_eq!(generate(&["--system", "Be brief.", "--prompt", "-"], "Hi\n"), with_system);
    let turns = [("system", "Be brief."), ("user", "What comes after 3?"), ("assistant", "4"), ("user", "And then?")];
    let whole = raw(&turns.map(|(role, content)| turn(role, content)).concat());
    assert_eq!(generate(&["--messages", "-"], MESSAGES), whole);
    let two = generate(&["--prompt", "Hi", "--prompt", "Ho"], "");
    assert!(two.contains("> Hi\n") && two.contains("> Ho\n"), "{two}");
    let refused = |arguments: &[&str], stdin: &str| {
        runs.evaluator(&[&["generate", "--model", "full"], arguments].concat(), stdin)
    };
    runs.refuses(&refused(&["--messages", "-"], "nonsense"), 3, &["neither JSON nor JSON lines"]);
    runs.refuses(&refused(&["--messages", "eval.jsonl"], ""), 3, &["conversation 1", "ends with the assistant's"]);
    runs.refuses(&refused(&["--messages", "-", "--system", "x"], MESSAGES), 3, &["a system message of its own"]);
    runs.refuses(&refused(&[], ""), 2, &["--prompt"]);
    let by_trainer = ["generate", "full", "--system", "Be brief.", "--prompt", "-", "--device", "cpu"];
    let output = ok(runs.run("trainer", &by_trainer, "Hi\n"));
    assert_eq!(text(&output.stdout), generate(&["--system", "Be brief.", "--prompt", "-"], "Hi\n"));
}

#[test]
fn the_former_command_perplexity_names_its_successor() {
    let runs = TrainedRuns::shared();
    let rows = |command: &'static str| runs.evaluator(&[command, "--model", "full", "--data", "eval.jsonl"], "");
    let (former, score) = (ok(rows("perplexity")), ok(rows("score")));
    assert_eq!(former.stdout, score.stdout);
    assert!(text(&former.stderr).contains("note: `evaluator perplexity` is now `evaluator score`"));
    runs.refuses(&runs.evaluator(&["score", "--model", "full"], ""), 2, &["--text <TEXT>|--data <DATA>"]);
}

#[test]
fn a_chat_remembers_until_it_is_reset() {
    let runs = TrainedRuns::shared();
    let options = ["--max-new-tokens", "20"];
    let generate = |arguments: &[&str], stdin: &str| {
        runs.says(&[&["generate", "--model", "full"], arguments, &options[..]].concat(), stdin)
    };
    let first = generate(&["--system", "Be brief.", "--prompt", "What comes after 3?"], "");
    let messages = json!([
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What comes after 3?"},
        {"role": "assistant", "content": first.strip_suffix('\n').unwrap()}, {"role": "user", "content": "And then?"},
    ]);
    let second = generate(&["--messages", "-"], &messages.to_string());
    let lines = "What comes after 3?\nAnd then?\n/reset\n\n/system Be brief.\nWhat comes after 3?\n/quit\nnever\n";
    let arguments = ["--system", "Be brief.", "--device", "cpu"];
    for (program, model) in [("evaluator", &["chat", "--model", "full"][..]), ("trainer", &["chat", "full"])] {
        let output = ok(runs.run(program, &[model, &arguments, &options].concat(), lines));
        assert_eq!(text(&output.stdout), format!("{first}{second}{first}"), "{program}");
    }
}

/// Every command leads to the conversation that another way of typing it has.
#[test]
fn a_chat_edits_its_last_turn() {
    let runs = TrainedRuns::shared();
    let chat = |options: &[&str], lines: &str| {
        let output = ok(runs.run("trainer", &[&["chat", "full", "--device", "cpu"], options].concat(), lines));
        (text(&output.stdout), text(&output.stderr))
    };
    // The penalty makes answers depend on the history.
    let options = ["--max-new-tokens", "20", "--repetition-penalty", "1.5"];
    let says = |lines: &str| chat(&options, lines).0;
    let (first, both) = (says("Hi\n"), says("Hi\nWhat comes after 3?\n"));
    let second = both.strip_prefix(&first).unwrap();
    assert_ne!(second, says("What comes after 3?\n"), "the test sees the history");
    assert_eq!(says("Hi\nHo\n/undo\nWhat comes after 3?\n"), says("Hi\nHo\n/edit What comes after 3?\n"));
    assert!(says("Hi\nHo\n/edit What comes after 3?\n").ends_with(second));
    assert_eq!(says("Hi\n/retry\nWhat comes after 3?\n"), format!("{first}{both}"));
    assert_eq!(says("Hi\n/undo\nHi\n"), format!("{first}{first}"));
    let (said, notes) = chat(&options, "/undo\n/retry\n/edit\n/edit Hi\n");
    assert_eq!((said.as_str(), notes.matches("note: the conversation has no message yet").count()), ("", 3));
    assert!(notes.contains("note: /edit needs the new text"), "{notes}");
    let sampled = [&options[..], &["--temperature", "3"]].concat();
    let (tries, notes) = chat(&sampled, "Hi\n/retry\n/retry\n");
    let lines: Vec<&str> = tries.lines().collect();
    assert!(lines.len() >= 3 && lines[..lines.len() / 3] != lines[lines.len() / 3..lines.len() / 3 * 2], "{tries}");
    assert_eq!(notes.matches(" tokens/s (prompt: ").count(), 3, "{notes}");
}

#[test]
fn a_chat_switches_adapters() {
    let runs = TrainedRuns::shared();
    let says = |model: &[&str], lines: &str| {
        let options = ["--max-new-tokens", "20", "--device", "cpu"];
        let output = ok(runs.run("trainer", &[&["chat"], model, &options].concat(), lines));
        (text(&output.stdout), text(&output.stderr))
    };
    let (base, adapted) = (says(&["full"], "Hi\n").0, says(&["full", "--adapter", "lora"], "Hi\n").0);
    let lines = "Hi\n/reset\n/adapter lora\nHi\n/reset\n/adapter\nHi\n/reset\n/adapter missing/one\nHi\n";
    let (said, notes) = says(&["full"], lines);
    assert_eq!(said, [base.as_str(), &adapted, &base, &base].concat());
    assert!(notes.contains("the chat continues with the loaded model"), "{notes}");
}

#[test]
fn variables_reach_the_chat_template() {
    let runs = TrainedRuns::shared();
    let folder = runs.path("with-mood");
    fs::create_dir_all(&folder).unwrap();
    for entry in fs::read_dir(runs.path("full/model/global_step_24")).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&entry, folder.join(entry.file_name().unwrap())).unwrap();
    }
    fs::write(folder.join("chat_template.jinja"), "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}")
        .unwrap();
    let generate = |arguments: &[&str]| {
        // The penalty makes answers depend on the prompt.
        let options = ["generate", "with-mood", "--device", "cpu", "--repetition-penalty", "1.5"];
        let arguments = [&options, arguments].concat();
        text(&ok(runs.run("trainer", &arguments, "")).stdout)
    };
    let plain = generate(&["--raw", "--prompt", "wolf What comes after 3?"]);
    let mood = ["--chat-template-kwargs", "{\"mood\": \"wolf \"}"];
    assert_eq!(generate(&[&["--prompt", "What comes after 3?"], &mood[..]].concat()), plain);
    assert_ne!(generate(&["--prompt", "What comes after 3?"]), plain);
}

#[test]
fn a_chat_template_by_name_replaces_the_models() {
    let runs = TrainedRuns::shared();
    let generate = |arguments: &[&str]| {
        let options = ["generate", "--model", "full", "--repetition-penalty", "1.5"];
        runs.says(&[&options, arguments].concat(), "")
    };
    let chat = generate(&["--prompt", "What comes after 3?", "--chat-template", "zephyr"]);
    let prompt = "<|user|>\nWhat comes after 3?<|im_end|>\n<|assistant|>\n";
    assert_eq!(chat, generate(&["--raw", "--prompt", prompt]));
    assert_ne!(chat, generate(&["--prompt", "What comes after 3?"]));
    let refused = |arguments: &[&str], phrases: &[&str]| runs.refuses(&runs.evaluator(arguments, ""), 2, phrases);
    let model = ["generate", "--model", "full", "--prompt", "a", "--chat-template"];
    refused(&[&model[..], &["chatlm"]].concat(), &["`chatlm` is neither", "did you mean `chatml`?"]);
    refused(&[&model[..], &["gemma"]].concat(), &["no token <start_of_turn>", "chatml, qwen2.5, qwen3"]);
    runs.write(
        "chat.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n",
    );
    let score = ["score", "--model", "full", "--data", "chat.jsonl"];
    let scores = |template: &[&str]| runs.says(&[&score[..], template].concat(), "");
    assert_ne!(scores(&["--chat-template", "zephyr"]), scores(&[]));
}

#[test]
fn a_generation_ends_before_a_stop_text() {
    let runs = TrainedRuns::shared();
    let generate = |stop: &[&str]| runs.says(&[&["generate", "--model", "full", "--prompt", "Hi"], stop].concat(), "");
    let whole = generate(&[]);
    let stop: String = whole.chars().skip(2).take(2).collect();
    assert_eq!(
        generate(&["--stop", "never in there", "--stop", &stop]).trim_end_matches('\n'),
        &whole[..whole.find(&stop).unwrap()]
    );
    let refused = runs.evaluator(&["generate", "--model", "full", "--prompt", "a", "--stop", ""], "");
    runs.refuses(&refused, 2, &["--stop '': expected a text that is not empty"]);
}

/// The context holds two turns, not many.
#[test]
fn a_long_chat_drops_its_oldest_turns_with_a_warning() {
    let runs = TrainedRuns::shared();
    let lines = "What comes after 3?\n".repeat(12) + &"much too long ".repeat(100) + "\nWhat comes after 3?\n";
    let output = ok(runs.evaluator(&["chat", "--model", "full", "--max-new-tokens", "20"], &lines));
    let said = text(&output.stderr);
    assert!(said.contains("note: the context is full: the oldest 2 messages were dropped"), "{said}");
    assert!(said.contains("the model's context has 128") && said.contains("shorten the message"), "{said}");
    assert!(text(&output.stdout).lines().count() >= 13);
}

#[test]
fn the_context_bounds_prompts_and_answers() {
    let runs = TrainedRuns::shared();
    let long = "word ".repeat(200);
    let generate = |arguments: &[&str]| runs.evaluator(&[&["generate", "--model", "full"], arguments].concat(), "");
    runs.refuses(&generate(&["--prompt", &long]), 3, &["failed to generate: the prompt has", "context has 128"]);
    runs.refuses(&generate(&["--prompt", "a", "--max-new-tokens", "99999999999"]), 2, &["context has 128 tokens"]);
    runs.refuses(&generate(&["--prompt", "a", "--temperature", "nan"]), 2, &["--temperature NaN"]);
    let score = runs.evaluator(&["score", "--model", "full", "--text", &long], "");
    runs.refuses(&score, 3, &["failed to score text: it has", "context has 128"]);
    // The context has a position for this token, but not for the next.
    let full = ok(generate(&["--raw", "--prompt", "a", "--max-new-tokens", "127", "--temperature", "50"]));
    assert!(!text(&full.stdout).is_empty());
}

#[test]
fn weights_that_are_not_finite_are_an_error_everywhere() {
    let runs = TrainedRuns::shared();
    let broken = runs.path("broken");
    fs::create_dir_all(&broken).unwrap();
    for entry in fs::read_dir(runs.path("full/model/global_step_24")).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&entry, broken.join(entry.file_name().unwrap())).unwrap();
    }
    let weights = broken.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let n_bytes = bytes.len();
    bytes[n_bytes - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&weights, bytes).unwrap();
    runs.write("requests.jsonl", "{\"type\": \"generate_until\", \"context\": \"a\", \"max_gen_toks\": 8}\n");
    for arguments in [
        &["generate", "--model", "broken", "--prompt", "a"][..],
        &["chat", "--model", "broken"],
        &["score", "--model", "broken", "--text", "some text"],
        &["score", "--model", "broken", "--data", "eval.jsonl"],
        &["answer", "requests.jsonl", "--model", "broken"],
    ] {
        let output = runs.evaluator(arguments, "hello\n");
        runs.refuses(&output, 5, &["not finite"]);
        assert_eq!(text(&output.stdout).trim(), "", "{arguments:?}");
    }
}
