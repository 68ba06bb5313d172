//! A cache of the Hub with tiny models and data sets under the ids of the pages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::{Value, json};
use suite::{program, root};

use crate::hub_server::Repo;

const COMMIT: &str = "0123456789012345678901234567890123456789";

/// The models of the pages, with the architecture of the tiny model that replaces each.
const MODELS: &[(&str, &str)] = &[
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "llama"),
    ("meta-llama/Llama-3.2-1B-Instruct", "llama"),
    ("Qwen/Qwen3-0.6B", "qwen3"),
];

/// The cache, which tests copy.
pub(super) struct HubCache(tempfile::TempDir);

impl HubCache {
    /// Returns the cache, which the tests of a process share.
    pub(super) fn shared() -> &'static Self {
        static SHARED: OnceLock<HubCache> = OnceLock::new();
        SHARED.get_or_init(|| {
            let cache = Self(tempfile::tempdir().unwrap());
            for model_type in ["llama", "qwen3"] {
                let model = cache.train(model_type);
                for (id, _) in MODELS.iter().filter(|(_, of)| *of == model_type) {
                    copy(&model, &cache.snapshot(&format!("models--{}", id.replace('/', "--"))));
                }
            }
            cache.add_config("meta-llama/Llama-3.1-8B-Instruct");
            cache.add_data();
            cache
        })
    }

    /// Copies the cache into a folder.
    pub(super) fn copy_to(&self, folder: &Path) {
        copy(&self.0.path().join("hub"), folder);
    }

    /// Returns the repositories, as a server has them.
    pub(super) fn repositories(&self) -> Vec<Repo> {
        let hub = self.0.path().join("hub");
        let names = fs::read_dir(&hub).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let repository = |name: String| {
            let snapshot = hub.join(&name).join("snapshots").join(COMMIT);
            add_files(Repo::new(&name.replace("--", "/"), &[]), &snapshot, "")
        };
        names.map(repository).collect()
    }

    /// Returns the snapshot folder of a repository, and makes its branch main point there.
    fn snapshot(&self, repo: &str) -> PathBuf {
        let repo = self.0.path().join("hub").join(repo);
        fs::create_dir_all(repo.join("refs")).unwrap();
        fs::write(repo.join("refs/main"), COMMIT).unwrap();
        repo.join("snapshots").join(COMMIT)
    }

    /// Trains a tiny model for a step, and returns its folder. It has the tokenizer and chat template of SmolLM2.
    fn train(&self, model_type: &str) -> PathBuf {
        let config = json!({
            "model_type": model_type, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 49152,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": true,
        });
        let recipe = json!({
            "type": "sft", "output_dir": model_type, "train_iters": 1, "model": {"dtype": "f32", "config": config},
            "tokenizer": {"name_or_path": root().join("candle-ext/text/tests/fixtures/chat/smollm2")},
            "data": {"sources": [root().join("recipes/chats/chats.jsonl")], "max_length": 512, "cache_dir": "tokens"},
            "checkpoint": {"type": "huggingface", "output_dir": model_type, "dtype": "bf16", "save_end_of_training": true},
        });
        fs::write(self.0.path().join("base.yaml"), recipe.to_string()).unwrap();
        let mut command = Command::new(program("trainer"));
        command.args(["-q", "train", "base.yaml"]).current_dir(self.0.path()).env("RAYON_NUM_THREADS", "2");
        let output = command.env_remove("RANK").env_remove("WORLD_SIZE").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        self.0.path().join(model_type).join("latest")
    }

    /// Adds the config of a model without its weights, which is enough for an estimate.
    fn add_config(&self, id: &str) {
        let file = format!("tests/tests/fixtures/configs/{}.json", id.rsplit('/').next().unwrap());
        let snapshot = self.snapshot(&format!("models--{}", id.replace('/', "--")));
        fs::create_dir_all(&snapshot).unwrap();
        fs::copy(root().join(file), snapshot.join("config.json")).unwrap();
    }

    /// Adds rows of each data set of the pages.
    fn add_data(&self) {
        let arc = json!({
            "question": "Which animal barks?", "choices": {"text": ["a dog", "a cat"], "label": ["A", "B"]},
            "answerKey": "A",
        });
        let piqa = json!({"goal": "Cut bread", "sol1": "use a knife", "sol2": "use a spoon", "label": 0});
        let sum = json!({"question": "What is 4 plus 2?", "answer": "4 + 2 = <<4+2=6>>6\n#### 6"});
        let chat = json!({"messages": [
            {"role": "user", "content": "What comes after 3?"}, {"role": "assistant", "content": "4"},
        ]});
        for split in ["train", "test"] {
            self.add_file("datasets--allenai--ai2_arc", &format!("ARC-Easy/{split}.jsonl"), &arc);
            self.add_file("datasets--openai--gsm8k", &format!("main/{split}.jsonl"), &sum);
            let ultrachat = "datasets--HuggingFaceH4--ultrachat_200k";
            self.add_file(ultrachat, &format!("data/{split}_sft-00000-of-00001.jsonl"), &chat);
        }
        for split in ["train", "validation"] {
            self.add_file("datasets--baber--piqa", &format!("{split}.jsonl"), &piqa);
        }
    }

    /// Adds a file with equal rows to a data set.
    fn add_file(&self, repo: &str, name: &str, row: &Value) {
        let file = self.snapshot(repo).join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, format!("{row}\n").repeat(300)).unwrap();
    }
}

/// Adds the files of a folder and of its subfolders to a repository, below a path that ends with a slash.
fn add_files(repository: Repo, folder: &Path, below: &str) -> Repo {
    fs::read_dir(folder).unwrap().map(Result::unwrap).fold(repository, |repository, entry| {
        let name = format!("{below}{}", entry.file_name().to_str().unwrap());
        match entry.path().is_dir() {
            true => add_files(repository, &entry.path(), &format!("{name}/")),
            false => repository.with(&name, &fs::read(entry.path()).unwrap()),
        }
    })
}

/// Copies the files of a folder and of its subfolders.
pub(super) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        match path.is_dir() {
            true => copy(&path, &to),
            false => drop(fs::copy(path, to).unwrap()),
        }
    }
}
