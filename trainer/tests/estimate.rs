//! What a run allocates, counted, beside what the estimate says of it.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;
use std::process::{Command, Stdio};

use candlewick_text::hub::{Hub, HubSettings};
use peak_alloc::PeakAlloc;
use serde_json::{Value, json};
use trainer::estimate::{Class, Estimate, Place, Setup, bytes, estimate};
use trainer::metrics::Console;
use trainer::plan::{Known, Plan, Reach};
use trainer::recipe::Loaded;
use trainer::run::{Began, prepare_data, train};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

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
struct Case {
    folder: tempfile::TempDir,
    arguments: Vec<String>,
    plan: Plan,
}

impl Case {
    fn new(arguments: &[&str]) -> Self {
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
        let known = Known::gather(&loaded, Reach::ThisMachine, Console::Quiet).unwrap();
        let plan = Plan::resolve(&loaded, &known).unwrap();
        Self { folder, arguments, plan }
    }

    fn estimate(&self) -> Estimate {
        estimate(&Setup::of(&self.plan, Place::Cpu).unwrap())
    }

    #[track_caller]
    fn compare(&self, said: u64, measured: u64, tolerance: f64) {
        let ratio = said as f64 / measured as f64;
        eprintln!("{} said, {} measured, {ratio:.3}: {:?}", bytes(said), bytes(measured), self.arguments);
        assert!((ratio - 1.0).abs() < tolerance, "said {said}, measured {measured}: {:?}", self.arguments);
    }
}

/// The formulas know nothing of allocators: what is counted here is what they say, but for small vectors.
#[test]
fn a_run_allocates_what_the_formulas_say() {
    let none: &[&str] = &[];
    let deep = "model.config.num_hidden_layers=12";
    let shallow = "model.config.num_hidden_layers=1";
    let many = "model.config.vocab_size=30000";
    let document = "data.sources.0={name_or_path: $, kwargs: {sample_by: document}}";
    // The buffers that products keep are made by the first run; the estimate counts them with the program.
    train_in_process(&Case::new(&[many, shallow, "train_iters=1"]));
    let narrow = "model.config.intermediate_size=256";
    for arguments in [
        none,
        &["model.dtype=bf16"],
        &["model.activation_checkpoint={every: 2}"],
        &["model.activation_checkpoint={every: 3}", "model.peft_config={r: 8, target_modules: [q_proj, v_proj]}"],
        &["model.activation_checkpoint=offload", "model.dtype=bf16", "data.max_length=1024"],
        &["model.activation_checkpoint=full", "tiled_mlp_compute=true", "model.dtype=bf16", "data.max_length=1024"],
        &["model.activation_checkpoint={offload: 0.5}", "tiled_mlp_compute=true", "data.max_length=1024"],
        &[many, shallow, "model.dtype=bf16"],
        &[deep, "model.dtype=bf16", "deepspeed.bf16.bf16_optimizer_states=true", "data.max_length=64"],
        &[deep, "model.dtype=bf16", "deepspeed.bf16.bf16_master_weights_and_grads=true", "data.max_length=64"],
        &["model.peft_config={r: 16, lora_dropout: 0.1, target_modules: all-linear}"],
        &["model.config.model_type=qwen3", "model.activation_checkpoint=full"],
        &["model.dtype=bf16", narrow, "model.config.num_key_value_heads=4"],
        &["gradient_accumulation_steps=3", "data.max_length=256"],
        &["model.attn_implementation=reference", document],
    ] {
        counted(arguments);
    }
}

#[track_caller]
fn counted(arguments: &[&str]) {
    let case = Case::new(arguments);
    let counted = train_in_process(&case);
    let account = case.estimate().peak().account.clone();
    let said = account.total() - account.of(Class::Program) - account.of(Class::Allocator);
    case.compare(said, counted as u64, 0.05);
}

/// Returns the most bytes that were allocated at once, beyond those before.
fn train_in_process(case: &Case) -> usize {
    let hub = Hub::new(HubSettings { offline: true, ..HubSettings::from_env() }).unwrap();
    prepare_data(&case.plan, &hub, Began::now()).unwrap();
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    train(&case.plan, &hub).unwrap();
    ALLOCATOR.peak_usage() - before
}

/// The whole process, allocator and all. Sizes are such that the program itself, some 100 MiB, hides no error.
#[test]
fn a_process_takes_what_the_estimate_says() {
    let wide =
        &["model.config.hidden_size=512", "model.config.intermediate_size=1536", "model.config.num_attention_heads=8"];
    for arguments in [
        &["data.max_length=1024"] as &[&str],
        &["data.max_length=1024", "model.dtype=bf16"],
        &["model.dtype=bf16", "deepspeed.bf16.bf16_optimizer_states=true", "model.config.num_hidden_layers=8"],
        &["data.max_length=1024", "model.dtype=bf16", "model.peft_config={r: 16, target_modules: all-linear}"],
        &["data.max_length=1024", "model.activation_checkpoint=full", "gradient_accumulation_steps=2"],
        &["data.max_length=2048", "model.activation_checkpoint=offload"],
        &["data.max_length=4096", "model.config.num_hidden_layers=1"],
        &["model.config.vocab_size=32000", "model.config.num_hidden_layers=2", "save"],
    ] {
        let case = Case::new(&[wide, arguments].concat());
        case.compare(case.estimate().peak_bytes(), max_rss(&case), 0.1);
    }
}

/// Runs a case in a process of its own and returns the most memory that it had.
#[expect(clippy::zombie_processes, reason = "wait4 waits for it, and tells its memory besides")]
fn max_rss(case: &Case) -> u64 {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.args(["-q", "train"]).arg(case.folder.path().join("recipe.yaml")).args(&case.arguments);
    command.current_dir(case.folder.path()).env("RAYON_NUM_THREADS", "2").env("HF_HUB_OFFLINE", "1");
    let child = command.stdin(Stdio::null()).spawn().unwrap();
    let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
    // SAFETY: both pointers are to locals of the right type, which outlive the call.
    let waited = unsafe { libc::wait4(child.id() as i32, &raw mut status, 0, usage.as_mut_ptr()) };
    assert_eq!((waited, status), (child.id() as i32, 0), "{:?}", case.arguments);
    // SAFETY: all bits zero are a rusage, and the call has filled it.
    let usage = unsafe { usage.assume_init() };
    usage.ru_maxrss as u64 * 1024
}
