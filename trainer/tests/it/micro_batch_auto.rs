//! `micro_batch_size: auto`: the rows that it selects, and a run with them.

use std::path::Path;

use candlewick_model::Config;
use serde_json::json;
use trainer::estimate::{Capacity, DeviceKind, Setup, choose_micro_batch, estimate, usable};
use trainer::metrics::Console;
use trainer::plan::Plan;
use trainer::plan_report::SettingsFilter;
use trainer::recipe::{Loaded, RecipeError};
use trainer::resolve::{BuildFeatures, Environment, Machines, WorldInfo};

use crate::plan_rules::known;
use crate::support::{Run, stderr};

const BASE: &str = "model: {name_or_path: org/model}\ndata: {sources: [a.jsonl], max_length: 1024}\n\
                    micro_batch_size: auto\ngradient_accumulation_steps: 24\n";

fn config(family: &str) -> Config {
    let config = json!({
        "model_type": family, "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 768, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
        "head_dim": 64, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
    });
    Config::from_json(config).unwrap()
}

/// Resolves the base recipe for ranks on this machine that have this capacity each.
fn resolve(family: &str, n_ranks: usize, capacity: Option<Capacity>, arguments: &[&str]) -> Result<Plan, RecipeError> {
    let world = WorldInfo { n_ranks, n_here: n_ranks, ..WorldInfo::ALONE };
    let (config, features) = (Some(config(family)), BuildFeatures::ALL);
    let known = Environment { config, world, features, capacity, ..known() };
    let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
    Plan::resolve(&Loaded::parse(Path::new("r.yaml"), BASE.to_owned(), &arguments)?, &known)
}

fn of(kind: DeviceKind, free: u64) -> Option<Capacity> {
    Some(Capacity::of(kind, Some(free), "a test".into()))
}

/// Checks the rows of a micro-batch and the micro-batches of a step with much free memory.
#[track_caller]
fn selects(kind: DeviceKind, n_ranks: usize, arguments: &[&str], want: [usize; 2]) {
    let data = resolve("llama", n_ranks, of(kind, 1 << 50), arguments).unwrap().data;
    assert_eq!([data.micro_batch_size, data.gradient_accumulation_steps], want, "{arguments:?}");
}

#[test]
fn a_micro_batch_has_the_tokens_of_full_speed_and_a_step_keeps_its_rows() {
    let gpu = |arguments: &[&str], want| selects(DeviceKind::Gpu, 1, arguments, want);
    gpu(&[], [8, 3]);
    gpu(&["data.max_length=4096"], [2, 12]);
    gpu(&["data.max_length=3000"], [2, 12]);
    gpu(&["data.max_length=8192"], [1, 24]);
    gpu(&["data.max_length=9000"], [1, 24]);
    gpu(&["gradient_accumulation_steps=7"], [7, 1]);
    gpu(&["gradient_accumulation_steps=11"], [1, 11]);
    gpu(&["gradient_accumulation_steps=1"], [1, 1]);
    gpu(&["data.max_length=64"], [24, 1]);
    // Padded and packed rows have at most max_length tokens, too.
    gpu(&["data.pad_to=max_length"], [8, 3]);
    gpu(&["data.pack_samples=true"], [8, 3]);
    gpu(&["type=causal"], [8, 3]);
    let cpu = |arguments: &[&str], want| selects(DeviceKind::Cpu, 1, arguments, want);
    cpu(&[], [1, 24]);
    cpu(&["data.max_length=512"], [2, 12]);
    cpu(&["data.max_length=96"], [8, 3]);
}

#[test]
fn ranks_that_share_a_micro_batch_count_their_own_tokens() {
    selects(DeviceKind::Gpu, 2, &["sequence_parallel_size=2"], [12, 2]);
    selects(DeviceKind::Gpu, 2, &["context_parallel_size=2"], [12, 2]);
    // Data-parallel ranks and tensor-parallel ranks compute all tokens of a micro-batch.
    selects(DeviceKind::Gpu, 2, &[], [8, 3]);
    selects(DeviceKind::Gpu, 2, &["tensor_parallel_size=2"], [8, 3]);
}

#[test]
fn a_pipeline_keeps_four_micro_batches_for_each_stage() {
    let pipeline = "pipeline_parallel_size=2";
    selects(DeviceKind::Gpu, 2, &[pipeline], [3, 8]);
    selects(DeviceKind::Gpu, 2, &[pipeline, "gradient_accumulation_steps=8"], [1, 8]);
    selects(DeviceKind::Gpu, 2, &[pipeline, "gradient_accumulation_steps=4"], [1, 4]);
}

#[test]
fn the_rows_fit_the_free_memory() {
    let setup = |free| {
        let plan = resolve("llama", 1, of(DeviceKind::Gpu, free), &[]).unwrap();
        (Setup::on(&plan, &Capacity::of(DeviceKind::Gpu, Some(free), "a test".into())).unwrap(), plan)
    };
    let mut free = 64 << 30;
    let mut seen = Vec::new();
    for _ in 0..8 {
        let (setup, plan) = setup(free);
        let peak = estimate(&setup).peak_bytes();
        seen.push(plan.data.micro_batch_size);
        assert_eq!(plan.data.rows_per_step(), 24);
        assert!(peak <= usable(free) || plan.data.micro_batch_size == 1, "{peak} of {free}");
        // With a little less than the peak, fewer rows are selected.
        free = (0..).map(|less| peak * 10 / 9 + 2 - less).find(|free| usable(*free) < peak).unwrap();
        if plan.data.micro_batch_size == 1 {
            break;
        }
    }
    assert_eq!(seen, [8, 6, 4, 3, 2, 1]);
}

#[test]
fn memory_auto_takes_the_fastest_modes_of_one_row_first() {
    let one = Setup::of(&resolve("llama", 1, None, &[]).unwrap(), DeviceKind::Cpu).unwrap();
    let peak = estimate(&one).peak_bytes();
    let plan =
        resolve("llama", 1, of(DeviceKind::Cpu, peak * 10 / 9 + 64), &["memory=auto", "data.max_length=512"]).unwrap();
    assert_eq!((plan.model.activations, plan.data.micro_batch_size), (trainer::plan::CheckpointingMode::None, 2));
    let found = choose_micro_batch(&one, &Capacity::of(DeviceKind::Cpu, Some(1), "a test".into()));
    assert_eq!(found.rows, 1, "one row is the least");
}

/// Checks that one row is selected, with this reason in a note.
#[track_caller]
fn stays_at_one(family: &str, arguments: &[&str], reason: &str) {
    let plan = resolve(family, 1, of(DeviceKind::Gpu, 1 << 50), arguments).unwrap();
    assert_eq!((plan.data.micro_batch_size, plan.data.gradient_accumulation_steps), (1, 24), "{arguments:?}");
    let note = plan.notes.iter().find(|note| note.starts_with("micro_batch_size: auto")).unwrap();
    assert!(note.contains(reason), "{note}");
}

#[test]
fn losses_that_depend_on_the_rows_of_a_micro_batch_keep_one_row() {
    let lora = "model.peft_config={peft_type: LORA, r: 8, target_modules: all-linear, lora_dropout: 0.1}";
    stays_at_one("llama", &[lora], "lora_dropout");
    let moe = |arguments: &[&str], reason| stays_at_one("qwen3_moe", arguments, reason);
    moe(&["moe.aux_loss_coeff=0.01"], "losses of the routers");
    moe(&["moe.aux_loss_coeff=0", "moe.expert_capacity_factor=2"], "capacity of experts");
    moe(&["moe.router_load_balancing_type=sinkhorn"], "Sinkhorn");
    moe(&["moe.aux_loss_coeff=0", "moe.input_jitter_eps=0.1"], "noise of the routers");
    moe(&["moe.aux_loss_coeff=0", "moe.routing_replay={record: experts}"], "routing_replay");
    let plan = resolve("qwen3_moe", 1, of(DeviceKind::Gpu, 1 << 50), &["moe.aux_loss_coeff=0"]).unwrap();
    assert_eq!(plan.data.micro_batch_size, 8);
}

#[test]
fn a_choice_that_needs_an_unknown_fact_is_explained() {
    let note = |plan: &Plan| plan.notes.iter().find(|note| note.starts_with("micro_batch_size")).unwrap().clone();
    let plan = resolve("llama", 1, Some(Capacity::of(DeviceKind::Cpu, None, "a test".into())), &[]).unwrap();
    assert_eq!(note(&plan), "micro_batch_size: auto selects 1: this machine does not report its free memory");
    let plan = resolve("llama", 1, of(DeviceKind::Gpu, 1 << 50), &["gradient_accumulation_steps=1"]).unwrap();
    assert!(note(&plan).ends_with(
        "a step has one row; set gradient_accumulation_steps to the rows of a step on each data-parallel rank"
    ));
    assert_eq!(plan.settings.iter().find(|it| it.key == "micro_batch_size").unwrap().value, json!(1));
    let loaded = Loaded::parse(Path::new("r.yaml"), BASE.to_owned(), &[]).unwrap();
    let world = WorldInfo { machines: Machines::Unknown, ..WorldInfo::ALONE };
    let plan = Plan::resolve(&loaded, &Environment::with_config(Some(config("llama")), &loaded, Console::Full, world))
        .unwrap();
    assert!(note(&plan).contains("on the machines of the ranks"), "{}", note(&plan));
    let plan =
        Plan::resolve(&loaded, &Environment::with_config(None, &loaded, Console::Full, WorldInfo::ALONE)).unwrap();
    assert!(note(&plan).contains("once the model's config.json is downloaded"), "{}", note(&plan));
}

#[test]
fn the_choice_is_in_the_plan_with_its_origin_and_its_estimate() {
    let plan = resolve("llama", 1, of(DeviceKind::Gpu, 64 << 30), &[]).unwrap();
    let table = plan.table(SettingsFilter::All);
    let line = |key: &str| table.lines().find(|line| line.contains(key)).unwrap();
    assert!(line("micro_batch_size ").ends_with("micro_batch_size: auto"), "{table}");
    assert!(line("gradient_accumulation_steps").ends_with("derived"), "{table}");
    assert!(table.contains("note: micro_batch_size: auto selects 8: about"), "{table}");
}

#[test]
fn other_values_are_refused() {
    let refused =
        |value: &str| resolve("llama", 1, None, &[&format!("micro_batch_size={value}")]).unwrap_err().to_string();
    for value in ["automatic", "-1", "1.5", "[1]", "true"] {
        let error = refused(value);
        assert!(error.contains("micro_batch_size") && error.contains("auto, or a whole number"), "{error}");
    }
    assert!(refused("0").contains("expected at least 1"));
    let plan = resolve("llama", 1, None, &["micro_batch_size=1Ki"]).unwrap();
    assert_eq!(plan.data.micro_batch_size, 1024);
}

#[test]
fn a_recipe_may_set_what_auto_selects_for_packed_rows() {
    let [auto, pinned] = [Run::new(), Run::new()];
    let keys = ["data.pack_samples=true", "data.max_length=128", "train_iters=2"];
    auto.train_ok(&[&keys[..], &["micro_batch_size=auto", "gradient_accumulation_steps=4"]].concat());
    pinned.train_ok(&[&keys[..], &["micro_batch_size=4", "gradient_accumulation_steps=1"]].concat());
    assert_eq!(auto.losses().len(), 2);
    assert_eq!(auto.losses(), pinned.losses());
}

#[test]
fn a_run_has_the_losses_of_one_row_and_logs_a_choice_that_differs_from_the_checkpoints() {
    let (one, auto) = (Run::new(), Run::new());
    let rows = "gradient_accumulation_steps=8";
    one.train_ok(&["micro_batch_size=1", rows, "train_iters=6"]);
    let output = auto.train(&["micro_batch_size=auto", rows, "train_iters=6"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("micro_batch_size: auto selects 8: about"), "{}", stderr(&output));
    assert_eq!(one.losses().len(), 6);
    for (one, auto) in one.losses().iter().zip(&auto.losses()) {
        assert!((one - auto).abs() < 1e-5 * one, "{one} {auto}");
    }
    let output = auto.train(&["micro_batch_size=1", rows, "train_iters=8"]);
    assert!(stderr(&output).contains("micro_batch_size: 8 in the checkpoint, 1 now"), "{}", stderr(&output));
}
