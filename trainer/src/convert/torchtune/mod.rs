//! torchtune's YAML of its full and LoRA recipes.

mod components;
mod datasets;
mod interpolation;

use serde_json::{Value as Json, json};

use super::converter::{Converter, Rule, Rules};
use super::hugging_face::{self, BatchKeys};
use super::item::Item;
use super::report::FindingKind;
pub(super) use interpolation::interpolated;

const PROFILER: &str = "`trainer train --profile` profiles";
const RECORD: &str = "metrics.jsonl has the peak memory of every step";

const RULES: Rules = &[
    ("output_dir", Rule::Elsewhere),
    // Tokenizer, model and checkpoint.
    ("tokenizer._component_", Rule::BuiltIn("tokenizer.json of the model is read")),
    ("tokenizer.path", Rule::BuiltIn("tokenizer.json of the model is read")),
    ("tokenizer.merges_file", Rule::BuiltIn("tokenizer.json of the model is read")),
    ("tokenizer.max_seq_len", Rule::To("data.max_length")),
    ("tokenizer.prompt_template", Rule::By(prompt_template)),
    ("model", Rule::By(components::model)),
    ("checkpointer._component_", Rule::By(components::checkpointer)),
    ("checkpointer.checkpoint_dir", Rule::To("model.name_or_path")),
    ("checkpointer.checkpoint_files", Rule::BuiltIn("all weights files of the folder are read")),
    ("checkpointer.adapter_checkpoint", Rule::Nothing("set model.adapter_name_or_path to a folder of PEFT")),
    (
        "checkpointer.recipe_checkpoint",
        Rule::Nothing("a checkpoint of torchtune cannot be resumed; export its model first"),
    ),
    ("checkpointer.output_dir", Rule::Elsewhere),
    ("checkpointer.model_type", Rule::BuiltIn("config.json has the type")),
    ("checkpointer.safe_serialization", Rule::BuiltIn("weights are always safetensors")),
    ("checkpointer.keep_last_n_checkpoints", Rule::Elsewhere),
    ("checkpointer.enable_dcp", Rule::BuiltIn("sharded checkpoints are always written by all ranks")),
    ("resume_from_checkpoint", Rule::Elsewhere),
    ("save_adapter_weights_only", Rule::BuiltIn("an export of a LoRA run is the adapter's folder")),
    ("save_every_n_steps", Rule::Elsewhere),
    ("enable_async_checkpointing", Rule::Elsewhere),
    ("resize_token_embeddings", Rule::Unless("embeddings cannot be resized")),
    // Data.
    ("dataset", Rule::By(datasets::training)),
    ("dataset_val", Rule::By(datasets::validation)),
    ("shuffle", Rule::By(shuffle)),
    ("seed", Rule::By(seed)),
    ("collate_fn", Rule::BuiltIn("rows are never padded")),
    ("batch_size_val", Rule::BuiltIn("evaluation uses micro_batch_size; the loss is the same")),
    ("run_val_every_n_steps", Rule::To("eval_interval")),
    // Optimizer and loss.
    ("optimizer._component_", Rule::By(components::optimizer)),
    ("optimizer.lr", Rule::To("optimizer.learning_rate")),
    ("optimizer.weight_decay", Rule::To("optimizer.weight_decay")),
    ("optimizer.betas", Rule::To("optimizer.betas")),
    ("optimizer.eps", Rule::To("optimizer.eps")),
    ("optimizer.fused", Rule::BuiltIn("AdamW is one pass over each flat buffer")),
    ("optimizer.foreach", Rule::BuiltIn("AdamW is one pass over each flat buffer")),
    ("optimizer_in_bwd", Rule::Unless("gradients are kept until the step; offload_optimizer saves memory")),
    ("lr_scheduler._component_", Rule::By(components::scheduler)),
    ("lr_scheduler.num_warmup_steps", Rule::To("scheduler.warmup_steps")),
    ("lr_scheduler.num_cycles", Rule::To("scheduler.scheduler_specific_kwargs.num_cycles")),
    ("loss", Rule::By(components::loss)),
    ("clip_grad_norm", Rule::To("gradient_clipping")),
    // Training.
    ("epochs", Rule::Elsewhere),
    ("max_steps_per_epoch", Rule::Elsewhere),
    ("batch_size", Rule::Elsewhere),
    ("gradient_accumulation_steps", Rule::Elsewhere),
    ("compile", Rule::BuiltIn("there is nothing to compile")),
    ("enable_activation_checkpointing", Rule::By(checkpointing)),
    ("enable_activation_offloading", Rule::By(offloading)),
    ("ac_mode", Rule::Unless("model.activation_checkpoint: selective or {every: k} saves more")),
    ("ac_option", Rule::Unless("model.activation_checkpoint: selective or {every: k} saves more")),
    ("enable_fp8_training", Rule::By(fp8)),
    ("fp8_recipe_name", Rule::Elsewhere),
    // Environment and ranks.
    ("device", Rule::By(device)),
    ("dtype", Rule::By(dtype)),
    ("cudnn_deterministic_mode", Rule::To("model.attn_deterministic")),
    ("data_parallel_replicate_dim", Rule::By(degree)),
    ("data_parallel_shard_dim", Rule::By(degree)),
    ("tensor_parallel_dim", Rule::By(degree)),
    ("context_parallel_dim", Rule::By(degree)),
    ("tensor_parallel_plan", Rule::BuiltIn("every matrix is sharded")),
    ("fsdp_cpu_offload", Rule::By(cpu_offload)),
    ("fsdp_reshard_after_forward", Rule::By(reshard)),
    ("custom_sharded_layers", Rule::BuiltIn("embedding, layers and head are units of ZeRO")),
    // Logs.
    ("metric_logger._component_", Rule::By(components::metric_logger)),
    ("metric_logger.log_dir", Rule::BuiltIn("metrics.jsonl is in output_dir")),
    ("metric_logger.output_dir", Rule::BuiltIn("metrics.jsonl is in output_dir")),
    ("metric_logger.project", Rule::To("wandb.project")),
    ("metric_logger.entity", Rule::To("wandb.entity")),
    ("metric_logger.name", Rule::To("run_name")),
    ("metric_logger.group", Rule::Nothing("set the environment variable WANDB_RUN_GROUP")),
    ("log_every_n_steps", Rule::To("train_log_iter_interval")),
    ("log_peak_memory_stats", Rule::BuiltIn(RECORD)),
    ("profile_memory", Rule::BuiltIn(RECORD)),
    ("log_level", Rule::By(log_level)),
    ("profiler", Rule::By(profiler)),
];

/// Converts a file.
pub(super) fn convert(converter: &mut Converter<'_>) {
    refuse_other_recipes(converter);
    converter.apply(&[RULES]);
    let keys = BatchKeys { micro: "batch_size", accumulation: "gradient_accumulation_steps", default_micro: 1 };
    let packs = converter.draft.get("data.pack_samples") == Some(&Json::Bool(true));
    hugging_face::batch(converter, keys, packs);
    length(converter);
    saving(converter);
    defaults(converter);
}

/// Sets torchtune's defaults where they differ from the recipe's.
fn defaults(converter: &mut Converter<'_>) {
    converter.default("lr_scheduler", "scheduler.name", "constant".into());
    // A config with `clip_grad_norm: null` clips nothing.
    converter.default("clip_grad_norm", "gradient_clipping", 0.into());
    converter.default("optimizer.weight_decay", "optimizer.weight_decay", 0.01.into());
    if converter.draft.get("type") != Some(&json!("causal")) {
        converter.default("(long rows are truncated)", "data.truncation", "truncate".into());
    }
}

/// Refuses recipes of preference training and distillation.
fn refuse_other_recipes(converter: &mut Converter<'_>) {
    for key in ["teacher_model", "ref_checkpointer", "reward_and_value_model", "policy_model", "kd_loss"] {
        if let Some(item) = converter.get(key) {
            converter.refuse(&item, "distillation and preference training are not supported");
        }
    }
}

fn prompt_template(converter: &mut Converter<'_>, item: &Item<'_>) {
    let note = "the tokenizer's own chat template applies; tokenizer.chat_template names a Jinja file instead";
    converter.change(item, [], note);
}

fn shuffle(converter: &mut Converter<'_>, item: &Item<'_>) {
    let order = if item.flag() == Some(false) { "sequential" } else { "shuffle" };
    converter.map(item, [("data.order", order.into())]);
}

fn seed(converter: &mut Converter<'_>, item: &Item<'_>) {
    converter.map(item, [("seed", item.scalar()), ("data.seed", item.scalar())]);
}

fn checkpointing(converter: &mut Converter<'_>, item: &Item<'_>) {
    match (item.flag(), converter.is_on("enable_activation_offloading")) {
        (Some(true), true) => {
            converter.built_in(item, "enable_activation_offloading has the inputs of blocks offloaded")
        }
        (Some(on), _) => {
            let mode = if on { "full" } else { "none" };
            converter.map(item, [("model.activation_checkpoint", mode.into())]);
        }
        (None, _) => converter.fail(item, "true or false"),
    }
}

fn offloading(converter: &mut Converter<'_>, item: &Item<'_>) {
    match (item.flag(), converter.is_on("enable_activation_checkpointing")) {
        (Some(true), true) => {
            let note = "inputs of blocks are offloaded: by a GPU to host memory, by a CPU to files in TMPDIR";
            converter.change(item, [("model.activation_checkpoint", "offload".into())], note);
        }
        (Some(true), false) => converter.nothing(item, "activations are offloaded only with activation checkpointing"),
        _ => converter.built_in(item, "off"),
    }
}

fn fp8(converter: &mut Converter<'_>, item: &Item<'_>) {
    let recipe = converter.get("fp8_recipe_name");
    let name = recipe.as_ref().and_then(Item::text).unwrap_or("tensorwise").to_owned();
    if item.flag() != Some(true) {
        return converter.built_in(item, "off");
    }
    let note = match name.as_str() {
        "tensorwise" => "scales follow from each tensor's own maximum",
        _ => "scales follow from each tensor's own maximum; rows have no scales of their own",
    };
    converter.change(item, [("precision.recipe", "current".into())], note);
    if let Some(recipe) = recipe {
        converter.change(&recipe, [("precision.recipe", "current".into())], note);
    }
}

fn device(converter: &mut Converter<'_>, item: &Item<'_>) {
    match item.text() {
        Some(name) if name == "cpu" || name.starts_with("cuda") => converter.map(item, [("device", name.into())]),
        _ => converter.nothing(item, "devices are cpu and cuda"),
    }
}

fn dtype(converter: &mut Converter<'_>, item: &Item<'_>) {
    let name = item.text().unwrap_or_default();
    let has_adapter = converter.draft.has("model.peft_config") || components::is_lora(converter);
    match (name, has_adapter) {
        ("fp32", _) => converter.map(item, [("model.dtype", "f32".into())]),
        ("bf16" | "fp16", true) => converter.map(item, [("model.dtype", name.into())]),
        ("bf16", false) => {
            let settings = [
                ("model.dtype", "bf16".into()),
                ("deepspeed.bf16.bf16_master_weights_and_grads", true.into()),
                ("deepspeed.bf16.bf16_optimizer_states", true.into()),
            ];
            converter.map(item, settings);
        }
        _ => converter.fail(item, "bf16 or fp32"),
    }
}

fn degree(converter: &mut Converter<'_>, item: &Item<'_>) {
    if item.number() == Some(-1.0) {
        return converter.change(item, [stage_3()], "ZeRO stage 3 shards over all data-parallel ranks");
    }
    let Some(n) = item.whole().filter(|n| *n > 0) else { return converter.fail(item, "a number of ranks") };
    converter.n_ranks *= n as usize;
    match item.name() {
        "tensor_parallel_dim" => converter.map(item, [("tensor_parallel_size", n.into())]),
        "context_parallel_dim" => converter.map(item, [("context_parallel_size", n.into())]),
        "data_parallel_shard_dim" if n > 1 => {
            let shards = ("deepspeed.zero_optimization.mics_shard_size", n.into());
            converter.change(item, [stage_3(), shards], "ZeRO stage 3 shards over the ranks of a group");
        }
        _ => converter.built_in(item, "the ranks that are started decide the number of replicas"),
    }
}

fn stage_3() -> (&'static str, Json) {
    ("deepspeed.zero_optimization.stage", 3.into())
}

fn cpu_offload(converter: &mut Converter<'_>, item: &Item<'_>) {
    let cpu = || json!({"device": "cpu"});
    match item.flag() {
        Some(true) => {
            let settings = vec![
                ("deepspeed.zero_optimization.stage", 3.into()),
                ("deepspeed.zero_optimization.offload_optimizer", cpu()),
                ("deepspeed.zero_optimization.offload_param", cpu()),
            ];
            converter.record(FindingKind::Changed, item, settings, "ZeRO stage 3 offloads what FSDP offloads");
        }
        _ => converter.built_in(item, "off"),
    }
}

fn reshard(converter: &mut Converter<'_>, item: &Item<'_>) {
    let stage = if item.flag() == Some(false) { 2 } else { 3 };
    let note = "ZeRO shards what FSDP shards";
    converter.change(item, [("deepspeed.zero_optimization.stage", stage.into())], note);
}

fn log_level(converter: &mut Converter<'_>, item: &Item<'_>) {
    match item.text().map(str::to_uppercase).as_deref() {
        Some("WARN") => converter.map(item, [("logger.level", "WARNING".into())]),
        Some(level @ ("DEBUG" | "INFO" | "WARNING" | "ERROR")) => converter.map(item, [("logger.level", level.into())]),
        _ => converter.fail(item, "DEBUG, INFO, WARNING or ERROR"),
    }
}

fn profiler(converter: &mut Converter<'_>, item: &Item<'_>) {
    match item.get("enabled").and_then(|enabled| enabled.flag()) {
        Some(true) => converter.nothing(item, PROFILER),
        _ => converter.built_in(item, PROFILER),
    }
}

/// Converts the epochs and the steps of an epoch.
fn length(converter: &mut Converter<'_>) {
    let (epochs, steps) = (converter.get("epochs"), converter.get("max_steps_per_epoch"));
    let n_epochs = epochs.as_ref().and_then(Item::whole).unwrap_or(1);
    match steps {
        Some(item) => {
            let Some(n) = item.whole() else { return converter.fail(&item, "a number of steps") };
            let note = format!("{n_epochs} epochs of {n} steps; each begins the data anew in torchtune, but not here");
            converter.change(&item, [("train_iters", (n * n_epochs).into())], &note);
            if let Some(epochs) = epochs {
                converter.change(&epochs, [("train_iters", (n * n_epochs).into())], &note);
            }
        }
        None => {
            if let Some(item) = epochs {
                converter.map(&item, [("epochs", item.scalar())]);
            }
        }
    }
}

/// Converts checkpoints: one after each epoch, and the model at the end.
fn saving(converter: &mut Converter<'_>) {
    let output = converter.get("output_dir").or_else(|| converter.get("checkpointer.output_dir"));
    let folder = output.as_ref().and_then(Item::text).unwrap_or("runs/torchtune").trim_end_matches('/').to_owned();
    let steps = converter.get("save_every_n_steps");
    let mut sharded = json!({"type": "sharded", "output_dir": format!("{folder}/checkpoints")});
    let resumes = converter.is_on("resume_from_checkpoint");
    if resumes {
        sharded["auto_resume"] = true.into();
    }
    match &steps {
        Some(steps) => sharded["save_every_n_steps"] = steps.scalar(),
        None => sharded["save_every_n_epochs"] = 1.into(),
    }
    let limit = converter.get("checkpointer.keep_last_n_checkpoints");
    if let Some(limit) = &limit {
        sharded["save_total_limit"] = limit.scalar();
    }
    if converter.is_on("enable_async_checkpointing") {
        sharded["async_save"] = true.into();
    }
    let exported =
        json!({"type": "huggingface", "output_dir": format!("{folder}/model"), "save_end_of_training": true});
    let list = ("checkpoint", json!([sharded, exported]));
    if let Some(item) = &output {
        let note =
            "the folder has metrics.jsonl, run.json, checkpoints and the exported model, in folders of their own";
        converter.change(item, [("output_dir", folder.clone().into()), list.clone()], note);
    } else {
        converter.default("output_dir", "output_dir", folder.into());
        converter.default("checkpointer.output_dir", "checkpoint", list.1.clone());
    }
    let others = ["checkpointer.output_dir", "enable_async_checkpointing", "resume_from_checkpoint"];
    for item in others.iter().filter_map(|key| converter.get(key)).chain(steps).chain(limit).collect::<Vec<_>>() {
        match item.flag() {
            Some(false) => converter.built_in(&item, "off"),
            _ => converter.map(&item, [list.clone()]),
        }
    }
}
