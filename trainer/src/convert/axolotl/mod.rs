//! axolotl's YAML. The keys are those of `axolotl/utils/schemas` at version 0.18.

mod datasets;
mod lora;
mod model;
mod ranks;

use serde_json::{Value as Json, json};

use super::chat_templates::{ForeignTemplate, convert_template, equal_template};
use super::converter::{Converter, KeyRule, KeyRules};
use super::hugging_face::{self, BatchKeys, KERNELS, SYSTEM_MESSAGE, TOKEN_RATE};
use super::item::ForeignItem;
use super::optimizer_groups::optimizer_groups;
use super::report::FindingKind;
use super::saving::{self, SaveInterval, SavingDefaults};

const CONFIG: &str = "config.json and tokenizer.json have the type";
const PACKING: &str = "packing needs no such parameter";
const EXPERTS: &str = "experts are always one matrix multiplication per projection";

const RULES: KeyRules = &[
    // Model.
    ("base_model", KeyRule::To("model.name_or_path")),
    ("revision_of_model", KeyRule::To("model.revision")),
    ("base_model_config", KeyRule::By(model::base_model_config)),
    ("overrides_of_model_config", KeyRule::By(model::overrides)),
    ("rope_scaling", KeyRule::By(model::rope_scaling)),
    ("tokenizer_config", KeyRule::To("tokenizer.name_or_path")),
    ("model_type", KeyRule::BuiltIn(CONFIG)),
    ("cls_model_config", KeyRule::BuiltIn(CONFIG)),
    ("tokenizer_type", KeyRule::BuiltIn(CONFIG)),
    ("tokenizer_use_fast", KeyRule::BuiltIn(CONFIG)),
    ("tokenizer_legacy", KeyRule::BuiltIn(CONFIG)),
    ("is_llama_derived_model", KeyRule::BuiltIn(CONFIG)),
    ("is_mistral_derived_model", KeyRule::BuiltIn(CONFIG)),
    ("is_qwen_derived_model", KeyRule::BuiltIn(CONFIG)),
    ("bfloat16", KeyRule::By(hugging_face::dtype)),
    ("float16", KeyRule::By(hugging_face::dtype)),
    ("fp8", KeyRule::By(model::fp8)),
    ("fp8_enable_fsdp_float8_all_gather", KeyRule::By(model::fp8_gather)),
    ("special_tokens", KeyRule::By(model::special_tokens)),
    ("tokens", KeyRule::MissingFeature("new_tokens")),
    ("added_tokens_overrides", KeyRule::MissingFeature("new_tokens")),
    ("resize_token_embeddings_to_32x", KeyRule::MissingFeature("new_tokens")),
    ("shrink_embeddings", KeyRule::MissingFeature("new_tokens")),
    ("embeddings_skip_upcast", KeyRule::BuiltIn("the embedding has model.dtype")),
    ("unfrozen_parameters", KeyRule::MissingFeature("unfrozen_parameters")),
    ("attn_implementation", KeyRule::By(model::attention)),
    ("eager_attention", KeyRule::By(model::eager)),
    ("flash_attention", KeyRule::BuiltIn("fused attention is the default")),
    ("sdp_attention", KeyRule::BuiltIn("fused attention is the default")),
    ("xformers_attention", KeyRule::BuiltIn("fused attention is the default")),
    ("flex_attention", KeyRule::BuiltIn("fused attention is the default")),
    ("sage_attention", KeyRule::BuiltIn("fused attention is the default")),
    ("flash_attn_cross_entropy", KeyRule::BuiltIn(KERNELS)),
    ("flash_attn_rms_norm", KeyRule::BuiltIn(KERNELS)),
    ("flash_attn_fuse_mlp", KeyRule::BuiltIn(KERNELS)),
    ("flash_attn_fuse_qkv", KeyRule::BuiltIn(KERNELS)),
    ("use_kernels", KeyRule::BuiltIn(KERNELS)),
    ("experts_implementation", KeyRule::BuiltIn(EXPERTS)),
    ("chunked_cross_entropy", KeyRule::BuiltIn("the loss is always computed in chunks")),
    ("chunked_cross_entropy_num_chunks", KeyRule::BuiltIn("the size of chunks follows from the memory")),
    ("cut_cross_entropy", KeyRule::BuiltIn("the loss is always computed in chunks")),
    ("liger_rope", KeyRule::BuiltIn(KERNELS)),
    ("liger_rms_norm", KeyRule::BuiltIn(KERNELS)),
    ("liger_glu_activation", KeyRule::BuiltIn(KERNELS)),
    ("liger_layer_norm", KeyRule::BuiltIn(KERNELS)),
    ("liger_cross_entropy", KeyRule::BuiltIn(KERNELS)),
    ("liger_fused_linear_cross_entropy", KeyRule::BuiltIn(KERNELS)),
    ("plugins", KeyRule::By(model::plugins)),
    ("activation_offloading", KeyRule::By(model::activation_offloading)),
    ("selective_checkpointing", KeyRule::By(model::selective)),
    ("tiled_mlp", KeyRule::To("tiled_mlp_compute")),
    ("tiled_mlp_num_shards", KeyRule::BuiltIn("tiles have about hidden_size tokens")),
    // Data.
    ("datasets", KeyRule::By(datasets::training)),
    ("test_datasets", KeyRule::By(datasets::evaluation)),
    ("pretraining_dataset", KeyRule::By(datasets::pretraining)),
    ("val_set_size", KeyRule::By(hugging_face::held_out_rows)),
    ("dataset_prepared_path", KeyRule::To("data.cache_dir")),
    ("dataset_processes", KeyRule::To("data.num_proc")),
    ("dataset_num_proc", KeyRule::To("data.num_proc")),
    ("dataset_keep_in_memory", KeyRule::BuiltIn("tokens are memory-mapped")),
    ("dataset_exact_deduplication", KeyRule::Unless("rows are not deduplicated")),
    (
        "shuffle_merged_datasets",
        KeyRule::BuiltIn("every epoch has an order of its own; data.order: sequential keeps the order"),
    ),
    ("shuffle_before_merging_datasets", KeyRule::BuiltIn("every epoch has an order of its own")),
    ("curriculum_sampling", KeyRule::By(curriculum)),
    ("skip_prepare_dataset", KeyRule::Unless("rows are always tokenized here")),
    ("chat_template", KeyRule::By(chat_template)),
    ("chat_template_jinja", KeyRule::To("tokenizer.chat_template")),
    ("chat_template_kwargs", KeyRule::By(chat_template_kwargs)),
    ("default_system_message", KeyRule::Nothing(SYSTEM_MESSAGE)),
    ("train_on_inputs", KeyRule::By(hugging_face::train_on_prompts)),
    ("sequence_len", KeyRule::To("data.max_length")),
    ("eval_sequence_len", KeyRule::By(eval_sequence_len)),
    ("excess_length_strategy", KeyRule::By(excess)),
    ("min_sample_len", KeyRule::Nothing("short rows are kept")),
    ("sample_packing", KeyRule::By(sample_packing)),
    ("eval_sample_packing", KeyRule::BuiltIn("evaluation packs as training does; the loss is the same")),
    ("sample_packing_group_size", KeyRule::BuiltIn(PACKING)),
    ("sample_packing_bin_size", KeyRule::BuiltIn(PACKING)),
    ("sample_packing_sequentially", KeyRule::BuiltIn(PACKING)),
    ("multipack_real_batches", KeyRule::BuiltIn(PACKING)),
    ("pretrain_multipack_buffer_size", KeyRule::BuiltIn(PACKING)),
    ("pretrain_multipack_attn", KeyRule::BuiltIn("packed samples do not attend to each other")),
    ("pad_to_sequence_len", KeyRule::BuiltIn("rows need no padding; data.pad_to: max_length pads")),
    ("pad_to_multiple_of", KeyRule::To("data.div_length")),
    ("batch_flattening", KeyRule::BuiltIn("rows of a micro-batch are never padded")),
    // Batches and optimizer.
    ("micro_batch_size", KeyRule::Elsewhere),
    (
        "batch_size",
        KeyRule::Nothing("the batch is micro_batch_size x gradient_accumulation_steps x data-parallel ranks"),
    ),
    ("eval_batch_size", KeyRule::BuiltIn("evaluation uses micro_batch_size; the loss is the same")),
    ("num_epochs", KeyRule::By(hugging_face::epochs)),
    ("optimizer", KeyRule::By(hugging_face::optimizer)),
    ("lr_scheduler", KeyRule::By(scheduler)),
    ("cosine_min_lr_ratio", KeyRule::By(min_lr_ratio)),
    ("cosine_constant_lr_ratio", KeyRule::Nothing("use scheduler.name: warmup_stable_decay")),
    ("embedding_lr", KeyRule::By(optimizer_groups)),
    ("embedding_lr_scale", KeyRule::By(optimizer_groups)),
    ("lr_groups", KeyRule::By(optimizer_groups)),
    // Ranks.
    ("tensor_parallel_size", KeyRule::By(ranks::degree)),
    ("context_parallel_size", KeyRule::By(ranks::degree)),
    ("sequence_parallel_degree", KeyRule::By(ranks::degree)),
    ("dp_shard_size", KeyRule::By(ranks::dp_shard)),
    ("dp_replicate_size", KeyRule::By(ranks::dp_replicate)),
    ("heads_k_stride", KeyRule::BuiltIn("ring attention passes keys and values in pieces of its own")),
    ("ring_attn_func", KeyRule::BuiltIn("ring attention supports packed rows")),
    ("fsdp_version", KeyRule::BuiltIn("ZeRO shards what FSDP shards")),
    ("fsdp_final_state_dict_type", KeyRule::BuiltIn("checkpoints load on any number of ranks")),
    ("ddp", KeyRule::BuiltIn("several ranks train together if a launcher starts them")),
    ("device_map", KeyRule::BuiltIn("device chooses the device")),
    ("deepcompile", KeyRule::BuiltIn("there is nothing to compile")),
    // Evaluation, checkpoints and logs.
    ("auto_resume_from_checkpoints", KeyRule::Elsewhere),
    ("save_first_step", KeyRule::Unless("no checkpoint follows the first step")),
    ("eval_table_size", KeyRule::Unless("generate.prompts prints samples after training")),
    ("eval_max_new_tokens", KeyRule::BuiltIn("evaluation generates no text; generate.max_new_tokens is for samples")),
    ("do_bench_eval", KeyRule::Unless("eval.tasks evaluates tasks during training")),
    ("do_causal_lm_eval", KeyRule::Unless("eval.tasks evaluates tasks during training")),
    ("loss_watchdog_threshold", KeyRule::By(loss_watchdog)),
    ("loss_watchdog_patience", KeyRule::Nothing("the first loss above the limit counts")),
    ("gc_steps", KeyRule::BuiltIn("memory is freed at once")),
    ("gc_collect_steps", KeyRule::BuiltIn("memory is freed at once")),
    ("include_tokens_per_second", KeyRule::BuiltIn(TOKEN_RATE)),
    ("include_tkps", KeyRule::BuiltIn(TOKEN_RATE)),
    ("profiler_steps", KeyRule::Nothing("`trainer train --profile` profiles")),
    ("use_tensorboard", KeyRule::Elsewhere),
    ("use_wandb", KeyRule::Elsewhere),
    ("use_mlflow", KeyRule::Elsewhere),
    ("wandb_project", KeyRule::Elsewhere),
    ("wandb_entity", KeyRule::To("wandb.entity")),
    ("wandb_name", KeyRule::To("wandb.name")),
    ("wandb_run_id", KeyRule::Nothing("set the environment variable WANDB_RUN_ID")),
    ("wandb_mode", KeyRule::Nothing("set the environment variable WANDB_MODE")),
    ("wandb_watch", KeyRule::Nothing("gradients and weights are not logged to W&B")),
    ("wandb_log_model", KeyRule::Nothing("models are not uploaded to W&B")),
    ("mlflow_tracking_uri", KeyRule::Elsewhere),
    ("mlflow_experiment_name", KeyRule::To("mlflow.experiment_name")),
    ("mlflow_run_name", KeyRule::To("run_name")),
    ("hf_mlflow_log_artifacts", KeyRule::Nothing("models are not uploaded to MLflow")),
    ("strict", KeyRule::BuiltIn("unknown keys are always errors")),
    ("debug", KeyRule::BuiltIn("`trainer preprocess RECIPE --steps 1` prints rows")),
    ("hf_use_auth_token", KeyRule::BuiltIn("HF_TOKEN is used if it is set")),
    ("rl", KeyRule::By(preferences)),
    ("reward_model", KeyRule::By(preferences)),
    ("process_reward_model", KeyRule::By(preferences)),
];

/// Converts the fixed limit of a loss.
fn loss_watchdog(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let settings = [("loss_watchdog.max_loss", item.scalar()), ("loss_watchdog.action", "stop".into())];
    converter.change(
        item,
        settings,
        "the first loss above it stops the run; a limit that follows the loss applies, too",
    );
}

/// Converts a file.
pub(super) fn convert(converter: &mut Converter<'_>) {
    converter.apply(&[RULES, lora::RULES, hugging_face::RULES]);
    let keys = BatchKeys { micro: "micro_batch_size", accumulation: "gradient_accumulation_steps", default_micro: 1 };
    let packs = converter.draft.get("data.pack_samples") == Some(&Json::Bool(true));
    hugging_face::batch(converter, keys, packs);
    saving::evaluation(converter);
    saving::trackers(converter);
    saving::checkpoints(converter, SavingDefaults { output_dir: "model-out", interval: SaveInterval::Epochs });
    defaults(converter);
}

/// Sets axolotl's defaults where they differ from the recipe's.
fn defaults(converter: &mut Converter<'_>) {
    converter.default("sequence_len", "data.max_length", 512.into());
    converter.default("weight_decay", "optimizer.weight_decay", 0.0.into());
    converter.default("lr_scheduler", "scheduler.name", "cosine".into());
    if !converter.draft.has("scheduler.warmup_steps")
        && converter.draft.get("scheduler.name") != Some(&json!("constant"))
    {
        converter.default("warmup_ratio", "scheduler.warmup_ratio", 0.03.into());
    }
    let is_causal = converter.draft.get("type") == Some(&json!("causal"));
    if is_causal && converter.get("pretraining_dataset").is_none() {
        converter.default("sample_packing", "data.pack_samples", false.into());
    }
    if !is_causal {
        converter.default("excess_length_strategy", "data.truncation", "drop".into());
    }
}

fn sample_packing(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match (item.flag(), datasets::is_text(converter)) {
        (Some(true), true) => converter.built_in(item, "plain text is packed by default"),
        (Some(packs), _) => converter.map(item, [("data.pack_samples", packs.into())]),
        (None, _) => converter.fail(item, "true or false"),
    }
}

fn curriculum(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(true) => converter.map(item, [("data.order", "sequential".into())]),
        _ => converter.built_in(item, "off"),
    }
}

/// Templates of axolotl with a built-in counterpart (tests/reference/axolotl_templates.py compares their texts).
const TEMPLATES: &[ForeignTemplate] = &[
    equal_template("chatml", "chatml"),
    equal_template("llama3", "llama3"),
    equal_template("qwen_25", "qwen2.5"),
    equal_template("qwen3", "qwen3"),
    ForeignTemplate {
        name: "gemma",
        built_in: "gemma",
        difference: "a system message is part of the first user message; there it is an error",
    },
    equal_template("gemma3", "gemma"),
    equal_template("gemma3n", "gemma"),
    ForeignTemplate {
        name: "mistral_v2v3",
        built_in: "mistral",
        difference: "a system message is part of the last user message; there it is lost in rows that end with an answer",
    },
];

/// Prefix of the names of templates for tokenizers without their own.
const FALLBACK: &str = "tokenizer_default_fallback_";

fn chat_template(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.text() {
        Some("tokenizer_default") => converter.built_in(item, "the tokenizer's own chat template is the default"),
        Some("jinja") if converter.get("chat_template_jinja").is_some() => {
            converter.built_in(item, "chat_template_jinja has the template");
        }
        Some(name) if name.starts_with(FALLBACK) => {
            let note = "the tokenizer's own chat template applies; without one, set tokenizer.chat_template";
            converter.change(item, [], note);
        }
        _ => convert_template(converter, item, TEMPLATES),
    }
}

fn chat_template_kwargs(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    converter.map(item, [("tokenizer.chat_template_kwargs", item.json())]);
}

fn eval_sequence_len(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let same = converter.get("sequence_len").is_some_and(|length| length.whole() == item.whole());
    match same {
        true => converter.built_in(item, "evaluation rows have data.max_length, too"),
        false => converter.nothing(item, "evaluation rows have data.max_length, too"),
    }
}

fn excess(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let truncation = match item.text() {
        Some("drop") => "drop",
        Some("truncate") => "truncate",
        Some("raise") => "error",
        _ => return converter.fail(item, "drop, truncate or raise"),
    };
    converter.map(item, [("data.truncation", truncation.into())]);
}

fn scheduler(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match (item.text(), converter.get("cosine_min_lr_ratio")) {
        (Some("cosine"), Some(_)) => converter.map(item, [("scheduler.name", "cosine_with_min_lr".into())]),
        _ => hugging_face::scheduler(converter, item),
    }
}

fn min_lr_ratio(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let name = converter.get("lr_scheduler").and_then(|item| item.text().map(str::to_owned));
    match name.as_deref() {
        Some("cosine") | None => {
            let settings = vec![
                ("scheduler.name", "cosine_with_min_lr".into()),
                ("scheduler.scheduler_specific_kwargs.min_lr_rate", item.scalar()),
            ];
            converter.record(FindingKind::Mapped, item, settings, "");
        }
        Some(_) => converter.built_in(item, "has no effect with this schedule"),
    }
}

fn preferences(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    if item.flag() != Some(false) {
        converter.refuse(item, "preference training and reward models are not supported");
    }
}
