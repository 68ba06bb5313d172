//! Precision, attention and memory.

use std::path::Path;

use candle_core::DType;
use candlewick_ops::{AttentionChoice, AttentionImpl, LossScaling};
use trainer::plan::{CheckpointingMode, Plan};
use trainer::recipe::{FloatDtype, Loaded};
use trainer::resolve::{Environment, TempDir};

use super::{BASE, known, plan, refused};

#[test]
fn half_precision_scales_losses_as_deepspeed_does() {
    let scaling = |arguments: &[&str]| plan(arguments).optimizer.loss_scaling;
    assert_eq!(scaling(&[]), LossScaling::NONE);
    let default = LossScaling { initial: 65536.0, window: 1000, hysteresis: 2, min: 1.0 };
    assert_eq!(plan(&["model.dtype=fp16"]).model.dtype, FloatDtype::F16);
    assert_eq!(scaling(&["model.dtype=fp16"]), default);
    let own = ["model.dtype=fp16", "deepspeed.fp16={enabled: true, initial_scale_power: 8, loss_scale_window: 50}"];
    assert_eq!(scaling(&own), LossScaling { initial: 256.0, window: 50, ..default });
    let fixed = LossScaling { initial: 128.0, window: 0, hysteresis: 1, min: 128.0 };
    assert_eq!(scaling(&["model.dtype=fp16", "deepspeed.fp16.loss_scale=128"]), fixed);
    let idle = plan(&["deepspeed.fp16={enabled: false, hysteresis: 4}"]);
    assert_eq!(idle.optimizer.loss_scaling, LossScaling::NONE);
    assert!(idle.notes.iter().any(|note| note.contains("deepspeed.fp16.hysteresis has no effect")), "{:?}", idle.notes);
    refused(&["deepspeed.fp16.enabled=true"], &["deepspeed.fp16.enabled: true contradicts model.dtype"]);
    refused(&["model.dtype=fp16", "deepspeed.bf16.enabled=true"], &["contradicts model.dtype"]);
    refused(&["deepspeed.fp16.loss_scale_window=0"], &["expected a whole number from 1 to 1000000, found 0"]);
}

#[test]
fn optimizer_states_can_be_bf16() {
    assert_eq!(plan(&[]).optimizer.moments, FloatDtype::F32);
    assert_eq!(plan(&["deepspeed.bf16.bf16_optimizer_states=true"]).optimizer.moments, FloatDtype::Bf16);
    refused(&["deepspeed.bf16.bf16_optimizer_states=1"], &["expected true or false, found 1"]);
    let masters = "deepspeed.bf16.bf16_master_weights_and_grads=true";
    assert_eq!(plan(&["model.dtype=bf16", masters]).optimizer.masters, FloatDtype::Bf16);
    assert_eq!(plan(&["model.dtype=bf16"]).optimizer.masters, FloatDtype::F32);
    refused(&["model.dtype=f32", masters], &["bf16_master_weights_and_grads: true needs model.dtype: bf16"]);
}

#[test]
fn stochastic_rounding_is_for_master_weights_in_bf16() {
    let (dtype, round) = ("model.dtype=bf16", "optimizer.bf16_stochastic_round=true");
    let masters = "deepspeed.bf16.bf16_master_weights_and_grads=true";
    assert!(!plan(&[dtype, masters]).optimizer.bf16_stochastic_round);
    assert!(plan(&[dtype, masters, round]).optimizer.bf16_stochastic_round);
    let advice = "set deepspeed.bf16.bf16_master_weights_and_grads: true, or remove the key";
    refused(&[dtype, round], &["bf16_stochastic_round: true needs master weights in bf16", advice]);
    plan(&[dtype, "optimizer.bf16_stochastic_round=false"]);
}

#[test]
fn the_residual_stream_of_a_16_bit_model_can_be_f32() {
    let key = "model.fp32_residual_connection=true";
    let residual = |arguments: &[&str]| {
        let plan = plan(arguments);
        plan.build_model(plan.model.config.clone().unwrap()).unwrap().residual_dtype(DType::BF16)
    };
    assert_eq!(residual(&["model.dtype=bf16"]), DType::BF16);
    assert_eq!(residual(&["model.dtype=bf16", key]), DType::F32);
    assert_eq!(residual(&["model.dtype=fp16", key]), DType::F32);
    refused(
        &["model.dtype=f32", key],
        &["model.fp32_residual_connection: true needs model.dtype: bf16", "remove the key"],
    );
}

#[test]
fn the_optimizer_may_be_offloaded_to_the_host() {
    let on_host = |arguments: &[&str]| plan(arguments).optimizer_on_host;
    let offload = "deepspeed.zero_optimization.offload_optimizer";
    let cpu = format!("{offload}.device=cpu");
    assert_eq!(on_host(&[]), 0.0);
    assert_eq!(on_host(&[&format!("{offload}.device=none")]), 0.0);
    assert_eq!(on_host(&[&cpu]), 1.0);
    assert_eq!(on_host(&[&cpu, &format!("{offload}.ratio=70%")]), 0.7);
    let pinned = plan(&[&cpu, &format!("{offload}.pin_memory=true")]);
    assert!(pinned.notes.iter().any(|note| note.contains("always go through pinned memory")), "{:?}", pinned.notes);
    let ratio = format!("{offload}.ratio=1.5");
    refused(&[&cpu, &ratio], &[&format!("argument `{ratio}`"), "expected a fraction of the parameters from 0 to 1"]);
    refused(&[&format!("{offload}.ratio=0.5")], &["ratio: nothing is offloaded", "offload_optimizer.device: cpu"]);
    refused(&[&cpu, &format!("{offload}.pin_memory=3")], &["expected true or false, found 3"]);
    refused(&[&cpu, &format!("{offload}.buffer_count=4")], &["buffer_count", "not supported"]);
    let weights = "deepspeed.zero_optimization.offload_param.device=cpu";
    let stage_3 = "deepspeed.zero_optimization.stage=3";
    let offloaded = plan(&[weights, &cpu, stage_3]);
    assert!(offloaded.weights_on_host && offloaded.ranks.zero_stage == 3);
    assert!(!plan(&[&cpu, stage_3]).weights_on_host);
    refused(&[weights, &cpu], &["cpu needs ZeRO stage 3", "zero_optimization.stage: 3"]);
    refused(&[weights, stage_3], &["cpu needs the optimizer offloaded, too"]);
    refused(
        &[weights, stage_3, &cpu, &format!("{offload}.ratio=0.5")],
        &["needs the optimizer offloaded", "without a ratio"],
    );
}

#[test]
fn attention_has_four_names_and_those_of_transformers() {
    for (name, want) in [
        ("auto", AttentionImpl::Auto),
        ("sdpa", AttentionImpl::Auto),
        ("cudnn", AttentionImpl::Cudnn),
        ("fused", AttentionImpl::Fused),
        ("flash_attention_2", AttentionImpl::Auto),
        ("flash_attention_3", AttentionImpl::Auto),
        ("reference", AttentionImpl::Reference),
        ("eager", AttentionImpl::Reference),
    ] {
        assert_eq!(
            plan(&[&format!("model.attn_implementation={name}")]).model.attention.implementation,
            want,
            "{name}"
        );
    }
    let says_auto = |name: &str| {
        let plan = plan(&[&format!("model.attn_implementation={name}")]);
        plan.notes.iter().any(|note| note.contains(&format!("{name} is read as auto")))
    };
    assert_eq!(["sdpa", "flash_attention_2", "flash_attention_3"].map(says_auto), [true; 3]);
    assert_eq!(["auto", "fused", "eager"].map(says_auto), [false; 3]);
    let default = AttentionChoice { implementation: AttentionImpl::Auto, deterministic: false };
    assert_eq!(plan(&[]).model.attention, default);
    assert!(plan(&["model.attn_deterministic=true"]).model.attention.deterministic);
    assert!(plan(&["model.attn_implementation=eager"]).notes.iter().any(|note| note.contains("all scores")));
}

#[test]
fn cudnn_attention_needs_a_gpu_and_16_bits() {
    let cudnn = "model.attn_implementation=cudnn";
    refused(&[cudnn, "device=cpu"], &["cudnn needs a GPU, but device is cpu", "use auto, or fused"]);
    refused(&[cudnn, "model.dtype=f32"], &["cudnn supports 16-bit dtypes only, but model.dtype is f32", "use auto"]);
}

#[test]
fn activation_checkpointing_has_three_spellings() {
    assert_eq!(plan(&[]).model.activations, CheckpointingMode::None);
    assert_eq!(plan(&["model.activation_checkpoint=full"]).model.activations, CheckpointingMode::Full);
    assert_eq!(plan(&["model.activation_checkpoint=selective"]).model.activations, CheckpointingMode::Selective);
    assert_eq!(plan(&["model.activation_checkpoint={every: 2}"]).model.activations, CheckpointingMode::EveryKth(2));
    assert_eq!(plan(&["model.disable_activation_checkpoint=false"]).model.activations, CheckpointingMode::Full);
    assert_eq!(plan(&["model.disable_activation_checkpoint=true"]).model.activations, CheckpointingMode::None);
    assert_eq!(plan(&["activation_checkpoint_cpu_offload=true"]).model.activations, CheckpointingMode::Offload(1.0));
    assert_eq!(
        plan(&["activation_checkpoint_cpu_offload=true", "model.disable_activation_checkpoint=false"])
            .model
            .activations,
        CheckpointingMode::Offload(1.0)
    );
    refused(
        &["model.activation_checkpoint=selective", "model.attn_implementation=reference"],
        &["selective cannot save the output of model.attn_implementation: reference", "use full"],
    );
    refused(&["model.activation_checkpoint=full", "model.disable_activation_checkpoint=true"], &["contradicts"]);
    refused(&["model.activation_checkpoint=none", "model.disable_activation_checkpoint=false"], &["contradicts"]);
    refused(&["activation_checkpoint_cpu_offload=true", "model.disable_activation_checkpoint=true"], &["contradicts"]);
    refused(&["activation_checkpoint_cpu_offload=true", "model.activation_checkpoint=full"], &["contradicts"]);
    refused(&["model.activation_checkpoint={every: 0}"], &["expected at least 1, found 0"]);
}

#[test]
fn the_inputs_of_a_fraction_of_the_blocks_may_be_offloaded() {
    let share = "model.activation_checkpoint={offload: 70%}";
    assert_eq!(plan(&[share]).model.activations, CheckpointingMode::Offload(0.7));
    assert_eq!(
        plan(&[share, "activation_checkpoint_cpu_offload=true"]).model.activations,
        CheckpointingMode::Offload(0.7)
    );
    for wrong in ["1.5", "-0.1"] {
        let argument = format!("model.activation_checkpoint={{offload: {wrong}}}");
        let want =
            format!("activation_checkpoint.offload: expected a fraction of the blocks from 0 to 1, found {wrong}");
        refused(&[&argument], &[&format!("argument `{argument}`"), &want]);
    }
    refused(&[share, "model.disable_activation_checkpoint=true"], &["contradicts"]);
}

#[test]
fn the_offload_folder_is_noted_and_whether_it_is_tmpfs() {
    let notes = |is_memory| {
        let loaded =
            Loaded::parse(Path::new("r.yaml"), BASE.to_owned(), &["model.activation_checkpoint=offload".into()]);
        let temp_dir = TempDir { path: "/scratch".into(), is_memory };
        Plan::resolve(&loaded.unwrap(), &Environment { temp_dir, ..known() }).unwrap().notes
    };
    let says = |notes: Vec<String>, what: &str| notes.iter().any(|note| note.contains(what));
    assert!(says(notes(false), "to /scratch (set by TMPDIR) by the CPU"));
    assert!(!says(notes(false), "tmpfs"));
    assert!(says(notes(true), "/scratch is in memory (tmpfs)"));
    assert!(!says(plan(&[]).notes, "offloaded"));
}

#[test]
fn a_tiled_mlp_is_opt_in_and_notes_the_rounding_of_bf16_gradients() {
    assert!(!plan(&[]).model.tiled_mlp);
    let tiled = plan(&["tiled_mlp_compute=true"]);
    assert!(tiled.model.tiled_mlp);
    assert!(!tiled.notes.iter().any(|note| note.contains("rounded once a tile")));
    let rounded = plan(&["tiled_mlp_compute=true", "deepspeed.bf16.bf16_master_weights_and_grads=true"]);
    assert!(rounded.notes.iter().any(|note| note.contains("rounded once a tile")), "{:?}", rounded.notes);
}

#[test]
fn mtp_layers_need_a_sensible_number_and_all_weights() {
    refused(&["model.mtp_num_layers=17"], &["model.mtp_num_layers: expected at most 16, found 17"]);
    refused(&["model.mtp_loss_scaling_factor=0.3"], &["there are no MTP layers", "set model.mtp_num_layers"]);
    refused(&["model.mtp_num_layers=1", "model.mtp_loss_scaling_factor=-1"], &["expected at least 0, found -1"]);
    refused(&["model.mtp_num_layers=1", "model.mtp_loss_scaling_factor=1e39"], &["expected at most 3.4e38", "1e39"]);
    refused(&["model.mtp_num_layers=1", "model.peft_config={r: 8}"], &["an adapter folder cannot hold MTP layers"]);
}
