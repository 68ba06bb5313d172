//! `memory: auto`: the modes that it chooses for the free memory, and the settings that it keeps.

use std::path::Path;

use candle_core::{DType, Device};
use candlewick_model::Config;
use candlewick_ops::{QuantFormat, ScaleBlock, ScaleRounding, WeightStorage};
use candlewick_parallel::{ParamDtypes, ParamStore, ShardingGroups, StoreMode};
use serde_json::json;
use trainer::estimate::{Capacity, Category, DeviceKind, FixedModes, Resource, Setup, choose, estimate, usable};
use trainer::plan::{CheckpointingMode, Plan};
use trainer::recipe::{Loaded, RecipeError};
use trainer::resolve::{BuildFeatures, Environment, TempDir};

use crate::plan_rules::known;
use crate::support::Run;

const BASE: &str = "model: {name_or_path: org/model}\ndata: {sources: [a.jsonl], max_length: 1024}\nmemory: auto\n";

fn resolve(free: Option<u64>, arguments: &[&str]) -> Result<Plan, RecipeError> {
    resolve_with(free, false, arguments)
}

fn resolve_with(free: Option<u64>, offloads_to_ram: bool, arguments: &[&str]) -> Result<Plan, RecipeError> {
    resolve_on(free, None, offloads_to_ram, arguments)
}

fn of_test(free: Option<u64>) -> Capacity {
    Capacity::of(DeviceKind::Cpu, free, "a test".into())
}

fn config(vocab_size: usize) -> Config {
    let config = json!({
        "model_type": "llama", "vocab_size": vocab_size, "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 8, "num_attention_heads": 4, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
    });
    Config::from_json(config).unwrap()
}

/// Resolves the base recipe with this much free memory, and this much free disk for offloaded activations.
fn resolve_on(
    free: Option<u64>,
    offload_disk: Option<u64>,
    offloads_to_ram: bool,
    arguments: &[&str],
) -> Result<Plan, RecipeError> {
    let config = Some(config(1000));
    let capacity = Some(Capacity { offload_disk, ..of_test(free) });
    let temp_dir = TempDir { path: "/var/tmp".into(), is_memory: offloads_to_ram };
    let features = BuildFeatures::BUILT;
    let known = Environment { config, features, temp_dir, capacity, ..known() };
    let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
    Plan::resolve(&Loaded::parse(Path::new("r.yaml"), BASE.to_owned(), &arguments)?, &known)
}

/// Returns the estimated peak of the base recipe with an activation checkpointing mode.
fn peak(activations: &str) -> u64 {
    let argument = format!("model.activation_checkpoint={activations}");
    let plan = resolve(Some(1 << 50), &[&argument]).unwrap();
    estimate(&Setup::of(&plan, DeviceKind::Cpu).unwrap()).peak_bytes()
}

/// Returns the smallest free memory for which `memory: auto` accepts this peak.
fn free_for(peak: u64) -> u64 {
    (peak..).find(|free| usable(*free) >= peak).unwrap()
}

#[track_caller]
fn takes(free: u64, want: CheckpointingMode) {
    assert_eq!(resolve(Some(free), &[]).unwrap().model.activations, want, "{free} bytes");
}

#[test]
fn the_cheapest_modes_that_fit_are_chosen() {
    let ladder = [
        ("none", CheckpointingMode::None),
        ("{every: 8}", CheckpointingMode::EveryKth(8)),
        ("{every: 4}", CheckpointingMode::EveryKth(4)),
        ("{every: 3}", CheckpointingMode::EveryKth(3)),
        ("{every: 2}", CheckpointingMode::EveryKth(2)),
        ("selective", CheckpointingMode::Selective),
        ("full", CheckpointingMode::Full),
        ("{offload: 0.25}", CheckpointingMode::Offload(0.25)),
        ("{offload: 0.5}", CheckpointingMode::Offload(0.5)),
        ("{offload: 0.75}", CheckpointingMode::Offload(0.75)),
        ("offload", CheckpointingMode::Offload(1.0)),
    ];
    let peaks: Vec<u64> = ladder.iter().map(|(name, _)| peak(name)).collect();
    assert!(peaks.is_sorted_by(|dearer, cheaper| dearer >= cheaper), "{peaks:?}");
    for ((_, activations), peak) in ladder.into_iter().zip(peaks) {
        takes(free_for(peak), activations);
    }
    takes(1 << 50, CheckpointingMode::None);
}

/// In rows of 16,384 tokens attention is five sixths of the FLOPs: recomputing half of the blocks costs three times as much.
#[test]
fn attention_over_long_rows_is_not_recomputed() {
    let long = "data.max_length=16384";
    let half = resolve(Some(1 << 50), &[long, "model.activation_checkpoint={every: 2}"]).unwrap();
    let peak = estimate(&Setup::of(&half, DeviceKind::Cpu).unwrap()).peak_bytes();
    let plan = resolve(Some(free_for(peak)), &[long]).unwrap();
    assert_eq!(plan.model.activations, CheckpointingMode::Selective);
}

#[test]
fn the_chosen_mode_is_in_the_plan_with_its_origin() {
    let plan = resolve(Some(free_for(peak("full"))), &[]).unwrap();
    let table = plan.table(trainer::plan_report::SettingsFilter::All);
    let line = table.lines().find(|line| line.contains("model.activation_checkpoint")).unwrap();
    assert!(line.contains("full") && line.ends_with("memory: auto"), "{line}");
    assert!(table.contains("note: memory: auto selects model.activation_checkpoint=full: about"), "{table}");
}

#[test]
fn settings_of_the_recipe_are_kept() {
    let plan = resolve(Some(1 << 50), &["model.activation_checkpoint=offload"]).unwrap();
    assert_eq!(plan.model.activations, CheckpointingMode::Offload(1.0));
    let table = plan.table(trainer::plan_report::SettingsFilter::All);
    assert!(table.lines().any(|line| line.contains("activation_checkpoint") && line.ends_with("argument")), "{table}");
    for set in ["model.activation_checkpoint=none", "model.disable_activation_checkpoint=true"] {
        let error = resolve(Some(free_for(peak("full"))), &[set]).unwrap_err().to_string();
        assert!(error.contains("model.activation_checkpoint=none needs") && !error.contains("full"), "{error}");
    }
}

#[test]
fn if_nothing_fits_the_error_lists_the_modes_and_a_length_that_fits() {
    let free = free_for(peak("offload")) - (1 << 20);
    let error = resolve(Some(free), &[]).unwrap_err().to_string();
    for part in ["r.yaml:3", "activation_checkpoint={every: 2}' needs", "=offload needs", "lower data.max_length"] {
        assert!(error.contains(part), "no {part:?} in:\n{error}");
    }
    let longest: usize =
        error.split("the longest row that fits has ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    let fitting = format!("data.max_length={longest}");
    assert_eq!(resolve(Some(free), &[&fitting]).unwrap().model.activations, CheckpointingMode::Offload(1.0));
    assert!(resolve(Some(free), &[&format!("data.max_length={}", longest + 1)]).is_err());
    let error = resolve(Some(1 << 20), &[]).unwrap_err().to_string();
    assert!(error.contains("no row fits"), "{error}");
    let error = resolve(None, &[]).unwrap_err().to_string();
    assert!(error.contains("this machine does not report") && error.contains("set memory: manual"), "{error}");
}

#[test]
fn nothing_is_offloaded_to_the_same_memory() {
    let free = free_for(peak("offload"));
    assert!(resolve_with(Some(free), false, &[]).is_ok());
    let error = resolve_with(Some(free), true, &[]).unwrap_err().to_string();
    assert!(error.contains("=full needs") && !error.contains("offload"), "{error}");
}

#[test]
fn nothing_is_offloaded_to_a_disk_without_space() {
    let free = free_for(peak("{offload: 0.25}"));
    let plan = resolve_on(Some(free), None, false, &[]).unwrap();
    let offloaded = estimate(&Setup::of(&plan, DeviceKind::Cpu).unwrap()).offloaded;
    assert_eq!(plan.model.activations, CheckpointingMode::Offload(0.25));
    assert_eq!(
        resolve_on(Some(free), Some(offloaded), false, &[]).unwrap().model.activations,
        CheckpointingMode::Offload(0.25)
    );
    let error = resolve_on(Some(free), Some(offloaded - 1), false, &[]).unwrap_err().to_string();
    assert!(error.contains("free disk for offloaded activations (TMPDIR sets the folder)"), "{error}");
}

#[test]
fn the_ram_of_a_gpus_host_is_checked_too() {
    let plan = resolve(Some(1 << 50), &["model.activation_checkpoint=offload"]).unwrap();
    let setup = Setup::of(&plan, DeviceKind::Gpu).unwrap();
    let needed = estimate(&setup).host.unwrap();
    let with =
        |host: u64| Capacity { host: Some(host), ..Capacity::of(DeviceKind::Gpu, Some(1 << 50), "a test".into()) };
    let fixed = FixedModes { activations: true };
    assert!(choose(&setup, fixed, &with(needed)).found.is_some());
    let choice = choose(&setup, fixed, &with(needed - 1));
    assert_eq!(choice.found, None);
    let short = choice.tried[0].short[0];
    assert_eq!((short.of, short.needed_bytes, short.free_bytes), (Resource::Host, needed, needed - 1));
}

/// The logits of 16,000 tokens and 50,000 ids take 3.2 GB: 7 chunks on 16 GiB, 2 on 80 GiB, 1 on more.
#[test]
fn a_gpu_with_more_memory_holds_more_logits() {
    let mut plan = resolve(Some(1 << 50), &["data.max_length=16000", "model.dtype=f32"]).unwrap();
    plan.model.config = Some(config(50_000));
    let logits = |gib: u64| {
        let capacity = Capacity::of(DeviceKind::Gpu, Some(gib << 30), "a test".into());
        let estimate = estimate(&Setup::on(&plan, &capacity).unwrap());
        estimate.phases.iter().map(|phase| phase.breakdown.of(Category::Logits)).max().unwrap()
    };
    let [small, large, larger] = [16, 80, 160].map(logits);
    let of_token = 4 * (50_000 + 2 * 256);
    assert_eq!((large - small, larger - large), ((8_064 - 2_304) * of_token, (16_000 - 8_064) * of_token));
}

#[test]
fn a_mode_that_changes_the_rounding_is_not_chosen() {
    for free in [1 << 50, free_for(peak("full"))] {
        assert!(!resolve(Some(free), &[]).unwrap().model.tiled_mlp);
    }
    assert!(resolve(Some(1 << 50), &["tiled_mlp_compute=true"]).unwrap().model.tiled_mlp);
}

#[test]
fn the_choice_is_a_function_of_the_plan_and_the_free_memory() {
    let plan = resolve(Some(1 << 50), &[]).unwrap();
    let setup = Setup::of(&plan, DeviceKind::Cpu).unwrap();
    for bytes in [1 << 20, peak("full"), peak("none"), 1 << 50] {
        let capacity = of_test(Some(bytes));
        assert_eq!(choose(&setup, FixedModes::default(), &capacity), choose(&setup, FixedModes::default(), &capacity));
    }
}

/// The free memory differs from start to start, and with it the chosen modes.
#[test]
fn a_run_resumed_with_other_modes_ends_with_the_same_weights() {
    let whole = Run::new();
    whole.train_ok(&["train_iters=8", "memory=auto"]);
    let interrupted = Run::new();
    interrupted.train_ok(&["train_iters=8", "exit_iteration=5", "model.activation_checkpoint={every: 2}"]);
    interrupted.train_ok(&["train_iters=8", "memory=auto"]);
    interrupted.assert_resumed();
    assert_eq!(interrupted.exported(), whole.exported());
}

/// Signed integers with a scale for each 32 columns of a row. Recipes cannot choose this format.
static INT8: QuantFormat = QuantFormat {
    name: "int8",
    codes: &{
        let mut codes = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            codes[code] = code as u8 as i8 as f32;
            code += 1;
        }
        codes
    },
    block: ScaleBlock::Tile { rows: 1, columns: 32 },
    scales: ScaleRounding::PowerOfTwo,
};

/// Padding between the parameters of a store, which the estimate leaves out: at most 512 bytes for each of 8 blocks' 23.
const PADDING: u64 = 8 * 23 * 512;

#[test]
fn the_estimate_of_an_8_bit_base_is_the_size_of_its_store() {
    let dense = Setup::of(&resolve(Some(1 << 50), &["model.peft_config={r: 8}"]).unwrap(), DeviceKind::Cpu).unwrap();
    let model = dense.model.clone().with_frozen_storage(WeightStorage::Quantized(&INT8));
    let quantized = Setup { model, ..dense.clone() };
    let stored = |setup: &Setup| {
        let dtypes = ParamDtypes::computing_in(DType::BF16);
        let alone = ShardingGroups::single_rank();
        ParamStore::new(&setup.model, dtypes, StoreMode::Train, &Device::Cpu, alone).unwrap().device_bytes().weights
    };
    let weights = |setup: &Setup| estimate(setup).peak().breakdown.of(Category::Weights);
    for setup in [&dense, &quantized] {
        let (said, stored) = (weights(setup), stored(setup));
        assert!(stored.abs_diff(said) <= PADDING, "estimated {said}, stored {stored}");
    }
    // Each element of the linear layers takes 1 1/8 bytes instead of 2.
    let n_linear = 8 * (4 * 256 * 256 + 3 * 256 * 768);
    assert_eq!(weights(&dense) - weights(&quantized), n_linear * 7 / 8);
}
