//! One rank: peak memory that training allocates, compared with the estimate.

use candle_core::Device;
use candlewick_comm::World;
use candlewick_runtime::run_id::RunId;
use candlewick_text::hub::{Hub, HubSettings};
use trainer::estimate::Category;
use trainer::run::{prepare_data, train};

use crate::estimated::Case;
use crate::{ALLOCATOR, alone, fp8};

/// The formulas leave out the allocator's own overhead and small vectors.
#[test]
fn a_run_allocates_what_the_formulas_say() {
    alone("one_rank::a_run_allocates_what_the_formulas_say", check_all);
}

fn check_all() {
    let none: &[&str] = &[];
    let deep = "model.config.num_hidden_layers=12";
    let shallow = "model.config.num_hidden_layers=1";
    let many = "model.config.vocab_size=30000";
    let document = "data.sources.0={name_or_path: $, kwargs: {sample_by: document}}";
    // The first run allocates the GEMM buffers; the estimate counts them with the program.
    train_in_process(&Case::new(&[many, shallow, "train_iters=1"]));
    let narrow = "model.config.intermediate_size=256";
    for arguments in [
        none,
        &["model.dtype=bf16"],
        &["model.activation_checkpoint={every: 2}"],
        &["model.activation_checkpoint=selective", "data.max_length=1024"],
        &["model.activation_checkpoint={every: 3}", "model.peft_config={r: 8, target_modules: [q_proj, v_proj]}"],
        &["model.activation_checkpoint=offload", "model.dtype=bf16", "data.max_length=1024"],
        &["model.activation_checkpoint=full", "tiled_mlp_compute=true", "model.dtype=bf16", "data.max_length=1024"],
        &["model.activation_checkpoint={offload: 0.5}", "tiled_mlp_compute=true", "data.max_length=1024"],
        &[many, shallow, "model.dtype=bf16"],
        &[deep, "model.dtype=bf16", "deepspeed.bf16.bf16_optimizer_states=true", "data.max_length=64"],
        &[deep, "model.dtype=bf16", "deepspeed.bf16.bf16_master_weights_and_grads=true", "data.max_length=64"],
        &["model.peft_config={r: 16, lora_dropout: 0.1, target_modules: all-linear}"],
        &["model.config.model_type=qwen3"],
        &["model.config.model_type=qwen3", "model.activation_checkpoint=full"],
        &["model.dtype=bf16", narrow, "model.config.num_key_value_heads=4"],
        &["model.dtype=bf16", F32_RESIDUAL],
        &["model.dtype=bf16", F32_RESIDUAL, "model.activation_checkpoint=full", "data.max_length=1024"],
        &["model.dtype=bf16", F32_RESIDUAL, shallow, "model.mtp_num_layers=2", "data.max_length=1024"],
        &["gradient_accumulation_steps=3", "data.max_length=256"],
        &["model.attn_implementation=reference", document],
        &["model.mtp_num_layers=1", shallow, "data.max_length=1024"],
        &["model.mtp_num_layers=2", "model.activation_checkpoint=full", "data.max_length=2048"],
    ] {
        check(arguments);
    }
    for lora in LORA_OF_EXPERTS {
        let lora = format!("model.peft_config={{r: 16, {lora}}}");
        check(&[&["model.activation_checkpoint=full"], EXPERTS, &[&lora]].concat());
        check(&[EXPERTS, &[&lora]].concat());
    }
    let [qwen3, qwen2] = ["qwen3_moe", "qwen2_moe"].map(|name| format!("model.config.model_type={name}"));
    let top = |k: usize| format!("model.config.num_experts_per_tok={k}");
    let (shared, recomputed) =
        ("model.config.shared_expert_intermediate_size=1024", "model.activation_checkpoint=full");
    let three = "model.config.num_hidden_layers=3";
    for arguments in [
        &[&qwen3, shallow, &top(1), recomputed][..],
        &[&qwen3, shallow, &top(3), recomputed],
        &[&qwen3, shallow, &top(4), "model.activation_checkpoint=selective"],
        &[&qwen3, three, &top(1)],
        &[&qwen2, shallow, &top(1), recomputed, shared],
        &[&qwen2, shallow, &top(4), recomputed, shared],
        &[&qwen2, three, &top(1), shared],
        &[&qwen3, shallow, &top(1), recomputed, "model.dtype=bf16", F32_RESIDUAL],
        &[&qwen2, shallow, &top(4), TILES, shared],
    ] {
        check(&[NARROW_EXPERTS, arguments].concat());
    }
    for arguments in [&[three][..], &[three, recomputed], &[three, "model.dtype=bf16", F32_RESIDUAL]] {
        check(&[EXPERTS, &[TILES, "data.max_length=4096"], arguments].concat());
    }
    // The buffers of candle's f64 matmul, about 10 MiB, are not estimated. Each thread keeps its own, so a run may find them.
    let one = top(1);
    let f64_router = [NARROW_EXPERTS, &[&qwen3, shallow, &one, recomputed, "model.dtype=bf16", F64_ROUTER]].concat();
    train_in_process(&Case::new(&f64_router));
    check_within(&f64_router, 0.1);
    // Last: threads keep the buffers of such a run, and a later one would find them.
    fp8::check_all();
}

const TILES: &str = "tiled_mlp_compute=true";

const F32_RESIDUAL: &str = "model.fp32_residual_connection=true";

/// A mixture of experts most of whose weights are those of experts.
pub(crate) const EXPERTS: &[&str] = &[
    "model.config.model_type=qwen3_moe",
    "model.config.num_experts=16",
    "model.config.num_experts_per_tok=2",
    "model.config.moe_intermediate_size=384",
];

/// Experts that are much narrower than the residual stream, which then has the peak.
const NARROW_EXPERTS: &[&str] = &[
    "model.config.num_experts=8",
    "model.config.moe_intermediate_size=32",
    "model.config.hidden_size=1024",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1",
    "model.config.head_dim=16",
    "data.max_length=4096",
];

/// With narrow experts, a router in f64 has the estimated peak.
const F64_ROUTER: &str = "moe.router_dtype=fp64";

/// Adapters next to frozen experts, and adapters of experts in both layouts.
pub(crate) const LORA_OF_EXPERTS: [&str; 3] = [
    "target_modules: [q_proj, k_proj, v_proj, o_proj]",
    "target_parameters: [experts.gate_up_proj, experts.down_proj, mlp.gate.weight]",
    "target_modules: [q_proj, gate_proj, up_proj, down_proj]",
];

#[track_caller]
pub(crate) fn check(arguments: &[&str]) {
    check_within(arguments, 0.05);
}

fn check_within(arguments: &[&str], tolerance: f64) {
    let case = Case::new(arguments);
    let measured = train_in_process(&case);
    let breakdown = case.estimate().peak().breakdown.clone();
    let estimated = breakdown.total() - breakdown.of(Category::Program) - breakdown.of(Category::Allocator);
    case.compare(estimated, measured as u64, tolerance);
}

/// Returns the peak of allocated bytes minus the bytes that were allocated before.
pub(crate) fn train_in_process(case: &Case) -> usize {
    let hub = Hub::new(HubSettings { offline: true, ..HubSettings::from_env() }).unwrap();
    prepare_data(&case.plan, &hub, RunId::now()).unwrap();
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    train(&case.plan, &hub, &World::solo(), &Device::Cpu).unwrap();
    ALLOCATOR.peak_usage() - before
}
