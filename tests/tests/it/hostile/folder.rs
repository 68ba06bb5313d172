//! A folder with one file of every kind that the programs read: a tiny model, an adapter, rows, a recipe and a task.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candlewick_model::checkpoint::{AuxiliaryFiles, CheckpointExport, DEFAULT_SHARD_BYTES, ExpertTensors};
use candlewick_model::{AdapterFolder, Config, LoraConfig, Model, ParamSpec, fp8_scales_to_json};
use candlewick_ops::Fp8LinearScales;
use rustix::process::Pid;
use serde_json::json;
use suite::{program, root, wait_for_exit};

/// Time limit of a program.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The address space of a run in KiB: it stops a reader of a file without end.
pub(crate) const MEMORY: &str = "6291456";

pub(crate) struct Folder {
    folder: tempfile::TempDir,
}

impl Folder {
    pub(crate) fn new() -> Self {
        let this = Self { folder: tempfile::tempdir().unwrap() };
        let sound = this.folder.path().join("sound");
        write_model(&sound);
        write_texts(&sound);
        this.restore();
        this
    }

    /// Returns the path of the damaged copy of a file.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("used").join(name)
    }

    /// Restores the undamaged folder.
    pub(crate) fn restore(&self) {
        let used = self.folder.path().join("used");
        if used.exists() {
            fs::remove_dir_all(&used).unwrap();
        }
        copy(&self.folder.path().join("sound"), &used);
    }

    /// Runs a program in the folder. The first word is its name.
    pub(crate) fn run(&self, words: &[&str]) -> Result<Output, String> {
        self.run_within(MEMORY, words)
    }

    /// Runs a program with an address space of this number of KiB.
    pub(crate) fn run_within(&self, memory: &str, words: &[&str]) -> Result<Output, String> {
        self.run_command(&mut self.command(memory, words), words)
    }

    /// Runs a program in the folder with more environment variables.
    pub(crate) fn run_with(&self, variables: &[(&str, &str)], words: &[&str]) -> Result<Output, String> {
        self.run_command(self.command(MEMORY, words).envs(variables.iter().copied()), words)
    }

    /// Returns the command of a program in the folder.
    pub(crate) fn command(&self, memory: &str, words: &[&str]) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -v $0; exec \"$@\"", memory]).arg(program(words[0]));
        command.args(&words[1..]).current_dir(self.folder.path().join("used"));
        command.env("HF_HUB_OFFLINE", "1").env("RAYON_NUM_THREADS", "2").env("HOME", self.folder.path());
        for name in ["RANK", "WORLD_SIZE", "RUST_BACKTRACE", "RUST_LOG", "XDG_CACHE_HOME"] {
            command.env_remove(name);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    fn run_command(&self, command: &mut Command, words: &[&str]) -> Result<Output, String> {
        let err = fs::File::create(self.folder.path().join("stderr")).unwrap();
        let mut child = command.stderr(err).spawn().unwrap();
        if !wait_for_exit(&[Pid::from_child(&child)], TIMEOUT).is_empty() {
            child.kill().unwrap();
            child.wait().unwrap();
            return Err(format!("{words:?} does not end"));
        }
        let status = child.wait().unwrap();
        let stderr = fs::read(self.folder.path().join("stderr")).unwrap();
        Ok(Output { status, stdout: Vec::new(), stderr })
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        match from.is_dir() {
            true => copy(&from, &to),
            false => assert!(fs::copy(&from, &to).is_ok()),
        }
    }
}

fn write_model(folder: &Path) {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 256, "initializer_range": 0.3, "dtype": "float32",
    });
    let lora = LoraConfig::from_json(&json!({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]})).unwrap();
    let model = Model::new(Config::from_json(config).unwrap(), Some(lora)).unwrap();
    let tokenizer = root().join("recipes/quickstart/tokenizer");
    let auxiliary_files = AuxiliaryFiles { folders: &[&tokenizer], chat_template: None, files: &[] };
    let random = |spec: &ParamSpec| {
        let mut values = vec![0.0; spec.numel()];
        spec.initialise(1, &mut values);
        Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
    };
    let (config, dtype, shard_bytes) = (model.config(), DType::F32, DEFAULT_SHARD_BYTES);
    let export = CheckpointExport {
        folder: &folder.join("model"),
        config,
        auxiliary_files,
        dtype,
        shard_bytes,
        expert_tensors: ExpertTensors::Separate,
    };
    export.save(model.base_params(), random).unwrap();
    fs::write(folder.join("model/generation_config.json"), r#"{"eos_token_id": 0}"#).unwrap();
    let scales = ("model.layers.0.mlp.up_proj".to_owned(), vec![Fp8LinearScales { input: 2.0, weight: 8.0 }]);
    fs::write(folder.join("model/fp8_scales.json"), fp8_scales_to_json(&[scales].into(), config)).unwrap();
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.join("model/tokenizer_config.json")).unwrap()).unwrap();
    fs::write(folder.join("model/chat_template.jinja"), config["chat_template"].as_str().unwrap()).unwrap();
    AdapterFolder::save(&folder.join("adapter"), &model, dtype, auxiliary_files, random).unwrap();
}

fn write_texts(folder: &Path) {
    let chat = |i: usize| json!({"messages": [{"role": "user", "content": format!("Say {i}.")}, {"role": "assistant", "content": "Yes."}]});
    let rows = |row: &dyn Fn(usize) -> serde_json::Value| (0..8).map(|i| row(i).to_string() + "\n").collect::<String>();
    fs::write(folder.join("chats.jsonl"), rows(&chat)).unwrap();
    let question = |i: usize| json!({"q": format!("Say {i}."), "choices": ["yes", "no"], "gold": i % 2});
    fs::write(folder.join("questions.jsonl"), rows(&question)).unwrap();
    let request = |_| json!({"type": "loglikelihood", "context": "One", "continuation": " two"});
    fs::write(folder.join("requests.jsonl"), rows(&request)).unwrap();
    fs::write(
        folder.join("task.yaml"),
        "task: choose\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: questions.jsonl\ntest_split: test\n\
         output_type: multiple_choice\ndoc_to_text: \"Q: {{q}} A:\"\ndoc_to_choice: choices\ndoc_to_target: gold\n\
         metric_list:\n  - metric: acc\n",
    )
    .unwrap();
    fs::write(
        folder.join("recipe.yaml"),
        "type: sft\noutput_dir: run\ntrain_iters: 1\ndevice: cpu\nmodel:\n  name_or_path: model\n  dtype: f32\ndata:\n  \
         sources: [chats.jsonl]\n  max_length: 128\n  cache_dir: cache\noptimizer:\n  learning_rate: 1e-3\n",
    )
    .unwrap();
}
