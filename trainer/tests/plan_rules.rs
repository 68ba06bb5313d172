//! What a plan refuses, and what it fills in.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;

use candlewick_model::Config;
use candlewick_ops::{AttentionChoice, AttentionImpl, LossScaling};
use serde_json::json;
use trainer::data::{Horizon, Overlong, Packing, Padding, Sampling};
use trainer::metrics::Console;
use trainer::plan::{Activations, ComputeDtype, Engines, Init, Known, Machines, Plan, RanksPlan, Seat, TempDir};
use trainer::recipe::{DdpBackend, Loaded, RecipeError};
use trainer::schedule::{Floor, Shape, Span};

fn known() -> Known {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "initializer_range": 0.02
    });
    let temp_dir = TempDir { path: "/var/tmp".into(), is_memory: false };
    let config = Some(Config::from_json(config).unwrap());
    Known {
        config,
        n_cores: 4,
        seat: Seat::ALONE,
        engines: Engines { mpi: false, nccl: false },
        temp_dir,
        has_train_py: false,
        tasks_generate: false,
        console: Console::Full,
        capacity: None,
    }
}

const BASE: &str = "model: {name_or_path: org/model}\ndata: {sources: [a.jsonl]}\n";

fn resolve(text: &str, arguments: &[&str]) -> Result<Plan, RecipeError> {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), text.to_owned(), &arguments)?;
    Plan::resolve(&loaded, &known())
}

#[track_caller]
fn plan(arguments: &[&str]) -> Plan {
    resolve(BASE, arguments).unwrap_or_else(|e| panic!("{e}"))
}

/// The arguments make the base recipe wrong, and the message contains these texts.
#[track_caller]
fn refused(arguments: &[&str], want: &[&str]) {
    let message = match resolve(BASE, arguments) {
        Ok(_) => panic!("{arguments:?} is accepted"),
        Err(error) => error.to_string(),
    };
    for part in want {
        assert!(message.contains(part), "no {part:?} in:\n{message}");
    }
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    for argument in [
        "expert_parallel_size=8",
        "arctic_moe=true",
        "enable_arctic_moe_custom_optimization=true",
        "enable_routing_replay=true",
        "mem_profiler=step",
        "optimizer.type=fused_adam_moe",
        "optimizer.type=cpu_adam_moe",
        "model.save_name=x",
        "wandb.enable=true",
        "tokenizer.tokenize_kwargs={a: 1}",
        "data.repeat_to_pack_max_length=true",
        "type=dpo",
        "beta=0.1",
        "ref_model={name_or_path: x}",
        "data.max_prompt_length=4K",
        "data.sources.0.type=snowflake",
        "data.sources.0.process=false",
        "data.sources.0.kwargs={streaming: true}",
        "data.sources.0.sql=select",
        "deepspeed.zero_optimization.offload_optimizer.device=nvme",
        "deepspeed.zero_optimization.offload_param.device=nvme",
        "deepspeed.torch_autocast.enabled=true",
        "deepspeed.train_batch_size=8",
        "deepspeed.zero_optimization.zero_hpz_partition_size=8",
    ] {
        let key = argument.split('=').next().unwrap();
        refused(&[argument], &[&format!("argument `{argument}`:"), key, "not implemented yet"]);
    }
    refused(&["code=mine.py"], &["code: Python code (mine.py) is not supported"]);
}

#[test]
fn half_precision_scales_losses_as_deepspeed_does() {
    let scaling = |arguments: &[&str]| plan(arguments).optimizer.loss_scaling;
    assert_eq!(scaling(&[]), LossScaling::NONE);
    let default = LossScaling { initial: 65536.0, window: 1000, hysteresis: 2, min: 1.0 };
    assert_eq!(plan(&["model.dtype=fp16"]).model.dtype, ComputeDtype::F16);
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
fn states_are_bf16_if_the_recipe_says_so() {
    assert_eq!(plan(&[]).optimizer.moments, ComputeDtype::F32);
    assert_eq!(plan(&["deepspeed.bf16.bf16_optimizer_states=true"]).optimizer.moments, ComputeDtype::Bf16);
    refused(&["deepspeed.bf16.bf16_optimizer_states=1"], &["expected true or false, found 1"]);
    let masters = "deepspeed.bf16.bf16_master_weights_and_grads=true";
    assert_eq!(plan(&["model.dtype=bf16", masters]).optimizer.masters, ComputeDtype::Bf16);
    assert_eq!(plan(&["model.dtype=bf16"]).optimizer.masters, ComputeDtype::F32);
    refused(&["model.dtype=f32", masters], &["bf16_master_weights_and_grads: true needs model.dtype: bf16"]);
}

#[test]
fn the_optimizer_may_live_on_the_host() {
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
    refused(&[&cpu, &ratio], &[&format!("argument `{ratio}`"), "expected a share of the parameters from 0 to 1"]);
    refused(&[&format!("{offload}.ratio=0.5")], &["ratio: nothing is offloaded", "offload_optimizer.device: cpu"]);
    refused(&[&cpu, &format!("{offload}.pin_memory=3")], &["expected true or false, found 3"]);
    refused(&[&cpu, &format!("{offload}.buffer_count=4")], &["buffer_count", "not implemented yet"]);
    let weights = "deepspeed.zero_optimization.offload_param.device=cpu";
    let stage_3 = "deepspeed.zero_optimization.stage=3";
    let offloaded = plan(&[weights, &cpu, stage_3]);
    assert!(offloaded.weights_on_host && offloaded.ranks.zero_stage == 3);
    assert!(!plan(&[&cpu, stage_3]).weights_on_host);
    refused(&[weights, &cpu], &["cpu needs ZeRO stage 3", "zero_optimization.stage: 3"]);
    refused(&[weights, stage_3], &["cpu needs the optimizer there, too"]);
    refused(
        &[weights, stage_3, &cpu, &format!("{offload}.ratio=0.5")],
        &["needs the optimizer there", "without a ratio"],
    );
}

#[test]
fn a_refused_key_of_the_recipe_has_its_line_and_all_of_them_are_shown() {
    let error =
        resolve("enable_routing_replay: true\nmodel: {name_or_path: a}\nwandb:\n  enable: true\n", &[]).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("recipes/r.yaml:1:1: `enable_routing_replay: true` is not implemented yet"), "{message}");
    assert!(message.contains("recipes/r.yaml:4:3: `wandb.enable: true` is not implemented yet"), "{message}");
    assert!(message.contains("data.sources: there is nothing to train on"), "{message}");
    assert_eq!(error.faults().len(), 3);
}

#[test]
fn default_values_of_what_is_not_implemented_are_fine() {
    plan(&[
        "sequence_parallel_size=1",
        "context_parallel_size=1",
        "expert_parallel_size=1",
        "arctic_moe=auto",
        "enable_routing_replay=false",
        "mem_profiler=null",
        "wandb={enable: false, project: p, name: n}",
        "data.sources.0.kwargs={verification_mode: no_checks}",
        "data.sources.0.process=true",
        "deepspeed={zero_optimization: {stage: 3, reduce_bucket_size: 5e8, offload_param: {device: none}}, steps_per_print: 10}",
        "deepspeed.wall_clock_breakdown=false",
        "deepspeed.bf16.enabled=true",
        "model.attn_implementation=flash_attention_2",
        "model.type=liger",
        "code=train.py",
    ]);
}

#[test]
fn attention_has_four_names_and_those_of_transformers() {
    for (name, want) in [
        ("auto", AttentionImpl::Auto),
        ("sdpa", AttentionImpl::Auto),
        ("cudnn", AttentionImpl::Cudnn),
        ("fused", AttentionImpl::Fused),
        ("flash_attention_2", AttentionImpl::Fused),
        ("flash_attention_3", AttentionImpl::Fused),
        ("reference", AttentionImpl::Reference),
        ("eager", AttentionImpl::Reference),
    ] {
        assert_eq!(
            plan(&[&format!("model.attn_implementation={name}")]).model.attention.implementation,
            want,
            "{name}"
        );
    }
    let default = AttentionChoice { implementation: AttentionImpl::Auto, deterministic: false };
    assert_eq!(plan(&[]).model.attention, default);
    assert!(plan(&["model.attn_deterministic=true"]).model.attention.deterministic);
    assert!(plan(&["model.attn_implementation=eager"]).notes.iter().any(|note| note.contains("all scores")));
}

#[test]
fn attention_by_cudnn_wants_a_gpu_and_16_bits() {
    let cudnn = "model.attn_implementation=cudnn";
    refused(&[cudnn, "device=cpu"], &["cudnn computes on GPUs only, but device is cpu", "use auto, or fused"]);
    refused(&[cudnn, "model.dtype=f32"], &["cudnn computes in 16 bits only, but model.dtype is f32", "use auto"]);
}

#[test]
fn deepspeed_may_not_contradict_the_recipe() {
    refused(&["deepspeed.zero_optimization.stage=4"], &["expected 0, 1, 2 or 3, found 4"]);
    refused(&["deepspeed.bf16.enabled=true", "model.dtype=f32"], &["contradicts model.dtype"]);
    refused(&["deepspeed.gradient_clipping=2", "gradient_clipping=1"], &["keep one of them"]);
    assert_eq!(plan(&["deepspeed.gradient_clipping=0.5"]).optimizer.gradient_clipping, Some(0.5));
    assert_eq!(plan(&["gradient_clipping=0"]).optimizer.gradient_clipping, None);
    assert_eq!(plan(&[]).optimizer.gradient_clipping, Some(1.0));
}

#[test]
fn an_evaluation_interval_and_evaluation_data_need_each_other() {
    refused(&["eval_interval=10"], &["eval_interval: 10, but there are no evaluation data"]);
    refused(&["data.eval_sources=[b.jsonl]"], &["eval_interval is missing"]);
    refused(&["eval_on_start=true"], &["eval_on_start: there are no evaluation data"]);
    refused(&["data.train_eval_split=[0.9, 0.1]"], &["eval_interval is missing"]);
    let plan = plan(&["data.train_eval_split=[90%, 10%]", "eval_interval=10"]);
    assert_eq!(plan.eval.unwrap().interval, 10);
    assert!((plan.data.eval_fraction - 0.1).abs() < 1e-12);
}

#[test]
fn tasks_need_an_interval() {
    let tasks = "eval={tasks: [arc_easy], limit: 10}";
    refused(&[tasks], &["eval.interval is missing"]);
    refused(&["eval={limit: 10}"], &["eval: there are no tasks"]);
    refused(&["eval={tasks: [arc_easy], evry: 10}"], &["evry"]);
    refused(&[tasks, "eval.interval=5", "eval.fewshot_as_multiturn=true"], &["prompts are no chats"]);
    let plan = plan(&[tasks, "eval_interval=10", "eval_on_start=true"]);
    assert!(plan.eval.is_none(), "there are no held-out data");
    let tasks_plan = plan.tasks.unwrap();
    assert_eq!((tasks_plan.when.interval, tasks_plan.when.on_start, tasks_plan.limit), (10, true, Some(10.0)));
    assert_eq!((tasks_plan.fewshot_seed, tasks_plan.max_gen_toks, tasks_plan.bootstrap_iters), (1234, 256, 100_000));
}

#[test]
fn what_says_which_save_is_the_best_is_measured() {
    let [tasks, held_out] = ["eval={tasks: [arc_easy]}", "data.train_eval_split=[90%, 10%]"];
    let best = |arguments: &[&str]| {
        let best = plan(&[&["eval_interval=10"], arguments].concat()).best?;
        Some((best.metric, best.greater_is_better))
    };
    assert_eq!(best(&[held_out]), None);
    assert_eq!(best(&[tasks]), Some((None, None)));
    for name in ["loss", "eval_loss", "loss/eval", "eval/loss"] {
        let metric = format!("metric_for_best_model={name}");
        assert_eq!(best(&[held_out, tasks, &metric]), Some((Some("loss/eval".to_owned()), Some(false))), "{name}");
    }
    for name in ["arc_easy/acc", "eval/arc_easy/acc"] {
        let metric = format!("metric_for_best_model={name}");
        let found = best(&[held_out, tasks, &metric, "greater_is_better=true"]);
        assert_eq!(found, Some((Some("arc_easy/acc".to_owned()), Some(true))));
        refused(&[held_out, "eval_interval=10", &metric], &["`arc_easy/acc` is not measured in this run"]);
    }
    refused(&[tasks, "eval_interval=10", "metric_for_best_model=acc"], &["`acc` is not measured", "TASK/METRIC"]);
    refused(&[tasks, "eval_interval=10", "metric_for_best_model=loss"], &["there are no evaluation data"]);
    refused(&["greater_is_better=true"], &["greater_is_better: there is no metric"]);
}

#[test]
fn a_split_sums_to_one_and_excludes_evaluation_sources() {
    refused(
        &["data.train_eval_split=[0.9, 0.2]", "eval_interval=1"],
        &["expected two shares that sum to 1, found [0.9, 0.2]"],
    );
    refused(&["data.train_eval_split=[0, 1]", "eval_interval=1"], &["expected two shares"]);
    refused(
        &["data.train_eval_split=[0.9, 0.1]", "data.eval_sources=[b]", "eval_interval=1"],
        &["data.train_eval_split and data.eval_sources exclude each other"],
    );
    plan(&["data.train_eval_split=[1.0, 0.0]", "data.eval_sources=[b]", "eval_interval=1"]);
}

#[test]
fn one_checkpoint_may_resume_and_it_must_be_able_to() {
    let two = "checkpoint=[{output_dir: a, auto_resume: true}, {type: deepspeed, output_dir: b, auto_resume: true}]";
    refused(&[two], &["checkpoint.1.auto_resume: checkpoint.0 resumes already"]);
    refused(
        &["checkpoint={type: huggingface, output_dir: a, auto_resume: true}"],
        &["checkpoint.auto_resume: a huggingface checkpoint holds the weights alone"],
    );
    refused(
        &["checkpoint=[{output_dir: a}, {output_dir: a}]"],
        &["another checkpoint of the same type is saved there"],
    );
    refused(&["checkpoint={output_dir: a, keep: 0}"], &["checkpoint.keep: expected at least 1"]);
    let plan = plan(&[
        "checkpoint=[{type: huggingface, output_dir: a, enabled: false}, {output_dir: b, save_every_n_steps: 1K}]",
    ]);
    assert_eq!(plan.checkpoints.len(), 1);
    assert_eq!(plan.checkpoints[0].save_every_n_steps, 1000);
}

#[test]
fn the_longest_row_is_the_models_unless_given() {
    assert_eq!(plan(&[]).data.max_length, 2048);
    assert_eq!(plan(&["data.max_length=1Ki"]).data.max_length, 1024);
    refused(&["data.max_length=4Ki"], &["4096 is longer than the model's max_position_embeddings, 2048"]);
    refused(&["data.max_length=1"], &["expected at least 2"]);
    assert_eq!(plan(&["model.hf_config_kwargs={max_position_embeddings: 4096}"]).data.max_length, 4096);
}

#[test]
fn without_the_config_the_plan_says_what_it_does_not_know_yet() {
    let loaded = Loaded::parse(Path::new("r.yaml"), BASE.to_owned(), &[]).unwrap();
    let plan = Plan::resolve(&loaded, &Known { config: None, ..known() }).unwrap();
    assert!(plan.notes.iter().any(|note| note.starts_with("data.max_length will be")), "{:?}", plan.notes);
}

#[test]
fn packing_follows_the_type() {
    assert_eq!(plan(&[]).data.packing, Packing::Off);
    assert_eq!(plan(&["data.pack_samples=true"]).data.packing, Packing::Fit);
    assert_eq!(plan(&["data.pack_samples=true", "data.always_max_length=true"]).data.packing, Packing::Exact);
    assert_eq!(plan(&["type=causal"]).data.packing, Packing::Exact);
    assert_eq!(plan(&["type=causal", "data.pack_samples=false"]).data.packing, Packing::Off);
    refused(&["data.pack_samples=true", "micro_batch_size=2"], &["with data.pack_samples it must be 1"]);
    refused(&["data.always_max_length=true"], &["it needs data.pack_samples: true"]);
    refused(&["data.fuse_positions_prob=0.5"], &["it needs data.pack_samples: true"]);
    refused(&["data.pack_samples=true", "data.fuse_positions_prob=1.5"], &["expected 0 to 1, found 1.5"]);
}

#[test]
fn overlong_samples_are_an_error_unless_the_recipe_says_otherwise() {
    assert_eq!(plan(&[]).data.overlong, Overlong::Error);
    assert_eq!(plan(&["data.filter_samples=true"]).data.overlong, Overlong::Drop);
    assert_eq!(plan(&["data.filter_samples=false"]).data.overlong, Overlong::Error);
    assert_eq!(plan(&["data.overlong=truncate"]).data.overlong, Overlong::Truncate);
    refused(
        &["data.overlong=truncate", "data.filter_samples=true"],
        &["data.filter_samples contradicts data.overlong"],
    );
    refused(&["type=causal", "data.overlong=drop"], &["rows of exactly max_length are cut"]);
}

#[test]
fn padding_has_three_forms() {
    assert_eq!(plan(&[]).data.padding, Padding::Nothing);
    assert_eq!(plan(&["data.pad_to=div_length"]).data.padding, Padding::Multiple(256));
    assert_eq!(plan(&["data.div_length=64"]).data.padding, Padding::Multiple(64));
    assert_eq!(plan(&["data.pad_to=max_length"]).data.padding, Padding::MaxLength);
    refused(&["data.div_length=0"], &["data.div_length: expected at least 1"]);
    refused(&["data.pad_to=none", "data.div_length=8"], &["contradicts data.pad_to: none"]);
    refused(
        &["data.pad_to=max_length", "data.max_length=1000", "data.div_length=256"],
        &["no multiple of div_length 256", "use max_length 768 or 1024"],
    );
}

#[test]
fn iterations_replace_epochs() {
    assert_eq!(plan(&[]).data.horizon, Horizon::Epochs(1));
    assert_eq!(plan(&["epochs=3"]).data.horizon, Horizon::Epochs(3));
    assert_eq!(plan(&["epochs=3", "train_iters=10"]).data.horizon, Horizon::Steps(10));
    refused(&["epochs=0"], &["trains nothing"]);
    refused(&["micro_batch_size=0"], &["micro_batch_size: expected at least 1, found 0"]);
    refused(&["gradient_accumulation_steps=0"], &["expected at least 1"]);
}

#[test]
fn activation_checkpoints_are_spelt_in_three_ways() {
    assert_eq!(plan(&[]).model.activations, Activations::Keep);
    assert_eq!(plan(&["model.activation_checkpoint=full"]).model.activations, Activations::Recompute);
    assert_eq!(plan(&["model.activation_checkpoint={every: 2}"]).model.activations, Activations::RecomputeEvery(2));
    assert_eq!(plan(&["model.disable_activation_checkpoint=false"]).model.activations, Activations::Recompute);
    assert_eq!(plan(&["model.disable_activation_checkpoint=true"]).model.activations, Activations::Keep);
    assert_eq!(plan(&["activation_checkpoint_cpu_offload=true"]).model.activations, Activations::Offload(1.0));
    assert_eq!(
        plan(&["activation_checkpoint_cpu_offload=true", "model.disable_activation_checkpoint=false"])
            .model
            .activations,
        Activations::Offload(1.0)
    );
    refused(&["model.activation_checkpoint=full", "model.disable_activation_checkpoint=true"], &["contradicts"]);
    refused(&["model.activation_checkpoint=none", "model.disable_activation_checkpoint=false"], &["contradicts"]);
    refused(&["activation_checkpoint_cpu_offload=true", "model.disable_activation_checkpoint=true"], &["contradicts"]);
    refused(&["activation_checkpoint_cpu_offload=true", "model.activation_checkpoint=full"], &["contradicts"]);
    refused(&["model.activation_checkpoint={every: 0}"], &["expected at least 1, found 0"]);
}

#[test]
fn the_inputs_of_a_share_of_the_blocks_may_be_parked() {
    let share = "model.activation_checkpoint={offload: 70%}";
    assert_eq!(plan(&[share]).model.activations, Activations::Offload(0.7));
    assert_eq!(plan(&[share, "activation_checkpoint_cpu_offload=true"]).model.activations, Activations::Offload(0.7));
    for wrong in ["1.5", "-0.1"] {
        let argument = format!("model.activation_checkpoint={{offload: {wrong}}}");
        let want = format!("activation_checkpoint.offload: expected a share of the blocks from 0 to 1, found {wrong}");
        refused(&[&argument], &[&format!("argument `{argument}`"), &want]);
    }
    refused(&[share, "model.disable_activation_checkpoint=true"], &["contradicts"]);
}

#[test]
fn where_activations_are_parked_is_said_and_whether_that_is_memory() {
    let notes = |is_memory| {
        let loaded =
            Loaded::parse(Path::new("r.yaml"), BASE.to_owned(), &["model.activation_checkpoint=offload".into()]);
        let temp_dir = TempDir { path: "/scratch".into(), is_memory };
        Plan::resolve(&loaded.unwrap(), &Known { temp_dir, ..known() }).unwrap().notes
    };
    let says = |notes: Vec<String>, what: &str| notes.iter().any(|note| note.contains(what));
    assert!(says(notes(false), "the CPU in /scratch"));
    assert!(!says(notes(false), "tmpfs"));
    assert!(says(notes(true), "/scratch is kept in memory (tmpfs)"));
    assert!(!says(plan(&[]).notes, "parks"));
}

#[test]
fn a_tiled_mlp_is_asked_for_and_says_what_bf16_gradients_lose() {
    assert!(!plan(&[]).model.tiled_mlp);
    let tiled = plan(&["tiled_mlp_compute=true"]);
    assert!(tiled.model.tiled_mlp);
    assert!(!tiled.notes.iter().any(|note| note.contains("rounded once a tile")));
    let rounded = plan(&["tiled_mlp_compute=true", "deepspeed.bf16.bf16_master_weights_and_grads=true"]);
    assert!(rounded.notes.iter().any(|note| note.contains("rounded once a tile")), "{:?}", rounded.notes);
}

#[test]
fn a_model_has_one_origin() {
    refused(&["model={}"], &["model: there is no model"]);
    refused(&["model.config={model_type: llama}"], &["exclude each other"]);
    refused(&["model={config: {}, revision: x}", "tokenizer.name_or_path=t"], &["model.revision has no meaning"]);
    refused(&["model={config: {}}"], &["tokenizer.name_or_path is missing"]);
    assert_eq!(plan(&[]).model.init, Init::Load);
    assert_eq!(plan(&["model={config: {}}", "tokenizer.name_or_path=t"]).model.init, Init::Random);
    assert_eq!(plan(&["model.type=random-weight-hf"]).model.init, Init::Random);
    assert_eq!(plan(&["model.hf_config_kwargs={num_hidden_layers: 1}"]).model.init, Init::Random);
    assert_eq!(plan(&["model.hf_config_kwargs={num_hidden_layers: 2}"]).model.init, Init::Load);
    assert_eq!(plan(&["model.dtype=float"]).model.dtype, ComputeDtype::F32);
}

#[test]
fn an_adapter_is_checked_where_it_is_written() {
    assert!(plan(&["model.peft_config={peft_type: LORA, r: 8, target_modules: all-linear}"]).model.adapter.is_some());
    refused(
        &["model.peft_config={peft_type: LORA, r: 0}"],
        &["argument `model.peft_config=", "model.peft_config:", "`r`"],
    );
}

#[test]
fn a_chat_template_is_a_file_or_itself() {
    refused(&["tokenizer.chat_template=missing.jinja"], &["there is no file missing.jinja"]);
    assert!(plan(&["tokenizer.chat_template='{{ messages }}'"]).tokenizer.chat_template.is_some());
}

#[test]
fn sources_are_checked_one_by_one() {
    refused(&["data.sources.0={split: a}"], &["the key `data.sources.0.name_or_path` is missing"]);
    refused(&["data.sources.0.type=huggingface_causal"], &["not a source for `type: sft`"]);
    refused(&["type=causal", "data.sources.0.type=huggingface_instruct"], &["not a source for `type: causal`"]);
    refused(&["type=causal", "data.sources.0.role_mapping={user: a}"], &["plain text has no roles"]);
    refused(&["data.sources.0.role_mapping={user: a.b}"], &["expected a column, or array.field.value, found `a.b`"]);
    refused(&["data.sources.0.sample_ratio=0.5", "data.sources.0.sample_count=3"], &["exclude each other"]);
    refused(&["data.sources.0.sample_ratio=150%"], &["expected above 0 and at most 1, found 1.5"]);
    refused(&["data.sources.0.sample_count=0"], &["expected at least 1"]);
    refused(&["data.sources.0.format=jsonl"], &["unknown value \"jsonl\"", "values: messages"]);
    refused(&["data.type=causal"], &["data.type differs from the run's type"]);
    let plan = plan(&["data.sources.0.sample_count=10", "data.sources.0.role_mapping={user: q, assistant: a}"]);
    assert_eq!(plan.data.sources[0].sampling, Sampling::Count(10));
    assert_eq!(plan.data.sources[0].role_mapping[1], ("assistant".into(), "a".into()));
}

#[test]
fn the_arguments_of_load_dataset_are_read() {
    let given = "data.sources.0.kwargs={name: main, data_files: {train: [a.json, b.json], test: c.json}, field: rows, \
                 sample_by: document, sep: ';', trust_remote_code: true}";
    let source = plan(&[given]).data.sources.remove(0);
    let files = [("train", "a.json"), ("train", "b.json"), ("test", "c.json")];
    assert_eq!(source.data_files, files.map(|(split, file)| (Some(split.to_owned()), file.to_owned())));
    assert_eq!((source.subset.as_deref(), source.field.as_deref()), (Some("main"), Some("rows")));
    assert_eq!((source.sample_by.as_deref(), source.delimiter), (Some("document"), Some(b';')));
    let source = plan(&["data.sources.0.kwargs={data_files: 'x/*.json'}"]).data.sources.remove(0);
    assert_eq!(source.data_files, [(None, "x/*.json".to_owned())]);
    for (argument, want) in [
        ("{data_files: 3}", "kwargs.data_files: expected a path or pattern, a list of them"),
        ("{data_files: []}", "a map from splits to them, found []"),
        ("{sample_by: word}", "kwargs.sample_by: expected line, paragraph or document"),
        ("{sep: '||'}", "kwargs.sep: expected one ASCII character"),
        ("{name: 3}", "kwargs.name: expected the name of a configuration"),
    ] {
        refused(&[&format!("data.sources.0.kwargs={argument}")], &[want]);
    }
}

#[test]
fn the_optimizers_numbers_are_in_their_bounds() {
    refused(&["optimizer.lr=0"], &["optimizer.learning_rate: expected above 0"]);
    refused(&["optimizer.betas=[0.9, 1]"], &["below 1, found [0.9, 1]"]);
    refused(&["optimizer.eps=0"], &["optimizer.eps: expected above 0"]);
    refused(&["optimizer.weight_decay=-1"], &["optimizer.weight_decay: expected at least 0, found -1"]);
    refused(&["gradient_clipping=-1"], &["gradient_clipping: expected at least 0"]);
    for name in ["fused_adam", "adamw", "adam", "cpu_adam"] {
        plan(&[&format!("optimizer.type={name}")]);
    }
    let optimizer = plan(&[]).optimizer;
    assert_eq!((optimizer.learning_rate, optimizer.weight_decay, optimizer.eps), (5e-4, 0.1, 1e-8));
}

#[test]
fn schedules_have_the_names_and_numbers_of_transformers() {
    let shape = |arguments: &[&str]| plan(arguments).schedule.shape;
    assert_eq!(shape(&[]), Shape::Linear);
    assert_eq!(plan(&[]).schedule.warmup, Span::Ratio(0.1));
    assert_eq!(plan(&["scheduler.warmup_steps=10"]).schedule.warmup, Span::Steps(10));
    assert_eq!(shape(&["scheduler.name=cosine"]), Shape::Cosine { num_cycles: 0.5 });
    assert_eq!(
        shape(&["scheduler.name=cosine_with_min_lr", "scheduler.scheduler_specific_kwargs.min_lr_rate=10%"]),
        Shape::CosineWithMinLr { num_cycles: 0.5, floor: Floor::MinLrRate(0.1) }
    );
    let wsd = shape(&["scheduler={type: wds, num_warmup_steps: 5, num_decay_steps: 20, min_lr_ratio: 0.1}"]);
    assert!(matches!(wsd, Shape::WarmupStableDecay { decay: Span::Steps(20), min_lr_ratio: 0.1, .. }), "{wsd:?}");
    assert_eq!(shape(&["scheduler={name: constant, warmup_ratio: 0}"]), Shape::Constant);

    refused(&["scheduler={name: constant, warmup_steps: 5}"], &["constant has no warm-up", "constant_with_warmup"]);
    refused(&["scheduler={warmup_ratio: 0.1, warmup_steps: 5}"], &["exclude each other"]);
    refused(&["scheduler.warmup_ratio=2"], &["scheduler.warmup_ratio: expected 0 to 1, found 2"]);
    refused(&["scheduler.lr=1"], &["scheduler.learning_rate has moved"]);
    refused(&["scheduler.name=cosine_with_min_lr"], &["give one of scheduler_specific_kwargs.min_lr"]);
    refused(&["scheduler.name=wsd"], &["give one of scheduler_specific_kwargs.num_decay_steps"]);
    refused(&["scheduler={type: wsd, name: cosine}"], &["contradicts scheduler.type: wsd"]);
    refused(&["scheduler.scheduler_specific_kwargs.min_lr=1"], &["min_lr is not a number of this schedule"]);
    refused(&["scheduler.num_decay_steps=3"], &["belongs to the warmup_stable_decay schedule"]);
    refused(
        &["train_iters=10", "scheduler.warmup_steps=11"],
        &["scheduler: failed to fit 11 warm-up steps into a run of 10 steps"],
    );
}

#[test]
fn generations_have_bounds() {
    refused(&["generate={prompts: []}"], &["generate.prompts: expected a list of texts"]);
    refused(&["generate={prompts: [a], top_p: 0}"], &["generate.top_p: expected above 0"]);
    refused(&["generate={prompts: [a], temperature: -1}"], &["generate.temperature: expected at least 0"]);
    let generate = plan(&["generate={prompts: [a]}", "seed=7"]).generate.unwrap();
    assert_eq!((generate.max_new_tokens, generate.temperature, generate.seed), (64, 0.0, 7));
}

#[test]
fn the_runs_folder_is_named_after_the_recipe() {
    let log = plan(&[]).log;
    assert_eq!(log.output_dir.as_deref(), Some(Path::new("runs/r")));
    assert_eq!(log.metrics_path.as_deref(), Some(Path::new("runs/r/metrics.jsonl")));
    let log = plan(&["output_dir=/dev/null", "logger.print_output_ranks=[1]"]).log;
    assert_eq!((log.output_dir, log.metrics_path, log.console), (None, None, Console::Quiet));
    let logger = plan(&["logger={output_dir: out, level: info}"]).logger;
    assert_eq!(logger.file.as_deref(), Some(Path::new("out/logs/rank_0.log")));
    assert_eq!(logger.level.as_deref(), Some("info"));
}

#[test]
fn a_plan_reads_as_a_table() {
    let text = "model: {name_or_path: org/model, dtype: f32}\ndata:\n  sources: [a.jsonl]\n  max_length: 1Ki\n\
optimizer: {lr: 1e-4}\ncheckpoint:\n  - {output_dir: out, save_every_n_steps: 100, auto_resume: true}\n";
    insta::assert_snapshot!(resolve(text, &["epochs=2"]).unwrap().to_string());
}

/// A plan of the first of some ranks, or what is wrong with it.
fn of_ranks(n_ranks: usize, arguments: &[&str]) -> Result<RanksPlan, String> {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &arguments).unwrap();
    let known = Known { seat: Seat::first_of(n_ranks), ..known() };
    Plan::resolve(&loaded, &known).map(|plan| plan.ranks).map_err(|error| error.to_string())
}

#[test]
fn ranks_share_as_the_stage_says() {
    let plan = |dp_replicate, dp_shard, sequence, zero_stage| {
        Ok(RanksPlan { dp_replicate, dp_shard, sequence, zero_stage, ..RanksPlan::alone() })
    };
    let in_ring = |context, plan: Result<RanksPlan, String>| plan.map(|plan| RanksPlan { context, ..plan });
    const STAGE_3: &str = "deepspeed.zero_optimization.stage=3";
    const GROUPS_OF_4: &str = "deepspeed.zero_optimization.mics_shard_size=4";
    assert_eq!(of_ranks(8, &[]), plan(8, 1, 1, 0));
    assert_eq!(of_ranks(8, &[STAGE_3]), plan(1, 8, 1, 3));
    assert_eq!(of_ranks(8, &[STAGE_3, GROUPS_OF_4]), plan(2, 4, 1, 3));
    assert_eq!(of_ranks(8, &["sequence_parallel_size=4"]), plan(2, 1, 4, 0));
    assert_eq!(of_ranks(8, &[STAGE_3, "sequence_parallel_size=2"]), plan(1, 4, 2, 3));
    assert_eq!(of_ranks(8, &[STAGE_3, GROUPS_OF_4, "sequence_parallel_size=2"]), plan(2, 2, 2, 3));
    assert_eq!(of_ranks(1, &[STAGE_3]), plan(1, 1, 1, 0));
    assert_eq!(of_ranks(6, &["context_parallel_size=3"]), in_ring(3, plan(2, 1, 1, 0)));
    assert_eq!(of_ranks(6, &[STAGE_3, "context_parallel_size=3"]), in_ring(3, plan(1, 2, 1, 3)));
    let both = ["sequence_parallel_size=2", "context_parallel_size=2"];
    assert_eq!(of_ranks(8, &both), in_ring(2, plan(2, 1, 2, 0)));
    assert_eq!(of_ranks(8, &[&both[..], &[STAGE_3, GROUPS_OF_4]].concat()), in_ring(2, plan(2, 1, 2, 3)));
}

#[test]
fn ranks_that_do_not_divide_are_refused_with_what_would() {
    let refused = |n_ranks, arguments: &[&str], want: [&str; 2]| {
        let message = of_ranks(n_ranks, arguments).unwrap_err();
        assert!(want.iter().all(|part| message.contains(part)), "{message}");
    };
    let groups_of_3 = ["deepspeed.zero_optimization.stage=2", "deepspeed.zero_optimization.mics_shard_size=3"];
    refused(8, &groups_of_3, ["groups of 3 cannot be made of 8 ranks", "use 1 or 2 or 4 or 8"]);
    refused(6, &["sequence_parallel_size=4"], ["6 ranks do not fall into groups of 4", "use 1 or 2 or 3 or 6"]);
    let heads = "4 attention heads with 2 key heads cannot be shared by 3 ranks";
    refused(6, &["sequence_parallel_size=3"], [heads, "use 1 or 2"]);
    refused(1, &["sequence_parallel_size=2"], ["1 rank does not fall into groups of 2", "say how many with --ranks N"]);
    refused(2, &["sequence_parallel_size=0"], ["expected at least 1, found 0", "sequence_parallel_size"]);
    refused(2, &["context_parallel_size=0"], ["expected at least 1, found 0", "context_parallel_size"]);
    refused(6, &["context_parallel_size=4"], ["6 ranks do not fall into rings of 4", "use 1 or 2 or 3 or 6"]);
    let both = ["sequence_parallel_size=2", "context_parallel_size=2"];
    refused(6, &both, ["3 groups of 2 ranks do not fall into rings of 2", "use 1 or 3"]);
    let shards = [&groups_of_3[..], &["context_parallel_size=2"]].concat();
    refused(6, &shards, ["groups of 3 cannot be made of 6 ranks of which 2 share a sequence", "use 2 or 6"]);
    let reference = ["context_parallel_size=2", "model.attn_implementation=reference"];
    refused(2, &reference, ["reference attention cannot compute with a part of the keys", "auto or fused"]);
}

#[test]
fn matrices_and_blocks_are_shared_as_the_recipe_says() {
    let plan = |stages, dp_replicate, dp_shard, tensor, zero_stage| {
        Ok(RanksPlan { stages, dp_replicate, dp_shard, tensor, zero_stage, ..RanksPlan::alone() })
    };
    assert_eq!(of_ranks(8, &["tensor_parallel_size=2"]), plan(1, 4, 1, 2, 0));
    assert_eq!(of_ranks(8, &["pipeline_parallel_size=2", "tensor_parallel_size=2"]), plan(2, 2, 1, 2, 0));
    let stage_1 = "deepspeed.zero_optimization.stage=1";
    assert_eq!(of_ranks(8, &["pipeline_parallel_size=2", "tensor_parallel_size=2", stage_1]), plan(2, 1, 2, 2, 1));
    let norms = of_ranks(2, &["tensor_parallel_size=2", "sequence_parallel_norms=false"]).unwrap();
    assert!(!norms.norms_in_parts);
}

#[test]
fn what_cannot_be_shared_is_refused_with_what_could() {
    let refused = |n_ranks, arguments: &[&str], want: &[&str]| {
        let message = of_ranks(n_ranks, arguments).unwrap_err();
        assert!(want.iter().all(|part| message.contains(part)), "{message}");
    };
    refused(8, &["tensor_parallel_size=3"], &["8 ranks do not fall into groups of 3", "use 1 or 2 or 4 or 8"]);
    let heads = "4 attention heads, 2 key heads and an MLP of";
    refused(8, &["tensor_parallel_size=4"], &[heads, "cannot be shared by 4 ranks", "use 1 or 2"]);
    let vocabulary = |n: usize| {
        format!(
            "model.hf_config_kwargs={{vocab_size: {n}, num_attention_heads: 16, \
        num_key_value_heads: 16, head_dim: 4, intermediate_size: 32}}"
        )
    };
    let few = "a vocabulary of 101 does not go around for 16 ranks with 7 tokens each";
    refused(16, &["tensor_parallel_size=16", &vocabulary(101)], &[few, "use 1 or 2 or 4 or 8"]);
    assert!(of_ranks(16, &["tensor_parallel_size=16", &vocabulary(106)]).is_ok());
    refused(8, &["pipeline_parallel_size=3"], &["8 ranks do not fall into 3 stages", "use 1 or 2 or 4 or 8"]);
    refused(8, &["pipeline_parallel_size=8"], &["2 blocks do not go around for 8 stages with 1 run each", "at most 2"]);
    let two = ["pipeline_parallel_size=2", "pipeline_layers=[1]"];
    refused(8, &two, &["pipeline_layers: 1 numbers for 2 stages", "give 2 numbers"]);
    let three = ["pipeline_parallel_size=2", "pipeline_layers=[1, 2]"];
    refused(8, &three, &["3 blocks in all, and the model has 2"]);
}

/// What connects two ranks, or why nothing does.
fn backend(engines: Engines, machines: Machines, arguments: &[&str]) -> Result<DdpBackend, String> {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &arguments).unwrap();
    let known = Known { seat: Seat { machines, ..Seat::first_of(2) }, engines, ..known() };
    Plan::resolve(&loaded, &known).map(|plan| plan.ranks.backend).map_err(|error| error.to_string())
}

/// The notes of a plan of the first of some ranks.
fn notes_of_ranks(n_ranks: usize, arguments: &[&str]) -> Vec<String> {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &arguments).unwrap();
    Plan::resolve(&loaded, &Known { seat: Seat::first_of(n_ranks), ..known() }).unwrap().notes
}

#[test]
fn what_has_no_effect_on_these_ranks_is_noted_and_so_is_a_pipeline_that_nothing_fills() {
    let pipeline = ["pipeline_parallel_size=2", "pipeline_schedule=afab", "gradient_accumulation_steps=1"];
    for (n_ranks, arguments, want) in [
        (2, &["pipeline_schedule=afab"][..], "pipeline_schedule has no effect: there is one stage"),
        (2, &["sequence_parallel_norms=false"], "sequence_parallel_norms has no effect: no ranks share matrices"),
        (
            2,
            &pipeline,
            "gradient_accumulation_steps: 1 do not fill 2 stages, which wait 50 % of the time; more fill them",
        ),
    ] {
        assert_eq!(notes_of_ranks(n_ranks, arguments), [want]);
    }
    assert!(notes_of_ranks(2, &["pipeline_parallel_size=2", "gradient_accumulation_steps=2"]).is_empty());
    assert!(notes_of_ranks(2, &["tensor_parallel_size=2", "sequence_parallel_norms=false"]).is_empty());
}

/// Where nobody knows yet what is there: neither this build nor this machine decides anything.
#[test]
fn ranks_that_are_only_asked_about_are_not_held_to_this_machine() {
    use Machines::Unknown;
    for arguments in [&["ddp_backend=nccl"][..], &["ddp_backend=mpi"], &["ddp_backend=nccl", "device=cuda"]] {
        assert!(backend(PLAIN, Unknown, arguments).is_ok(), "{arguments:?}");
    }
    let said = backend(PLAIN, Unknown, &["ddp_backend=nccl", "device=cpu"]).unwrap_err();
    assert!(said.contains("NCCL connects GPUs"), "{said}");
    let notes = notes_of_ranks(2, &["memory=auto", "device=cuda"]);
    assert_eq!(notes, ["memory: auto chooses where the ranks run, by what is free there"]);
}

const PLAIN: Engines = Engines { mpi: false, nccl: false };
const ALL: Engines = Engines { mpi: true, nccl: true };

#[test]
fn what_can_connect_the_ranks_is_accepted() {
    use Machines::{Nodes, One, Several};
    for (engines, machines, arguments, want) in [
        (PLAIN, One, &[][..], DdpBackend::Auto),
        (PLAIN, Nodes, &[], DdpBackend::Auto),
        (ALL, Several, &["device=cpu"], DdpBackend::Auto),
        (ALL, Several, &["device=cuda"], DdpBackend::Auto),
        (PLAIN, One, &["ddp_backend=local"], DdpBackend::Local),
        (ALL, Nodes, &["ddp_backend=local", "device=cpu"], DdpBackend::Local),
        (ALL, Several, &["ddp_backend=mpi"], DdpBackend::Mpi),
        (ALL, One, &["ddp_backend=mpi", "device=cpu"], DdpBackend::Mpi),
        (ALL, Several, &["ddp_backend=nccl"], DdpBackend::Nccl),
        (ALL, One, &["ddp_backend=nccl", "device=cuda"], DdpBackend::Nccl),
        (PLAIN, One, &["ddp_backend=staged", "device=cpu"], DdpBackend::Staged),
        (ALL, Several, &["ddp_backend=staged", "device=cuda:1"], DdpBackend::Staged),
    ] {
        assert_eq!(backend(engines, machines, arguments), Ok(want), "{engines:?} {machines:?} {arguments:?}");
    }
}

#[test]
fn what_cannot_connect_the_ranks_is_refused_with_what_can() {
    use Machines::{One, Several};
    let no_mpi = Engines { mpi: false, ..ALL };
    for (engines, machines, arguments, want) in [
        (PLAIN, Several, &[][..], ["run on several machines", "build it with `--features mpi`"]),
        (no_mpi, Several, &["device=cpu"], ["run on several machines", "build it with `--features mpi`"]),
        (no_mpi, One, &["ddp_backend=mpi"], ["built without MPI", "build it with `--features mpi`"]),
        (no_mpi, Several, &["ddp_backend=staged", "device=cuda"], ["run on several machines", "`--features mpi`"]),
        (PLAIN, One, &["ddp_backend=nccl"], ["built without CUDA", "scripts/build-gpu"]),
        (ALL, One, &["ddp_backend=nccl", "device=cpu"], ["connects GPUs", "set device: cuda"]),
        (ALL, One, &["ddp_backend=nccl", "device=cuda:1"], ["all ranks would have cuda:1", "staged"]),
        (ALL, One, &["ddp_backend=auto", "device=cuda:1"], ["all ranks would have cuda:1", "staged"]),
        (ALL, One, &["ddp_backend=local", "device=cuda"], ["tensors of the CPU", "nccl"]),
        (ALL, One, &["ddp_backend=mpi", "device=cuda"], ["tensors of the CPU", "nccl"]),
        (ALL, Several, &["ddp_backend=local"], ["run on several machines", "mpi"]),
    ] {
        let said = backend(engines, machines, arguments).unwrap_err();
        assert!(want.iter().all(|part| said.contains(part)), "{engines:?} {machines:?} {arguments:?}: {said}");
    }
    let said = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &["ddp_backend=ncll".to_owned()]);
    let said = said.unwrap_err().to_string();
    assert!(said.contains("did you mean") && said.contains("nccl"), "{said}");
}

#[test]
fn one_rank_needs_nothing_to_connect_it() {
    for backend in ["mpi", "nccl", "local", "staged"] {
        let plan = plan(&[&format!("ddp_backend={backend}")]);
        assert!(plan.notes.iter().any(|note| note.contains("ddp_backend has no effect")), "{:?}", plan.notes);
    }
    assert!(plan(&["ddp_backend=auto"]).notes.is_empty());
}
