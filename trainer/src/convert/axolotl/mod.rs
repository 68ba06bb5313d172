//! axolotl's YAML. The keys are those of `axolotl/utils/schemas` at version 0.18.

mod datasets;
mod lora;
mod model;
mod ranks;

use serde_json::{Value as Json, json};

use super::converter::{Converter, Rule, Rules};
use super::hugging_face::{self, BatchKeys};
use super::item::Item;
use super::report::FindingKind;
use super::saving::{self, Interval, SavingDefaults};
use model::{KERNELS, RESIZE};

const CONFIG: &str = "config.json and tokenizer.json have the type";
const PACKING: &str = "packing needs no such parameter";
const TEMPLATE: &str = "the tokenizer's own chat template applies; tokenizer.chat_template names a Jinja file instead";
const EXPERTS: &str = "experts are always one matrix multiplication per projection";

const RULES: Rules = &[
    // Model.
    ("base_model", Rule::To("model.name_or_path")),
    ("revision_of_model", Rule::To("model.revision")),
    ("base_model_config", Rule::By(model::base_model_config)),
    ("overrides_of_model_config", Rule::By(model::overrides)),
    ("rope_scaling", Rule::By(model::rope_scaling)),
    ("tokenizer_config", Rule::To("tokenizer.name_or_path")),
    ("model_type", Rule::BuiltIn(CONFIG)),
    ("cls_model_config", Rule::BuiltIn(CONFIG)),
    ("tokenizer_type", Rule::BuiltIn(CONFIG)),
    ("tokenizer_use_fast", Rule::BuiltIn(CONFIG)),
    ("tokenizer_legacy", Rule::BuiltIn(CONFIG)),
    ("is_llama_derived_model", Rule::BuiltIn(CONFIG)),
    ("is_mistral_derived_model", Rule::BuiltIn(CONFIG)),
    ("is_qwen_derived_model", Rule::BuiltIn(CONFIG)),
    ("trust_remote_code", Rule::BuiltIn("a model's code is never executed")),
    ("bf16", Rule::By(hugging_face::dtype)),
    ("bfloat16", Rule::By(hugging_face::dtype)),
    ("fp16", Rule::By(hugging_face::dtype)),
    ("float16", Rule::By(hugging_face::dtype)),
    ("fp8", Rule::By(model::fp8)),
    ("fp8_enable_fsdp_float8_all_gather", Rule::By(model::fp8_gather)),
    ("special_tokens", Rule::By(model::special_tokens)),
    ("tokens", Rule::Nothing(RESIZE)),
    ("added_tokens_overrides", Rule::Nothing(RESIZE)),
    ("resize_token_embeddings_to_32x", Rule::Unless(RESIZE)),
    ("shrink_embeddings", Rule::Unless(RESIZE)),
    ("embeddings_skip_upcast", Rule::BuiltIn("the embedding has model.dtype")),
    ("unfrozen_parameters", Rule::Nothing("freezing by pattern is not supported; model.peft_config trains an adapter")),
    ("attn_implementation", Rule::By(model::attention)),
    ("eager_attention", Rule::By(model::eager)),
    ("flash_attention", Rule::BuiltIn("fused attention is the default")),
    ("sdp_attention", Rule::BuiltIn("fused attention is the default")),
    ("xformers_attention", Rule::BuiltIn("fused attention is the default")),
    ("flex_attention", Rule::BuiltIn("fused attention is the default")),
    ("sage_attention", Rule::BuiltIn("fused attention is the default")),
    ("flash_attn_cross_entropy", Rule::BuiltIn(KERNELS)),
    ("flash_attn_rms_norm", Rule::BuiltIn(KERNELS)),
    ("flash_attn_fuse_mlp", Rule::BuiltIn(KERNELS)),
    ("flash_attn_fuse_qkv", Rule::BuiltIn(KERNELS)),
    ("use_kernels", Rule::BuiltIn(KERNELS)),
    ("experts_implementation", Rule::BuiltIn(EXPERTS)),
    ("chunked_cross_entropy", Rule::BuiltIn("the loss is always computed in chunks")),
    ("chunked_cross_entropy_num_chunks", Rule::BuiltIn("the size of chunks follows from the memory")),
    ("cut_cross_entropy", Rule::BuiltIn("the loss is always computed in chunks")),
    ("liger_rope", Rule::BuiltIn(KERNELS)),
    ("liger_rms_norm", Rule::BuiltIn(KERNELS)),
    ("liger_glu_activation", Rule::BuiltIn(KERNELS)),
    ("liger_layer_norm", Rule::BuiltIn(KERNELS)),
    ("liger_cross_entropy", Rule::BuiltIn(KERNELS)),
    ("liger_fused_linear_cross_entropy", Rule::BuiltIn(KERNELS)),
    ("plugins", Rule::By(model::plugins)),
    ("gradient_checkpointing", Rule::By(hugging_face::gradient_checkpointing)),
    ("activation_offloading", Rule::By(model::activation_offloading)),
    ("selective_checkpointing", Rule::By(model::selective)),
    ("tiled_mlp", Rule::To("tiled_mlp_compute")),
    ("tiled_mlp_num_shards", Rule::BuiltIn("tiles have about hidden_size tokens")),
    // Data.
    ("datasets", Rule::By(datasets::training)),
    ("test_datasets", Rule::By(datasets::evaluation)),
    ("pretraining_dataset", Rule::By(datasets::pretraining)),
    ("streaming", Rule::Unless("data are tokenized once and read from the cache")),
    ("val_set_size", Rule::By(val_set_size)),
    ("dataset_prepared_path", Rule::To("data.cache_dir")),
    ("dataset_processes", Rule::To("data.num_proc")),
    ("dataset_num_proc", Rule::To("data.num_proc")),
    ("dataset_keep_in_memory", Rule::BuiltIn("tokens are memory-mapped")),
    ("dataset_exact_deduplication", Rule::Unless("rows are not deduplicated")),
    (
        "shuffle_merged_datasets",
        Rule::BuiltIn("every epoch has an order of its own; data.order: sequential keeps the order"),
    ),
    ("shuffle_before_merging_datasets", Rule::BuiltIn("every epoch has an order of its own")),
    ("curriculum_sampling", Rule::By(curriculum)),
    ("skip_prepare_dataset", Rule::Unless("rows are always tokenized here")),
    ("chat_template", Rule::By(chat_template)),
    ("chat_template_jinja", Rule::To("tokenizer.chat_template")),
    ("chat_template_kwargs", Rule::By(chat_template_kwargs)),
    ("default_system_message", Rule::Nothing("put the system message into the rows or the chat template")),
    ("train_on_inputs", Rule::By(train_on_inputs)),
    ("sequence_len", Rule::To("data.max_length")),
    ("eval_sequence_len", Rule::By(eval_sequence_len)),
    ("excess_length_strategy", Rule::By(excess)),
    ("min_sample_len", Rule::Nothing("short rows are kept")),
    ("sample_packing", Rule::By(sample_packing)),
    ("eval_sample_packing", Rule::BuiltIn("evaluation packs as training does; the loss is the same")),
    ("sample_packing_group_size", Rule::BuiltIn(PACKING)),
    ("sample_packing_bin_size", Rule::BuiltIn(PACKING)),
    ("sample_packing_sequentially", Rule::BuiltIn(PACKING)),
    ("multipack_real_batches", Rule::BuiltIn(PACKING)),
    ("pretrain_multipack_buffer_size", Rule::BuiltIn(PACKING)),
    ("pretrain_multipack_attn", Rule::BuiltIn("packed samples do not attend to each other")),
    ("pad_to_sequence_len", Rule::BuiltIn("rows need no padding; data.pad_to: max_length pads")),
    ("pad_to_multiple_of", Rule::To("data.div_length")),
    ("batch_flattening", Rule::BuiltIn("rows of a micro-batch are never padded")),
    // Batches and optimizer.
    ("micro_batch_size", Rule::Elsewhere),
    ("gradient_accumulation_steps", Rule::Elsewhere),
    ("batch_size", Rule::Nothing("the batch is micro_batch_size x gradient_accumulation_steps x data-parallel ranks")),
    ("eval_batch_size", Rule::BuiltIn("evaluation uses micro_batch_size; the loss is the same")),
    ("num_epochs", Rule::By(hugging_face::epochs)),
    ("optimizer", Rule::By(hugging_face::optimizer)),
    ("lr_scheduler", Rule::By(scheduler)),
    ("cosine_min_lr_ratio", Rule::By(min_lr_ratio)),
    ("cosine_constant_lr_ratio", Rule::Nothing("use scheduler.name: warmup_stable_decay")),
    ("embedding_lr", Rule::Nothing("all weights have one learning rate")),
    ("embedding_lr_scale", Rule::Nothing("all weights have one learning rate")),
    ("lr_groups", Rule::Nothing("all weights have one learning rate")),
    // Ranks.
    ("tensor_parallel_size", Rule::By(ranks::degree)),
    ("context_parallel_size", Rule::By(ranks::degree)),
    ("sequence_parallel_degree", Rule::By(ranks::degree)),
    ("dp_shard_size", Rule::By(ranks::dp_shard)),
    ("dp_replicate_size", Rule::By(ranks::dp_replicate)),
    ("heads_k_stride", Rule::BuiltIn("ring attention passes keys and values in pieces of its own")),
    ("ring_attn_func", Rule::BuiltIn("ring attention supports packed rows")),
    ("fsdp_version", Rule::BuiltIn("ZeRO shards what FSDP shards")),
    ("fsdp_final_state_dict_type", Rule::BuiltIn("checkpoints load on any number of ranks")),
    ("ddp", Rule::BuiltIn("several ranks train together if a launcher starts them")),
    ("device_map", Rule::BuiltIn("device chooses the device")),
    ("deepcompile", Rule::BuiltIn("there is nothing to compile")),
    // Evaluation, checkpoints and logs.
    ("auto_resume_from_checkpoints", Rule::Elsewhere),
    ("save_first_step", Rule::Unless("no checkpoint follows the first step")),
    ("eval_table_size", Rule::Unless("generate.prompts prints samples after training")),
    ("eval_max_new_tokens", Rule::BuiltIn("evaluation generates no text; generate.max_new_tokens is for samples")),
    ("do_bench_eval", Rule::Unless("eval.tasks evaluates tasks during training")),
    ("do_causal_lm_eval", Rule::Unless("eval.tasks evaluates tasks during training")),
    ("loss_watchdog_threshold", Rule::Nothing("a run stops at a loss that is not finite; see on_nonfinite")),
    ("loss_watchdog_patience", Rule::Nothing("a run stops at a loss that is not finite; see on_nonfinite")),
    ("gc_steps", Rule::BuiltIn("memory is freed at once")),
    ("gc_collect_steps", Rule::BuiltIn("memory is freed at once")),
    ("include_tokens_per_second", Rule::BuiltIn("metrics.jsonl has tokens per second")),
    ("include_tkps", Rule::BuiltIn("metrics.jsonl has tokens per second")),
    ("profiler_steps", Rule::Nothing("`trainer train --profile` profiles")),
    ("use_tensorboard", Rule::Elsewhere),
    ("use_wandb", Rule::Elsewhere),
    ("use_mlflow", Rule::Elsewhere),
    ("wandb_project", Rule::Elsewhere),
    ("wandb_entity", Rule::To("wandb.entity")),
    ("wandb_name", Rule::To("wandb.name")),
    ("wandb_run_id", Rule::Nothing("set the environment variable WANDB_RUN_ID")),
    ("wandb_mode", Rule::Nothing("set the environment variable WANDB_MODE")),
    ("wandb_watch", Rule::Nothing("gradients and weights are not logged to W&B")),
    ("wandb_log_model", Rule::Nothing("models are not uploaded to W&B")),
    ("mlflow_tracking_uri", Rule::Elsewhere),
    ("mlflow_experiment_name", Rule::To("mlflow.experiment_name")),
    ("mlflow_run_name", Rule::To("run_name")),
    ("hf_mlflow_log_artifacts", Rule::Nothing("models are not uploaded to MLflow")),
    ("strict", Rule::BuiltIn("unknown keys are always errors")),
    ("debug", Rule::BuiltIn("`trainer preprocess RECIPE --steps 1` prints rows")),
    ("hf_use_auth_token", Rule::BuiltIn("HF_TOKEN is used if it is set")),
    ("rl", Rule::By(preferences)),
    ("reward_model", Rule::By(preferences)),
    ("process_reward_model", Rule::By(preferences)),
];

/// Converts a file.
pub(super) fn convert(converter: &mut Converter<'_>) {
    converter.apply(&[RULES, lora::RULES, hugging_face::RULES]);
    let keys = BatchKeys { micro: "micro_batch_size", accumulation: "gradient_accumulation_steps", default_micro: 1 };
    let packs = converter.draft.get("data.pack_samples") == Some(&Json::Bool(true));
    hugging_face::batch(converter, keys, packs);
    saving::evaluation(converter);
    saving::trackers(converter);
    saving::checkpoints(converter, SavingDefaults { output_dir: "model-out", interval: Interval::Epochs });
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

fn sample_packing(converter: &mut Converter<'_>, item: &Item<'_>) {
    match (item.flag(), datasets::is_text(converter)) {
        (Some(true), true) => converter.built_in(item, "plain text is packed by default"),
        (Some(packs), _) => converter.map(item, [("data.pack_samples", packs.into())]),
        (None, _) => converter.fail(item, "true or false"),
    }
}

fn val_set_size(converter: &mut Converter<'_>, item: &Item<'_>) {
    match item.number() {
        Some(0.0) => converter.built_in(item, "no rows are held out"),
        Some(fraction) if fraction > 0.0 && fraction < 1.0 => {
            let train = ((1.0 - fraction) * 1e9).round() / 1e9;
            converter.map(item, [("data.train_eval_split", json!([train, fraction]))]);
        }
        _ => converter.nothing(item, "a number of rows is not supported; use data.eval_sources: [NAME:train[:100]]"),
    }
}

fn curriculum(converter: &mut Converter<'_>, item: &Item<'_>) {
    match item.flag() {
        Some(true) => converter.map(item, [("data.order", "sequential".into())]),
        _ => converter.built_in(item, "off"),
    }
}

fn chat_template(converter: &mut Converter<'_>, item: &Item<'_>) {
    match item.text() {
        Some("tokenizer_default") => converter.built_in(item, "the tokenizer's own chat template is the default"),
        Some("jinja") if converter.get("chat_template_jinja").is_some() => {
            converter.built_in(item, "chat_template_jinja has the template");
        }
        _ => converter.change(item, [], TEMPLATE),
    }
}

fn chat_template_kwargs(converter: &mut Converter<'_>, item: &Item<'_>) {
    converter.map(item, [("tokenizer.chat_template_kwargs", item.json())]);
}

fn train_on_inputs(converter: &mut Converter<'_>, item: &Item<'_>) {
    match item.flag() {
        Some(trains) => converter.map(item, [("data.mask_inputs", (!trains).into())]),
        None => converter.fail(item, "true or false"),
    }
}

fn eval_sequence_len(converter: &mut Converter<'_>, item: &Item<'_>) {
    let same = converter.get("sequence_len").is_some_and(|length| length.whole() == item.whole());
    match same {
        true => converter.built_in(item, "evaluation rows have data.max_length, too"),
        false => converter.nothing(item, "evaluation rows have data.max_length, too"),
    }
}

fn excess(converter: &mut Converter<'_>, item: &Item<'_>) {
    let truncation = match item.text() {
        Some("drop") => "drop",
        Some("truncate") => "truncate",
        Some("raise") => "error",
        _ => return converter.fail(item, "drop, truncate or raise"),
    };
    converter.map(item, [("data.truncation", truncation.into())]);
}

fn scheduler(converter: &mut Converter<'_>, item: &Item<'_>) {
    match (item.text(), converter.get("cosine_min_lr_ratio")) {
        (Some("cosine"), Some(_)) => converter.map(item, [("scheduler.name", "cosine_with_min_lr".into())]),
        _ => hugging_face::scheduler(converter, item),
    }
}

fn min_lr_ratio(converter: &mut Converter<'_>, item: &Item<'_>) {
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

fn preferences(converter: &mut Converter<'_>, item: &Item<'_>) {
    if item.flag() != Some(false) {
        converter.refuse(item, "preference training and reward models are not supported");
    }
}
