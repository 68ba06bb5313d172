//! Runs whose peak memory tests compare with the estimate.
#![allow(dead_code, unreachable_pub)]

use std::path::Path;

use candlewick_text::hub::{Hub, HubSettings};
use serde_json::{Value, json};
use trainer::estimate::{DeviceKind, Estimate, Setup, estimate, format_bytes};
use trainer::metrics::Console;
use trainer::plan::Plan;
use trainer::recipe::Loaded;
use trainer::resolve::{Environment, HubAccess, HubView, WorldInfo};

/// A causal run of two steps over a generated text, on a small model with random weights.
fn recipe(folder: &Path) -> Value {
    let text: String = (0..3000).map(|i| format!("After {i} comes {}, and before it {}.\n", i + 1, i - 1)).collect();
    std::fs::write(folder.join("text.txt"), text).unwrap();
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("recipes/quickstart/tokenizer");
    json!({
        "type": "causal",
        "device": "cpu",
        "output_dir": folder.join("run"),
        "train_iters": 2,
        "model": {"dtype": "f32", "config": {
            "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        }},
        "tokenizer": {"name_or_path": tokenizer},
        "data": {
            "sources": [folder.join("text.txt")], "max_length": 512, "truncation": "split",
            "cache_dir": folder.join("cache"),
        },
        "scheduler": {"name": "constant"},
        "checkpoint": "none",
    })
}

/// Writes tasks on generated documents. `writes` has prompts that fill the context and share no prefix. `scores` has short
/// questions after one long text.
fn tasks(folder: &Path) {
    let numbers = |from: usize, n: usize| (from..from + n).map(|i| (i * 7919 % 10_000).to_string()).collect::<Vec<_>>();
    let data = |name: &str, n: usize| {
        let rows: Vec<String> =
            (0..400).map(|i| json!({"q": numbers(i * n, n).join(" "), "a": "1"}).to_string()).collect();
        let path = folder.join(format!("{name}.jsonl"));
        std::fs::write(&path, rows.join("\n")).unwrap();
        path
    };
    let task = |name: &str, n: usize, rest: Value| {
        let mut task = json!({
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": data(name, n)}},
            "test_split": "test", "doc_to_text": "q", "doc_to_target": "a",
        });
        task.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        std::fs::write(folder.join(format!("{name}.yaml")), task.to_string()).unwrap();
    };
    task(
        "writes",
        150,
        json!({"output_type": "generate_until", "generation_kwargs": {"until": []},
        "metric_list": [{"metric": "exact_match"}]}),
    );
    task("scores", 5, json!({"output_type": "loglikelihood", "description": numbers(1, 190).join(" ")}));
}

/// A recipe in a folder of its own, its arguments and its plan.
pub struct Case {
    pub folder: tempfile::TempDir,
    pub arguments: Vec<String>,
    pub plan: Plan,
}

impl Case {
    pub fn new(arguments: &[&str]) -> Self {
        Self::on_ranks(1, arguments)
    }

    /// Resolves the plan of rank 0 of `n_ranks`.
    pub fn on_ranks(n_ranks: usize, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = recipe(folder.path()).to_string();
        tasks(folder.path());
        let path = folder.path().join("recipe.yaml");
        std::fs::write(&path, &text).unwrap();
        let at = folder.path().display();
        let text_file = folder.path().join("text.txt").display().to_string();
        let save = |more: &str| format!("checkpoint=[{{output_dir: {at}/saves, save_every_n_steps: 1{more}}}]");
        let tasks = |rest: &str| format!("eval={{include_path: [{at}], interval: 2, bootstrap_iters: 0, {rest}}}");
        let argument = |argument: &&str| match *argument {
            "save" => save(""),
            "save in the background" => save(", async_save: true"),
            "tasks that write" => tasks("tasks: [writes], limit: 72, max_length: 256, max_gen_toks: 24"),
            "tasks that score" => tasks("tasks: [scores], max_length: 1024"),
            other => other.replace('$', &text_file),
        };
        let arguments: Vec<String> = arguments.iter().map(argument).collect();
        let loaded = Loaded::parse(&path, text, &arguments).unwrap();
        let hub = Hub::new(HubSettings::new("cache")).unwrap();
        let view = HubView { hub: &hub, access: HubAccess::ThisMachine };
        let known = Environment::gather(&loaded, view, Console::Quiet, WorldInfo::first_of(n_ranks)).unwrap();
        let plan = Plan::resolve(&loaded, &known).unwrap();
        Self { folder, arguments, plan }
    }

    pub fn estimate(&self) -> Estimate {
        estimate(&Setup::of(&self.plan, DeviceKind::Cpu).unwrap())
    }

    #[track_caller]
    pub fn compare(&self, estimated: u64, measured: u64, tolerance: f64) {
        eprintln!(
            "{} estimated, {} measured, {:.3}: {:?}",
            format_bytes(estimated),
            format_bytes(measured),
            estimated as f64 / measured as f64,
            self.arguments
        );
        assert!(
            is_near(estimated, measured, tolerance),
            "estimated {estimated}, measured {measured}: {:?}",
            self.arguments
        );
    }
}

pub fn is_near(estimated: u64, measured: u64, tolerance: f64) -> bool {
    (estimated as f64 / measured as f64 - 1.0).abs() < tolerance
}
