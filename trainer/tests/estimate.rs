//! What a run allocates, counted, beside what the estimate says of it.
#![allow(clippy::unwrap_used, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use candlewick_text::hub::{Hub, HubSettings};
use serde_json::{Value, json};
use trainer::estimate::{Class, Place, Setup, estimate};
use trainer::metrics::Console;
use trainer::plan::{Known, Plan, Reach};
use trainer::recipe::Loaded;

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator; only counters are added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), SeqCst) + layout.size(), SeqCst);
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), SeqCst) + layout.size(), SeqCst);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the pointer came from `System` with this layout, by the functions above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MIB: f64 = (1 << 20) as f64;

/// A model of a few million parameters whose activations outweigh them, and a text to read.
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

#[test]
fn a_step_allocates_what_the_estimate_says() {
    let none: &[&str] = &[];
    for arguments in [
        none,
        &["model.dtype=bf16"],
        &["model.activation_checkpoint=full"],
        &["model.activation_checkpoint={every: 2}"],
        &["model.activation_checkpoint=offload"],
        &["model.dtype=bf16", "model.activation_checkpoint=full", "data.max_length=2048"],
        &["model.config.vocab_size=30000", "model.config.num_hidden_layers=1"],
        &["model.config.vocab_size=30000", "model.config.num_hidden_layers=1", "model.dtype=bf16"],
        &["model.dtype=bf16", "deepspeed.bf16.bf16_optimizer_states=true", "model.config.num_hidden_layers=12", "data.max_length=64"],
        &["model.dtype=bf16", "deepspeed.bf16.bf16_master_weights_and_grads=true", "model.config.num_hidden_layers=12", "data.max_length=64"],
        &["model.peft_config={r: 16, target_modules: all-linear}"],
        &["model.dtype=bf16", "model.peft_config={r: 16, lora_dropout: 0.1, target_modules: all-linear}"],
        &["model.config.model_type=qwen3"],
        &["model.config.intermediate_size=256", "model.config.num_key_value_heads=4"],
        &["model.dtype=bf16", "model.config.intermediate_size=256", "model.config.num_key_value_heads=4"],
        &["model.attn_implementation=reference"],
        &["gradient_accumulation_steps=3", "data.max_length=256"],
        &["data.max_length=4096", "model.config.num_hidden_layers=1"],
        &["data.max_length=4096", "model.config.num_hidden_layers=2", "model.activation_checkpoint=full"],
    ] {
        check(arguments);
    }
}

fn check(arguments: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let text = recipe(folder.path()).to_string();
    let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
    let loaded = Loaded::parse(Path::new("r.yaml"), text, &arguments).unwrap();
    let plan = Plan::resolve(&loaded, &Known::gather(&loaded, Reach::ThisMachine, Console::Quiet).unwrap()).unwrap();
    let hub = Hub::new(HubSettings { offline: true, ..HubSettings::from_env() }).unwrap();
    trainer::run::prepare_data(&plan, &hub, trainer::run::Began::now()).unwrap();
    let before = LIVE.load(SeqCst);
    PEAK.store(before, SeqCst);
    trainer::run::train(&plan, &hub).unwrap();
    let counted = (PEAK.load(SeqCst) - before) as f64;
    let estimate = estimate(&Setup::of(&plan, Place::Cpu).unwrap());
    let account = &estimate.peak().account;
    let said = (account.total() - account.of(Class::Program) - account.of(Class::Allocator)) as f64;
    eprintln!("{:7.1} MiB counted, {:7.1} said, {:.3}  {arguments:?}", counted / MIB, said / MIB, said / counted);
}
