//! `trainer export`: sources, formats, errors, and the push to a Hub server.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use candle_core::quantized::gguf_file::Content;
use serde_json::{Value, json};
use suite::root;

use crate::hub_server::{FOREVER, HubServer, Reply};

/// A folder with a full fine-tuning run and a LoRA run on its model. Each has a sharded checkpoint and an export.
struct ExportRuns(tempfile::TempDir);

impl ExportRuns {
    /// Returns the runs, shared by all tests of a process, which only read them.
    fn shared() -> &'static Self {
        static SHARED: OnceLock<ExportRuns> = OnceLock::new();
        SHARED.get_or_init(|| {
            let runs = Self(tempfile::tempdir().unwrap());
            let row = |i: usize| {
                let messages = json!([{"role": "user", "content": format!("{i}?")}, {"role": "assistant", "content": "Yes."}]);
                json!({ "messages": messages }).to_string() + "\n"
            };
            fs::write(runs.path("train.jsonl"), (0..20).map(row).collect::<String>()).unwrap();
            let model = json!({
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49152,
                "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": true,
            });
            let tokenizer = root().join("candle-ext/text/tests/fixtures/chat/smollm2");
            runs.train("full", &json!({"dtype": "f32", "config": model}), &json!({"name_or_path": tokenizer}));
            let peft = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": "all-linear"});
            let model = json!({"dtype": "f32", "name_or_path": "full", "peft_config": peft});
            let tokenizer = json!({"name_or_path": "full", "chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"});
            runs.train("lora", &model, &tokenizer);
            runs
        })
    }

    fn train(&self, name: &str, model: &Value, tokenizer: &Value) {
        let recipe = json!({
            "type": "sft", "output_dir": name, "train_iters": 3, "device": "cpu", "seed": 7, "model": model,
            "tokenizer": tokenizer,
            "data": {"sources": ["train.jsonl"], "max_length": 96, "cache_dir": "cache"},
            "optimizer": {"learning_rate": 1e-2},
            "checkpoint": [
                {"type": "sharded", "output_dir": format!("{name}/checkpoints"), "save_end_of_training": true},
                {"type": "huggingface", "output_dir": format!("{name}/model"), "save_end_of_training": true},
            ],
        });
        fs::write(self.path(&format!("{name}.yaml")), recipe.to_string()).unwrap();
        ok(self.run(&["-q", "train", &format!("{name}.yaml")], &[]));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, arguments: &[&str], env: &[(&str, &str)]) -> Output {
        let mut command = Command::new(suite::program("trainer"));
        command.args(arguments).current_dir(self.0.path()).env("RAYON_NUM_THREADS", "2");
        command.env("HF_ENDPOINT", "http://127.0.0.1:9").env("HF_HOME", self.path("hf-home"));
        for name in ["RUST_BACKTRACE", "RUST_LOG", "HF_HUB_OFFLINE", "HF_TOKEN", "RANK", "WORLD_SIZE"] {
            command.env_remove(name);
        }
        command.envs(env.iter().copied()).output().unwrap()
    }

    fn export(&self, arguments: &[&str]) -> Output {
        self.run(&[&["export"], arguments].concat(), &[])
    }

    fn read(&self, path: &str) -> Vec<u8> {
        fs::read(self.path(path)).unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn ok(output: Output) -> Output {
    assert!(output.status.success(), "{}", text(&output.stderr));
    output
}

#[track_caller]
fn refused(output: &Output, code: i32, phrases: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}{}", text(&output.stdout));
    phrases.iter().for_each(|phrase| assert!(said.contains(phrase), "{phrase:?} is not in {said:?}"));
    assert!(!said.contains("panicked"), "{said}");
}

#[test]
fn all_sources_of_a_run_give_the_same_weights() {
    let runs = ExportRuns::shared();
    for (run, sharded) in [("full", "full/checkpoints/epoch_0_global_step_3"), ("lora", "lora/checkpoints")] {
        let [of_run, of_checkpoint] = [run, sharded].map(|source| {
            let output = format!("of-{}", source.replace('/', "-"));
            let said = text(&ok(runs.export(&[source, "--output", &output])).stdout);
            assert!(said.contains("read back: largest logit difference 0.00e0"), "{said}");
            assert!(said.contains("14 matrices changed by the adapter") == (run == "lora"), "{said}");
            output
        });
        let weights = runs.read(&format!("{of_run}/model.safetensors"));
        assert!(weights == runs.read(&format!("{of_checkpoint}/model.safetensors")), "{run}");
        for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"] {
            let [a, b] = [&of_run, &of_checkpoint].map(|folder| text(&runs.read(&format!("{folder}/{file}"))));
            assert_eq!(a, b, "{run}: {file}");
        }
    }
    ok(runs.run(&["merge", "lora", "--output", "merged"], &[]));
    assert!(runs.read("merged/model.safetensors") == runs.read("of-lora/model.safetensors"));
    assert_ne!(runs.read("merged/model.safetensors"), runs.read("of-full/model.safetensors"));
}

#[test]
fn a_folder_may_hold_safetensors_and_gguf() {
    let runs = ExportRuns::shared();
    let formats = "safetensors,gguf-f32,gguf-f32,gguf-f16,gguf-bf16,gguf-q8_0,gguf-q4_k_m";
    let arguments = ["lora", "--format", formats, "--dtype", "bf16", "--max-shard-size", "20KB", "--output", "all"];
    let said = text(&ok(runs.export(&arguments)).stdout);
    assert_eq!(said.matches("read back: largest logit difference").count(), 6, "{said}");
    assert!(said.contains("all/all-q4_k_m.gguf: gguf-q4_k_m, 2.8 MB"), "{said}");
    assert!(said.starts_with("all: safetensors, "), "{said}");
    assert!(runs.path("all/model.safetensors.index.json").is_file());
    let content = Content::read(&mut fs::File::open(runs.path("all/all-q8_0.gguf")).unwrap()).unwrap();
    let entry = |key: &str| content.metadata[key].to_string().unwrap().clone();
    assert_eq!(entry("general.name"), "all");
    assert_eq!(entry("tokenizer.ggml.pre"), "smollm");
    assert_eq!(entry("tokenizer.chat_template"), "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}");
    let without = text(&ok(runs.export(&["full", "--skip-check", "--output", "unchecked"])).stdout);
    assert!(without.contains("logits are not compared"), "{without}");
}

#[test]
fn experts_are_exported_as_fused_tensors_on_request() {
    let runs = ExportRuns::shared();
    let experts = root().join("candle-ext/model/tests/fixtures/qwen2_moe");
    let experts = experts.to_str().unwrap();
    let said = text(&ok(runs.export(&[experts, "--expert-tensors", "fused", "--output", "fused-experts"])).stdout);
    assert!(said.contains("largest logit difference 0.00e0"), "{said}");
    let bytes = runs.read("fused-experts/model.safetensors");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor("model.layers.0.mlp.experts.gate_up_proj").unwrap().shape().len(), 3);
    assert!(!tensors.names().iter().any(|name| name.contains(".experts.0.")));
    let dense = runs.export(&["full", "--expert-tensors", "fused", "--output", "no-experts"]);
    refused(&dense, 2, &["--expert-tensors fused: the model has no experts"]);
    let gguf = runs.export(&[experts, "--expert-tensors", "fused", "--format", "gguf-f32", "--output", "no-gguf"]);
    refused(&gguf, 2, &["--expert-tensors are of safetensors"]);
}

/// The files are read from a temporary copy.
#[test]
fn a_tokenizer_that_gguf_cannot_hold_is_named_by_its_model_folder() {
    let runs = ExportRuns::shared();
    copy(&runs.path("full/model/global_step_3"), &runs.path("odd-tokenizer"));
    let path = runs.path("odd-tokenizer/tokenizer.json");
    let whole = fs::read_to_string(&path).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&whole).unwrap();
    tokenizer["pre_tokenizer"] = json!({"type": "Whitespace"});
    for text in [tokenizer.to_string(), whole[..whole.len() / 2].to_owned()] {
        fs::write(&path, text).unwrap();
        let output = runs.export(&["odd-tokenizer", "--format", "gguf-q8_0", "--output", "never"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("odd-tokenizer") && !said.contains(".export-"), "{said}");
    }
}

#[test]
fn a_killed_export_leaves_no_output_and_the_next_one_removes_its_remains() {
    let runs = ExportRuns::shared();
    fs::create_dir(runs.path("killed")).unwrap();
    let names = || {
        let entries = fs::read_dir(runs.path("killed")).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let kill_at = |failpoint: &str, arguments: &[&str]| {
        let output = runs.run(arguments, &[("CANDLEWICK_TEST_KILL_AT", failpoint)]);
        assert_eq!(output.status.signal(), Some(9), "{failpoint}");
        assert!(!names().contains(&"out".to_owned()), "{failpoint}: {:?}", names());
    };
    let export = ["export", "full", "--format", "safetensors,gguf-q8_0", "--output", "killed/out"];
    let merge = ["merge", "lora", "--output", "killed/out"];
    for failpoint in ["export_format:0", "export_format:1", "export_written:0"] {
        kill_at(failpoint, &export);
    }
    kill_at("export_written:0", &merge);
    ok(runs.run(&export, &[]));
    assert_eq!(names(), ["out"]);
    let mut files: Vec<_> =
        fs::read_dir(runs.path("killed/out")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    files.retain(|name| name.to_string_lossy().starts_with('.'));
    assert!(files.is_empty(), "{files:?}");
}

#[test]
fn a_mistake_is_an_error_before_the_export() {
    let runs = ExportRuns::shared();
    fs::create_dir_all(runs.path("occupied/x")).unwrap();
    copy(&runs.path("full/model/global_step_3"), &runs.path("lora-base"));
    let weights = runs.path("lora-base/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    let gguf = ["--format", "gguf-q8_0", "--output", "never"];
    let export = |arguments: &[&str]| runs.export(&[arguments, &gguf].concat());
    refused(&runs.export(&["full", "--output", "occupied"]), 6, &["is not empty"]);
    refused(
        &export(&["full", "--dtype", "bf16"]),
        2,
        &["--dtype, --max-shard-size and --expert-tensors are of safetensors"],
    );
    refused(&export(&["full", "--base", "full"]), 2, &["has no adapter", "--base"]);
    refused(&export(&["full", "--push-to-hub", "me/model"]), 2, &["set HF_TOKEN"]);
    refused(&export(&["full", "--push-to-hub", "model"]), 2, &["OWNER/model"]);
    refused(&export(&["nope"]), 3, &["nope"]);
    refused(&runs.export(&["full", "--format", "gguf-q4", "--output", "never"]), 2, &["gguf-q4_k_m"]);
    let other_base = export(&["lora/checkpoints", "--base", "lora-base"]);
    refused(&other_base, 6, &["it was trained on other weights than those in lora-base", "--base"]);
    let without_run = runs.path("elsewhere/a/b/c");
    copy(&runs.path("full/checkpoints/epoch_0_global_step_3"), &without_run);
    refused(&export(&["elsewhere/a/b/c"]), 3, &["its run.json is missing"]);
    let custom = runs.path("custom");
    copy(&runs.path("full/model/global_step_3"), &custom);
    let tokenizer = root().join("recipes/quickstart/tokenizer/tokenizer.json");
    fs::copy(tokenizer, custom.join("tokenizer.json")).unwrap();
    fs::remove_file(custom.join("tokenizer_config.json")).unwrap();
    refused(&export(&["custom"]), 3, &["llama.cpp does not have the pre_tokenizer"]);
    assert!(!runs.path("never").exists() && !runs.path(".never.tmp").exists());
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&entry, to.join(entry.file_name().unwrap())).unwrap();
    }
}

#[test]
fn an_export_is_pushed_to_a_private_repository_with_a_card() {
    let runs = ExportRuns::shared();
    let server = HubServer::start([]);
    let env = [("HF_ENDPOINT", &*server.endpoint()), ("HF_TOKEN", "hf_secret")];
    let push = |output: &str, more: &[&str]| {
        let arguments = ["export", "full", "--format", "safetensors,gguf-q8_0", "--output", output];
        runs.run(&[&arguments[..], &["--push-to-hub", "me/model"], more].concat(), &env)
    };
    let said = text(&ok(push("pushed", &[])).stdout);
    assert!(said.contains(&format!("pushed to {}/me/model", server.endpoint())), "{said}");
    let repo = server.repo("models/me/model").unwrap();
    assert!(repo.is_private());
    let card = text(repo.file("README.md").unwrap());
    for part in
        ["library_name: transformers", "- gguf", "# me/model", "LlamaForCausalLM with", "| optimizer steps | 3 |"]
    {
        assert!(card.contains(part), "{part} is not in {card}");
    }
    for file in ["model.safetensors", "tokenizer.json", "pushed-q8_0.gguf", "README.md"] {
        assert_eq!(repo.file(file), Some(&*runs.read(&format!("pushed/{file}"))), "{file}");
    }
    server.answer("POST", "/commit/", FOREVER, Reply::new(403, "{\"error\": \"no write access for hf_secret\"}"));
    let output = push("kept", &["--public"]);
    refused(&output, 3, &["push to me/model", "may not write there", "The export is complete in kept", "hf upload"]);
    assert!(!text(&output.stderr).contains("hf_secret"));
    assert!(runs.path("kept/model.safetensors").is_file() && runs.path("kept/kept-q8_0.gguf").is_file());
}
