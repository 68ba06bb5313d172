//! Use of a trained model: found by its run folder, merged, chatted with, and evaluated as in training.

mod chat;
mod completions;
mod derived;
mod eval_loss;
mod folders;
mod ranks;

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

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

    /// Copies the files of the fully fine-tuned model into a new folder.
    fn copy_model(&self, name: &str) -> PathBuf {
        let copy = self.path(name);
        fs::create_dir_all(&copy).unwrap();
        for entry in fs::read_dir(self.path("full/model/global_step_24")).unwrap().map(Result::unwrap) {
            fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
        }
        copy
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
