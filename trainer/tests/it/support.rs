//! Tiny training run in a folder of its own: recipe, data, and the `trainer` binary.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

pub(crate) struct Run {
    folder: tempfile::TempDir,
}

impl Run {
    pub(crate) fn new() -> Self {
        let run = Self { folder: tempfile::tempdir().unwrap() };
        run.write("train.jsonl", &rows(0..80));
        run.write("eval.jsonl", &rows(80..90));
        run.write("recipe.yaml", &recipe(run.path()));
        run
    }

    /// Returns a run of a mixture of experts.
    pub(crate) fn of_experts() -> Self {
        let run = Self::new();
        run.edit("LlamaForCausalLM", "Qwen3MoeForCausalLM");
        run.edit("model_type: llama", "model_type: qwen3_moe\n    head_dim: 8");
        let experts =
            "num_experts: 8\n    num_experts_per_tok: 2\n    moe_intermediate_size: 16\n    norm_topk_prob: true";
        run.edit("    rms_norm_eps", &format!("    {experts}\n    rms_norm_eps"));
        run
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.path().join(name), text).unwrap();
    }

    /// Writes a file that no run wrote, and creates its folders.
    pub(crate) fn write_foreign(&self, name: &str) {
        fs::create_dir_all(self.path().join(name).parent().unwrap()).unwrap();
        self.write(name, "years of work");
    }

    /// Replaces `from`, which must occur, in the recipe.
    pub(crate) fn edit(&self, from: &str, to: &str) {
        let path = self.path().join("recipe.yaml");
        let recipe = fs::read_to_string(&path).unwrap();
        assert!(recipe.contains(from), "{from} is not in the recipe");
        fs::write(path, recipe.replace(from, to)).unwrap();
    }

    pub(crate) fn command(&self, subcommand: &str, overrides: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
        command.arg(subcommand).arg(self.path().join("recipe.yaml")).args(overrides);
        command.current_dir(self.path()).stdin(Stdio::null()).env("RAYON_NUM_THREADS", "2").env("HF_HUB_OFFLINE", "1");
        command.env_remove("RUST_BACKTRACE").env_remove("RUST_LOG");
        command
    }

    pub(crate) fn train(&self, overrides: &[&str]) -> Output {
        self.command("train", overrides).output().unwrap()
    }

    /// Starts training, whose log the test reads.
    pub(crate) fn start_training(&self, overrides: &[&str]) -> Started {
        Started::spawn(self.command("train", overrides))
    }

    /// Trains and checks for success.
    pub(crate) fn train_ok(&self, overrides: &[&str]) {
        let output = self.train(overrides);
        assert!(output.status.success(), "{}", stderr(&output));
    }

    /// Replays a batch that the run kept. Relative paths of the recipe do not start at this folder.
    pub(crate) fn replay(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
        command.arg("replay").arg(self.path().join("run")).args(arguments).current_dir("/");
        command.env("RAYON_NUM_THREADS", "2").env("HF_HUB_OFFLINE", "1").env_remove("RUST_BACKTRACE");
        command.output().unwrap()
    }

    /// Returns run.json of the last start.
    pub(crate) fn report(&self) -> serde_json::Value {
        serde_json::from_slice(&fs::read(self.path().join("run/run.json")).unwrap()).unwrap()
    }

    /// Checks that the last start resumed from a checkpoint and continued the metrics file.
    #[track_caller]
    pub(crate) fn assert_resumed(&self) {
        assert!(self.report()["resumed_from"].is_string(), "{}", self.report()["resumed_from"]);
        assert!(!self.path().join("run/metrics.1.jsonl").exists(), "the metrics file was not continued");
    }

    pub(crate) fn metrics(&self) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(self.path().join("run/metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the training losses by step.
    pub(crate) fn losses(&self) -> Vec<f64> {
        self.metrics().iter().filter_map(|record| record["loss"].as_f64()).collect()
    }

    /// Returns the bytes of the latest exported weights.
    pub(crate) fn exported(&self) -> Vec<u8> {
        let weights = ["model.safetensors", "adapter_model.safetensors"].map(|name| self.export_folder().join(name));
        fs::read(weights.iter().find(|path| path.exists()).unwrap()).unwrap()
    }

    /// Returns the folder of the latest export.
    pub(crate) fn export_folder(&self) -> PathBuf {
        fs::canonicalize(self.path().join("hf/latest")).unwrap()
    }

    /// Returns the exports in a folder, by step.
    pub(crate) fn exports(&self, folder: &str) -> Vec<(usize, PathBuf)> {
        let Ok(entries) = fs::read_dir(self.path().join(folder)) else { return Vec::new() };
        let step = |path: &Path| path.file_name()?.to_str()?.strip_prefix("global_step_")?.parse().ok();
        let paths = entries.map(|entry| entry.unwrap().path());
        let mut exports: Vec<(usize, PathBuf)> = paths.filter_map(|path| Some((step(&path)?, path))).collect();
        exports.sort();
        exports
    }

    pub(crate) fn has_exports(&self) -> bool {
        !self.exports("hf").is_empty()
    }
}

/// Training process, and its log as far as it was read.
pub(crate) struct Started {
    child: Child,
    stderr: BufReader<ChildStderr>,
    log: String,
}

impl Started {
    /// Starts a command.
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Self { child, stderr, log: String::new() }
    }

    /// Reads the log until a line contains `words`.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, words: &str) {
        let mut line = String::new();
        while !line.contains(words) {
            line.clear();
            assert!(self.stderr.read_line(&mut line).unwrap() > 0, "no {words:?} in:\n{}", self.log);
            self.log.push_str(&line);
        }
    }

    pub(crate) fn send(&self, signal: i32) {
        // SAFETY: kill(2) touches no memory, and the child has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Waits for the end; returns the exit code and the log.
    pub(crate) fn finish(mut self) -> (Option<i32>, String) {
        self.stderr.read_to_string(&mut self.log).unwrap();
        (self.child.wait().unwrap().code(), self.log)
    }
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn rows(numbers: std::ops::Range<usize>) -> String {
    let row = |i: usize| {
        let question = format!("What comes after {i}?");
        let answer = format!("{} comes after {i}. {}", i + 1, "Yes. ".repeat(i % 5));
        let messages = serde_json::json!([
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer.trim()},
        ]);
        serde_json::json!({ "messages": messages }).to_string() + "\n"
    };
    numbers.map(row).collect()
}

fn recipe(folder: &Path) -> String {
    let tokenizer = workspace().join("recipes/quickstart/tokenizer");
    let tokenizer = tokenizer.display();
    let folder = folder.display();
    format!(
        "type: sft
output_dir: {folder}/run
train_iters: 24
micro_batch_size: 2
gradient_accumulation_steps: 2
eval_interval: 12
seed: 7
model:
  dtype: float32
  config:
    architectures: [LlamaForCausalLM]
    model_type: llama
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    vocab_size: 1024
    max_position_embeddings: 256
    rms_norm_eps: 1.0e-5
    rope_theta: 10000.0
    tie_word_embeddings: true
tokenizer:
  name_or_path: {tokenizer}
data:
  sources: [{folder}/train.jsonl]
  eval_sources: [{folder}/eval.jsonl]
  max_length: 96
  cache_dir: {folder}/cache
optimizer:
  learning_rate: 1e-2
scheduler:
  name: cosine
checkpoint:
  - type: sharded
    output_dir: {folder}/checkpoints
    auto_resume: true
    save_every_n_steps: 5
  - type: huggingface
    output_dir: {folder}/hf
    save_end_of_training: true
"
    )
}
