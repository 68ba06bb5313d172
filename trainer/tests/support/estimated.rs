//! A run whose memory is measured, and what the estimate says of it.
#![allow(dead_code, unreachable_pub)]

use std::path::Path;

use serde_json::{Value, json};
use trainer::estimate::{Estimate, Place, Setup, bytes, estimate};
use trainer::metrics::Console;
use trainer::plan::{Known, Plan, Reach, Seat};
use trainer::recipe::Loaded;

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
            "sources": [folder.join("text.txt")], "max_length": 512, "overlong": "split",
            "cache_dir": folder.join("cache"),
        },
        "scheduler": {"name": "constant"},
    })
}

/// A recipe in a folder of its own, with arguments, and its plan.
pub struct Case {
    pub folder: tempfile::TempDir,
    pub arguments: Vec<String>,
    pub plan: Plan,
}

impl Case {
    pub fn new(arguments: &[&str]) -> Self {
        Self::on_ranks(1, arguments)
    }

    /// Of the first of some ranks.
    pub fn on_ranks(n_ranks: usize, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = recipe(folder.path()).to_string();
        let path = folder.path().join("recipe.yaml");
        std::fs::write(&path, &text).unwrap();
        let save =
            format!("checkpoint=[{{output_dir: {}, save_every_n_steps: 1}}]", folder.path().join("saves").display());
        let text_file = folder.path().join("text.txt").display().to_string();
        let arguments = arguments.iter().map(|a| if *a == "save" { save.clone() } else { a.replace('$', &text_file) });
        let arguments: Vec<String> = arguments.collect();
        let loaded = Loaded::parse(&path, text, &arguments).unwrap();
        let known = Known::gather(&loaded, Reach::ThisMachine, Console::Quiet, Seat::first_of(n_ranks)).unwrap();
        let plan = Plan::resolve(&loaded, &known).unwrap();
        Self { folder, arguments, plan }
    }

    pub fn estimate(&self) -> Estimate {
        estimate(&Setup::of(&self.plan, Place::Cpu).unwrap())
    }

    #[track_caller]
    pub fn compare(&self, said: u64, measured: u64, tolerance: f64) {
        let ratio = said as f64 / measured as f64;
        eprintln!("{} said, {} measured, {ratio:.3}: {:?}", bytes(said), bytes(measured), self.arguments);
        assert!((ratio - 1.0).abs() < tolerance, "said {said}, measured {measured}: {:?}", self.arguments);
    }
}
