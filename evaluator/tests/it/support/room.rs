//! A folder with what `evaluator run` needs.
#![allow(dead_code, clippy::unwrap_used, missing_docs, unreachable_pub)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::support;

/// A folder with a tiny model, its data and two tasks.
pub struct Room {
    folder: tempfile::TempDir,
    model: PathBuf,
}

impl Room {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = support::export(folder.path(), 1);
        let room = Self { folder, model };
        let rows = (0..30).map(|i| {
            let choices = ["wolf", "cloud", "a b c", "yes"];
            json!({"q": format!("Say {} {i} times.", choices[i % 4]), "choices": choices, "gold": i % 4}).to_string()
        });
        room.write("data.jsonl", &(rows.collect::<Vec<_>>().join("\n") + "\n"));
        let data = room.path("data.jsonl");
        let head = |name: &str, kind: &str| {
            format!(
                "task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {}\ntest_split: test\n\
                 output_type: {kind}\ndoc_to_text: \"Q: {{{{q}}}}\\nA:\"\n",
                data.display()
            )
        };
        room.write(
            "choose.yaml",
            &(head("choose", "multiple_choice")
                + "doc_to_choice: choices\ndoc_to_target: gold\nmetric_list:\n  - metric: acc\n"),
        );
        room.write(
            "speak.yaml",
            &(head("speak", "generate_until")
                + "doc_to_target: \"{{choices[gold]}}\"\ngeneration_kwargs:\n  until: [\"e\"]\n  max_gen_toks: 12\n\
                   metric_list:\n  - metric: exact_match\n"),
        );
        room.write(
            "texts.yaml",
            &(head("texts", "loglikelihood_rolling").replace("doc_to_text: \"Q: {{q}}\\nA:\"", "doc_to_text: \"\"")
                + "doc_to_target: q\nmetric_list:\n  - metric: byte_perplexity\n"),
        );
        room
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// The program with the room's model.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.evaluator(arguments);
        command.arg("--model").arg(&self.model).args(["--device", "cpu"]);
        command
    }

    /// The program.
    pub fn evaluator(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evaluator"));
        command.args(arguments);
        command.current_dir(self.folder.path()).env("HF_HUB_OFFLINE", "1").env("RAYON_NUM_THREADS", "2");
        for name in ["RANK", "WORLD_SIZE", "RUST_BACKTRACE", "RUST_LOG"] {
            command.env_remove(name);
        }
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        let tasks = ["run", "--tasks", "choose,speak", "--include_path", "choose.yaml", "--include-path", "speak.yaml"];
        self.command(&[&tasks[..], arguments].concat()).output().unwrap()
    }

    /// The one file of the output folder whose name begins so.
    pub fn written(&self, output: &str, beginning: &str) -> PathBuf {
        self.written_with(output, beginning, "")
    }

    /// The same of those whose name ends so.
    pub fn written_with(&self, output: &str, beginning: &str, end: &str) -> PathBuf {
        let folder = fs::read_dir(self.path(output)).unwrap().next().unwrap().unwrap().path();
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let is_wanted = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with(beginning) && name.ends_with(end)
        };
        names.filter(is_wanted).max().unwrap()
    }
}

#[track_caller]
pub fn success(output: Output) -> Output {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

pub fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}
