//! torchtune's YAML of its full and LoRA recipes.

mod components;
mod datasets;
mod interpolation;

use candlewick_text::quantity::counted;
use serde_json::{Value as Json, json};

use super::chat_templates::{convert_template, equal_template};
use super::converter::{Converter, KeyRule, KeyRules};
use super::hugging_face::{self, BatchKeys};
use super::item::ForeignItem;
use super::report::FindingKind;
pub(super) use interpolation::interpolated;

const PROFILER: &str = "`trainer train --profile` profiles";
const RECORD: &str = "metrics.jsonl has the peak memory of every step";

const RULES: KeyRules = &[
    ("output_dir", KeyRule::Elsewhere),
    // Tokenizer, model and checkpoint.
    ("tokenizer._component_", KeyRule::BuiltIn("tokenizer.json of the model is read")),
    ("tokenizer.path", KeyRule::BuiltIn("tokenizer.json of the model is read")),
    ("tokenizer.merges_file", KeyRule::BuiltIn("tokenizer.json of the model is read")),
    ("tokenizer.max_seq_len", KeyRule::To("data.max_length")),
    ("tokenizer.prompt_template", KeyRule::By(prompt_template)),
    ("model", KeyRule::By(components::model)),
    ("checkpointer._component_", KeyRule::By(components::checkpointer)),
    ("checkpointer.checkpoint_dir", KeyRule::To("model.name_or_path")),
    ("checkpointer.checkpoint_files", KeyRule::BuiltIn("all weights files of the folder are read")),
    ("checkpointer.adapter_checkpoint", KeyRule::Nothing("set model.adapter_name_or_path to a folder of PEFT")),
    (
        "checkpointer.recipe_checkpoint",
        KeyRule::Nothing("a checkpoint of torchtune cannot be resumed; export its model first"),
    ),
    ("checkpointer.output_dir", KeyRule::Elsewhere),
    ("checkpointer.model_type", KeyRule::BuiltIn("config.json has the type")),
    ("checkpointer.safe_serialization", KeyRule::BuiltIn("weights are always safetensors")),
    ("checkpointer.keep_last_n_checkpoints", KeyRule::Elsewhere),
    ("checkpointer.enable_dcp", KeyRule::BuiltIn("sharded checkpoints are always written by all ranks")),
    ("resume_from_checkpoint", KeyRule::Elsewhere),
    ("save_adapter_weights_only", KeyRule::BuiltIn("an export of a LoRA run is the adapter's folder")),
    ("save_every_n_steps", KeyRule::Elsewhere),
    ("enable_async_checkpointing", KeyRule::Elsewhere),
    ("resize_token_embeddings", KeyRule::Unless("embeddings cannot be resized")),
    // Data.
    ("dataset", KeyRule::By(datasets::training)),
    ("dataset_val", KeyRule::By(datasets::validation)),
    ("shuffle", KeyRule::By(shuffle)),
    ("seed", KeyRule::By(seed)),
    ("collate_fn", KeyRule::BuiltIn("rows are never padded")),
    ("batch_size_val", KeyRule::BuiltIn("evaluation uses micro_batch_size; the loss is the same")),
    ("run_val_every_n_steps", KeyRule::To("eval_interval")),
    // Optimizer and loss.
    ("optimizer._component_", KeyRule::By(components::optimizer)),
    ("optimizer.lr", KeyRule::To("optimizer.learning_rate")),
    ("optimizer.weight_decay", KeyRule::To("optimizer.weight_decay")),
    ("optimizer.betas", KeyRule::To("optimizer.betas")),
    ("optimizer.eps", KeyRule::To("optimizer.eps")),
    ("optimizer.fused", KeyRule::BuiltIn("AdamW is one pass over each flat buffer")),
    ("optimizer.foreach", KeyRule::BuiltIn("AdamW is one pass over each flat buffer")),
    ("optimizer_in_bwd", KeyRule::Unless("gradients are kept until the step; offload_optimizer saves memory")),
    ("lr_scheduler._component_", KeyRule::By(components::scheduler)),
    ("lr_scheduler.num_warmup_steps", KeyRule::To("scheduler.warmup_steps")),
    ("lr_scheduler.num_cycles", KeyRule::To("scheduler.scheduler_specific_kwargs.num_cycles")),
    ("loss", KeyRule::By(components::loss)),
    ("clip_grad_norm", KeyRule::To("gradient_clipping")),
    // Training.
    ("epochs", KeyRule::Elsewhere),
    ("max_steps_per_epoch", KeyRule::Elsewhere),
    ("batch_size", KeyRule::Elsewhere),
    ("gradient_accumulation_steps", KeyRule::Elsewhere),
    ("compile", KeyRule::BuiltIn("there is nothing to compile")),
    ("enable_activation_checkpointing", KeyRule::By(checkpointing)),
    ("enable_activation_offloading", KeyRule::By(offloading)),
    ("ac_mode", KeyRule::Unless("model.activation_checkpoint: selective or {every: k} saves more")),
    ("ac_option", KeyRule::Unless("model.activation_checkpoint: selective or {every: k} saves more")),
    ("enable_fp8_training", KeyRule::By(fp8)),
    ("fp8_recipe_name", KeyRule::Elsewhere),
    // Environment and ranks.
    ("device", KeyRule::By(device)),
    ("dtype", KeyRule::By(dtype)),
    ("cudnn_deterministic_mode", KeyRule::To("model.attn_deterministic")),
    ("data_parallel_replicate_dim", KeyRule::By(degree)),
    ("data_parallel_shard_dim", KeyRule::By(degree)),
    ("tensor_parallel_dim", KeyRule::By(degree)),
    ("context_parallel_dim", KeyRule::By(degree)),
    ("tensor_parallel_plan", KeyRule::BuiltIn("every matrix is sharded")),
    ("fsdp_cpu_offload", KeyRule::By(cpu_offload)),
    ("fsdp_reshard_after_forward", KeyRule::By(reshard)),
    ("custom_sharded_layers", KeyRule::BuiltIn("embedding, layers and head are units of ZeRO")),
    // Logs.
    ("metric_logger._component_", KeyRule::By(components::metric_logger)),
    ("metric_logger.log_dir", KeyRule::BuiltIn("metrics.jsonl is in output_dir")),
    ("metric_logger.output_dir", KeyRule::BuiltIn("metrics.jsonl is in output_dir")),
    ("metric_logger.project", KeyRule::To("wandb.project")),
    ("metric_logger.entity", KeyRule::To("wandb.entity")),
    ("metric_logger.name", KeyRule::To("run_name")),
    ("metric_logger.group", KeyRule::Nothing("set the environment variable WANDB_RUN_GROUP")),
    ("log_every_n_steps", KeyRule::To("train_log_iter_interval")),
    ("log_peak_memory_stats", KeyRule::BuiltIn(RECORD)),
    ("profile_memory", KeyRule::BuiltIn(RECORD)),
    ("log_level", KeyRule::By(log_level)),
    ("profiler", KeyRule::By(profiler)),
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

fn prompt_template(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    convert_template(converter, item, &[equal_template("torchtune.data.ChatMLTemplate", "chatml")]);
}

fn shuffle(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let order = if item.flag() == Some(false) { "sequential" } else { "shuffle" };
    converter.map(item, [("data.order", order.into())]);
}

fn seed(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    converter.map(item, [("seed", item.scalar()), ("data.seed", item.scalar())]);
}

fn checkpointing(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
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

fn offloading(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match (item.flag(), converter.is_on("enable_activation_checkpointing")) {
        (Some(true), true) => {
            let note = "inputs of blocks are offloaded: by a GPU to host memory, by a CPU to files in TMPDIR";
            converter.change(item, [("model.activation_checkpoint", "offload".into())], note);
        }
        (Some(true), false) => converter.nothing(item, "activations are offloaded only with activation checkpointing"),
        _ => converter.built_in(item, "off"),
    }
}

fn fp8(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let recipe = converter.get("fp8_recipe_name");
    let name = recipe.as_ref().and_then(ForeignItem::text).unwrap_or("tensorwise").to_owned();
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

fn device(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.text() {
        Some(name) if name == "cpu" || name.starts_with("cuda") => converter.map(item, [("device", name.into())]),
        _ => converter.nothing(item, "devices are cpu and cuda"),
    }
}

fn dtype(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
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

fn degree(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    if item.number() == Some(-1.0) {
        return converter.change(item, [stage_3()], "ZeRO stage 3 shards over all data-parallel ranks");
    }
    let Some(n) = converter.degree(item) else { return };
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

fn cpu_offload(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
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

fn reshard(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let stage = if item.flag() == Some(false) { 2 } else { 3 };
    let note = "ZeRO shards what FSDP shards";
    converter.change(item, [("deepspeed.zero_optimization.stage", stage.into())], note);
}

fn log_level(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.text().map(str::to_uppercase).as_deref() {
        Some("WARN") => converter.map(item, [("logger.level", "WARNING".into())]),
        Some(level @ ("DEBUG" | "INFO" | "WARNING" | "ERROR")) => converter.map(item, [("logger.level", level.into())]),
        _ => converter.fail(item, "DEBUG, INFO, WARNING or ERROR"),
    }
}

fn profiler(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.get("enabled").and_then(|enabled| enabled.flag()) {
        Some(true) => converter.nothing(item, PROFILER),
        _ => converter.built_in(item, PROFILER),
    }
}

/// Converts the epochs and the steps of an epoch.
fn length(converter: &mut Converter<'_>) {
    let (epochs, steps) = (converter.get("epochs"), converter.get("max_steps_per_epoch"));
    let n_epochs = epochs.as_ref().and_then(ForeignItem::whole).unwrap_or(1);
    match steps {
        Some(item) => {
            let Some(n) = item.whole() else { return converter.fail(&item, "a number of steps") };
            let (epochs_in_words, steps_in_words) = (counted(n_epochs, "epoch"), counted(n, "step"));
            let note =
                format!("{epochs_in_words} of {steps_in_words}; each begins the data anew in torchtune, but not here");
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
    let folder =
        output.as_ref().and_then(ForeignItem::text).unwrap_or("runs/torchtune").trim_end_matches('/').to_owned();
    let steps = converter.get("save_every_n_steps");
    let mut sharded = json!({"type": "sharded"});
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
    let exported = json!({"type": "huggingface", "save_end_of_training": true});
    let list = ("checkpoint", json!([sharded, exported]));
    if let Some(item) = &output {
        let note =
            "the folder has metrics.jsonl, run.json, checkpoints and the exported model, in folders of their own";
        converter.change(item, [("output_dir", folder.into()), list.clone()], note);
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
