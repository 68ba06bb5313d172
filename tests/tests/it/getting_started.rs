//! The commands of the first pages run as printed, on a tiny model with the documented id in the Hub's cache.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use suite::{program, read, root};

/// A fenced block of a page.
struct Block<'a> {
    language: &'a str,
    text: &'a str,
}

/// A folder in which a reader follows a page, with a Hub cache next to it.
struct Reader {
    folder: tempfile::TempDir,
    outputs: Vec<(String, Output)>,
}

const COMMIT: &str = "0123456789012345678901234567890123456789";

impl Reader {
    /// Creates the folder with the recipes' chats, and caches a tiny model as `model_id`.
    fn new(model_id: &str) -> Self {
        let reader = Self { folder: tempfile::tempdir().unwrap(), outputs: Vec::new() };
        copy_files(&root().join("recipes/chats"), &reader.path("recipes/chats"));
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": true,
        });
        let recipe = json!({
            "type": "sft", "output_dir": "base", "train_iters": 1, "model": {"dtype": "f32", "config": config},
            "tokenizer": {"name_or_path": root().join("recipes/quickstart/tokenizer")},
            "data": {"sources": ["recipes/chats/chats.jsonl"], "max_length": 512},
        });
        reader.write("base.yaml", &recipe.to_string());
        succeeds("base model", &reader.run("trainer train base.yaml"));
        let snapshot = reader.cached(&format!("models--{}", model_id.replace('/', "--")));
        copy_files(&reader.path("base/model/latest"), &snapshot);
        reader
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Returns the snapshot folder of a repository in the Hub cache, and makes its branch main point there.
    fn cached(&self, repo: &str) -> PathBuf {
        let repo = self.path("hf-home/hub").join(repo);
        fs::create_dir_all(repo.join("refs")).unwrap();
        fs::write(repo.join("refs/main"), COMMIT).unwrap();
        repo.join("snapshots").join(COMMIT)
    }

    /// Runs a command line in a shell, as the reader does, without a network.
    fn run(&self, line: &str) -> Output {
        let programs = program("trainer").parent().unwrap().display().to_string();
        let path = format!("{programs}:{}", std::env::var("PATH").unwrap_or_default());
        let mut command = Command::new("sh");
        command.args(["-c", line]).current_dir(self.folder.path()).env("PATH", path).env("RAYON_NUM_THREADS", "2");
        command.env("HF_HOME", self.path("hf-home")).env("HF_HUB_OFFLINE", "1");
        command.env("XDG_CACHE_HOME", self.path("cache"));
        for name in ["RUST_BACKTRACE", "RUST_LOG", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "RANK", "WORLD_SIZE"] {
            command.env_remove(name);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // Only a chat reads its input.
        let _ = child.stdin.take().unwrap().write_all(b"How do I resume a run?\n/quit\n");
        child.wait_with_output().unwrap()
    }

    /// Writes the recipes of a text, and runs its commands, in the order of the text.
    fn follow(&mut self, markdown: &str) {
        for Block { language, text } in fenced_blocks(markdown) {
            match language {
                "yaml" => self.write(recipe_name(text), text),
                "console" => {
                    for line in commands(text) {
                        let output = self.run(&line);
                        succeeds(&line, &output);
                        self.outputs.push((line, output));
                    }
                }
                _ => {}
            }
        }
    }

    /// Returns the losses that `evaluator score` printed, in order.
    fn losses(&self) -> Vec<f64> {
        let scores = self.outputs.iter().filter(|(line, _)| line.starts_with("evaluator score"));
        scores
            .map(|(_, output)| serde_json::from_slice::<Value>(&output.stdout).unwrap()["loss"].as_f64().unwrap())
            .collect()
    }
}

fn copy_files(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[track_caller]
fn succeeds(line: &str, output: &Output) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{line}\n{}{}", text(&output.stdout), text(&output.stderr));
}

fn fenced_blocks(markdown: &str) -> Vec<Block<'_>> {
    let fences = markdown.split("```").skip(1).step_by(2);
    fences.map(|fence| fence.split_once('\n').unwrap()).map(|(language, text)| Block { language, text }).collect()
}

/// Returns the file name in a recipe's first line, which is a comment.
fn recipe_name(recipe: &str) -> &str {
    let name = recipe.lines().next().and_then(|line| line.strip_prefix("# "));
    name.filter(|name| name.ends_with(".yaml"))
        .unwrap_or_else(|| panic!("no file name in the first line of:\n{recipe}"))
}

/// Returns the commands of a console block. A line that ends with a backslash continues on the next.
fn commands(block: &str) -> Vec<String> {
    let joined = block.replace("\\\n", " ");
    joined.lines().filter_map(|line| line.strip_prefix("$ ")).map(str::to_owned).collect()
}

#[test]
fn every_command_of_the_page_getting_started_succeeds() {
    let page = read("docs/getting-started.md");
    let mut reader = Reader::new("HuggingFaceTB/SmolLM2-135M-Instruct");
    let question = json!({
        "question": "Which animal barks?", "choices": {"text": ["a dog", "a cat"], "label": ["A", "B"]}, "answerKey": "A",
    });
    let arc = reader.cached("datasets--allenai--ai2_arc").join("ARC-Easy");
    fs::create_dir_all(&arc).unwrap();
    fs::write(arc.join("test.jsonl"), format!("{question}\n").repeat(20)).unwrap();

    reader.follow(&page);

    assert!(reader.outputs.len() >= 13, "only {} commands", reader.outputs.len());
    let losses = reader.losses();
    assert!(losses.len() == 3 && losses[1] < losses[0] && losses[2] < losses[0], "{losses:?}");
    let written = fs::read_dir(reader.path("results/first")).unwrap().count();
    assert_eq!(written, 1, "one folder for the model's results");
    check_folders(&page, &reader);
    let rows = read("recipes/chats/chats.jsonl");
    let shown = fenced_blocks(&page).into_iter().find(|block| block.language == "json").unwrap();
    assert_eq!(shown.text.trim_end(), rows.lines().next().unwrap(), "the row on the page is the first row of the file");
}

/// Checks that the folders of the Python snippets hold a model or an adapter, and a tokenizer.
fn check_folders(page: &str, reader: &Reader) {
    let snippets = fenced_blocks(page).into_iter().filter(|block| block.language == "python");
    let lines = snippets.flat_map(|block| block.text.lines()).filter(|line| line.starts_with("folder = "));
    let folders: Vec<_> = lines.flat_map(|line| line.split('"').skip(1).step_by(2)).collect();
    assert_eq!(folders.len(), 3, "{folders:?}");
    for folder in folders {
        let has = |name: &str| reader.path(folder).join(name).is_file();
        let is_model = has("config.json") && has("model.safetensors");
        let is_adapter = has("adapter_config.json") && has("adapter_model.safetensors");
        assert!((is_model || is_adapter) && has("tokenizer.json"), "{folder}");
    }
}

#[test]
fn every_command_of_the_readmes_chat_section_succeeds() {
    let readme = read("README.md");
    let section = readme.split("\n## ").find(|section| section.starts_with("Fine-tune on your own chats")).unwrap();
    let mut reader = Reader::new("Qwen/Qwen3-0.6B");
    reader.follow(section);
    assert!(reader.outputs.len() >= 4, "only {} commands", reader.outputs.len());
    assert_eq!(reader.losses().len(), 1);
}
