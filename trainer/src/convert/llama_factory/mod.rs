//! LLaMA-Factory's YAML. The keys are those of `llamafactory/hparams` at version 0.9.5.

mod datasets;
mod lora;

use serde_json::{Value as Json, json};

use super::chat_templates::{ForeignTemplate, convert_template, equal_template};
use super::converter::{Converter, KeyRule, KeyRules};
use super::hugging_face::{self, BatchKeys, KERNELS, PREPARED, SYSTEM_MESSAGE, TOKEN_RATE};
use super::item::ForeignItem;
use super::saving::{self, SaveInterval, SavingDefaults};

const SERVER: &str = "has no influence on training";

const RULES: KeyRules = &[
    // Model.
    ("model_name_or_path", KeyRule::To("model.name_or_path")),
    ("model_revision", KeyRule::To("model.revision")),
    ("adapter_name_or_path", KeyRule::By(lora::continued)),
    ("cache_dir", KeyRule::Nothing("set the environment variable HF_HOME")),
    ("use_fast_tokenizer", KeyRule::BuiltIn("tokenizer.json is read")),
    ("resize_vocab", KeyRule::MissingFeature("new_tokens")),
    ("add_tokens", KeyRule::MissingFeature("new_tokens")),
    ("add_special_tokens", KeyRule::MissingFeature("new_tokens")),
    ("split_special_tokens", KeyRule::Unless("special tokens in a text are always split by the chat template's rules")),
    ("low_cpu_mem_usage", KeyRule::BuiltIn("weights are memory-mapped")),
    ("rope_scaling", KeyRule::By(rope_scaling)),
    ("flash_attn", KeyRule::By(attention)),
    ("shift_attn", KeyRule::Unless("shifted sparse attention is not supported")),
    ("mixture_of_depths", KeyRule::Nothing("mixtures of depths are not supported")),
    ("use_unsloth", KeyRule::BuiltIn(KERNELS)),
    ("use_unsloth_gc", KeyRule::BuiltIn("gradient checkpointing is model.activation_checkpoint")),
    ("enable_liger_kernel", KeyRule::BuiltIn(KERNELS)),
    ("moe_aux_loss_coef", KeyRule::By(aux_loss)),
    ("disable_gradient_checkpointing", KeyRule::By(no_checkpointing)),
    ("use_reentrant_gc", KeyRule::BuiltIn("blocks are always recomputed exactly")),
    ("upcast_layernorm", KeyRule::Unless("norms compute in f32 and return model.dtype")),
    ("upcast_lmhead_output", KeyRule::BuiltIn("logits are always f32")),
    ("train_from_scratch", KeyRule::By(from_scratch)),
    ("pure_bf16", KeyRule::By(pure_bf16)),
    ("fp8", KeyRule::By(fp8)),
    ("fp8_backend", KeyRule::BuiltIn("the own FP8 kernels, or cuBLASLt's")),
    ("fp8_enable_fsdp_float8_all_gather", KeyRule::Unless("set precision.fp8_param_gather with ZeRO stage 3")),
    ("print_param_status", KeyRule::BuiltIn("`trainer check` prints the number of parameters")),
    ("use_kv_cache", KeyRule::BuiltIn(SERVER)),
    ("infer_backend", KeyRule::BuiltIn(SERVER)),
    ("infer_dtype", KeyRule::BuiltIn(SERVER)),
    ("vllm_maxlen", KeyRule::BuiltIn(SERVER)),
    ("hf_hub_token", KeyRule::Nothing("set the environment variable HF_TOKEN; a recipe has no secrets")),
    ("ms_hub_token", KeyRule::Nothing("ModelScope is not supported")),
    ("om_hub_token", KeyRule::Nothing("Modelers is not supported")),
    ("image_max_pixels", KeyRule::MissingFeature("images")),
    ("video_max_pixels", KeyRule::MissingFeature("images")),
    ("media_dir", KeyRule::MissingFeature("images")),
    ("freeze_vision_tower", KeyRule::BuiltIn("the models have no vision tower")),
    ("freeze_multi_modal_projector", KeyRule::BuiltIn("the models have no vision tower")),
    // Method.
    ("stage", KeyRule::By(stage)),
    ("finetuning_type", KeyRule::By(lora::method)),
    ("use_galore", KeyRule::Unless("GaLore is not supported; AdamW trains")),
    ("use_apollo", KeyRule::Unless("APOLLO is not supported; AdamW trains")),
    ("use_badam", KeyRule::Unless("BAdam is not supported; AdamW trains")),
    ("use_adam_mini", KeyRule::Unless("Adam-mini is not supported; AdamW trains")),
    ("use_muon", KeyRule::Unless("Muon is not supported; AdamW trains")),
    ("use_llama_pro", KeyRule::Unless("block expansion is not supported")),
    ("use_dft_loss", KeyRule::Unless("cross entropy is the only loss")),
    ("use_asft_loss", KeyRule::Unless("cross entropy is the only loss")),
    ("use_eaft_loss", KeyRule::Unless("cross entropy is the only loss")),
    // Data.
    ("dataset", KeyRule::By(datasets::training)),
    ("eval_dataset", KeyRule::By(datasets::evaluation)),
    ("dataset_dir", KeyRule::Elsewhere),
    ("max_samples", KeyRule::Elsewhere),
    ("template", KeyRule::By(template)),
    ("cutoff_len", KeyRule::To("data.max_length")),
    ("model_max_length", KeyRule::BuiltIn("data.max_length limits the rows")),
    ("train_on_prompt", KeyRule::By(hugging_face::train_on_prompts)),
    ("mask_history", KeyRule::By(mask_history)),
    ("packing", KeyRule::By(packing)),
    ("neat_packing", KeyRule::By(neat_packing)),
    ("val_size", KeyRule::By(hugging_face::held_out_rows)),
    ("eval_on_each_dataset", KeyRule::Unless("the evaluation data have one loss together")),
    ("buffer_size", KeyRule::BuiltIn(PREPARED)),
    ("mix_strategy", KeyRule::By(mix)),
    ("interleave_probs", KeyRule::Elsewhere),
    ("preprocessing_num_workers", KeyRule::To("data.num_proc")),
    ("preprocessing_batch_size", KeyRule::BuiltIn("rows are tokenized one by one, in parallel")),
    ("overwrite_cache", KeyRule::BuiltIn("the token cache detects changed data")),
    ("tokenized_path", KeyRule::To("data.cache_dir")),
    ("data_shared_file_system", KeyRule::BuiltIn("ranks share the token cache by locks")),
    ("ignore_pad_token_for_loss", KeyRule::BuiltIn("padding has no loss")),
    ("disable_shuffling", KeyRule::By(no_shuffling)),
    ("tool_format", KeyRule::Nothing("the tokenizer's chat template renders tools")),
    ("default_system", KeyRule::Nothing(SYSTEM_MESSAGE)),
    ("enable_thinking", KeyRule::By(thinking)),
    ("preserve_thinking", KeyRule::By(preserve_thinking)),
    // Batches, optimizer and logs.
    ("per_device_train_batch_size", KeyRule::Elsewhere),
    ("per_device_eval_batch_size", KeyRule::BuiltIn("evaluation uses micro_batch_size; the loss is the same")),
    ("num_train_epochs", KeyRule::By(hugging_face::epochs)),
    ("optim", KeyRule::By(hugging_face::optimizer)),
    ("lr_scheduler_type", KeyRule::By(hugging_face::scheduler)),
    ("early_stopping_steps", KeyRule::By(hugging_face::early_stopping)),
    ("plot_loss", KeyRule::BuiltIn("metrics.jsonl has every step, and report_to: tensorboard plots it")),
    ("compute_accuracy", KeyRule::Unless("evaluation computes the loss; eval.tasks evaluates tasks")),
    ("predict_with_generate", KeyRule::Unless("evaluation computes the loss; eval.tasks evaluates tasks")),
    ("include_effective_tokens_per_second", KeyRule::BuiltIn(TOKEN_RATE)),
    ("use_swanlab", KeyRule::Unless("the trackers are tensorboard, wandb and mlflow")),
    ("swanlab_project", KeyRule::Nothing("the trackers are tensorboard, wandb and mlflow")),
    ("swanlab_run_name", KeyRule::Nothing("the trackers are tensorboard, wandb and mlflow")),
    ("swanlab_api_key", KeyRule::Nothing("the trackers are tensorboard, wandb and mlflow")),
];

/// Converts a file.
pub(super) fn convert(converter: &mut Converter<'_>) {
    converter.apply(&[RULES, lora::RULES, hugging_face::RULES]);
    lora::finish(converter);
    let keys = BatchKeys {
        micro: "per_device_train_batch_size",
        accumulation: "gradient_accumulation_steps",
        default_micro: 8,
    };
    let is_causal = converter.draft.get("type") == Some(&json!("causal"));
    let packs = converter.draft.get("data.pack_samples") == Some(&Json::Bool(true));
    hugging_face::batch(converter, keys, packs);
    saving::evaluation(converter);
    saving::trackers(converter);
    saving::checkpoints(
        converter,
        SavingDefaults { output_dir: "saves/llama-factory", interval: SaveInterval::Steps(500.into()) },
    );
    defaults(converter, is_causal);
}

/// Sets the defaults of LLaMA-Factory and transformers where they differ from the recipe's.
fn defaults(converter: &mut Converter<'_>, is_causal: bool) {
    converter.default("cutoff_len", "data.max_length", 2048.into());
    converter.default("learning_rate", "optimizer.learning_rate", json!(5e-5));
    converter.default("weight_decay", "optimizer.weight_decay", 0.0.into());
    converter.default("lr_scheduler_type", "scheduler.name", "linear".into());
    if !converter.draft.has("train_iters") {
        converter.default("num_train_epochs", "epochs", 3.into());
    }
    let has_warmup = ["scheduler.warmup_ratio", "scheduler.warmup_steps"].iter().any(|key| converter.draft.has(key));
    if !has_warmup && converter.draft.get("scheduler.name") != Some(&json!("constant")) {
        converter.default("warmup_steps", "scheduler.warmup_steps", 0.into());
    }
    if !converter.draft.has("model.activation_checkpoint") {
        converter.default("disable_gradient_checkpointing", "model.activation_checkpoint", "full".into());
    }
    if !converter.draft.has("model.dtype") {
        converter.default("bf16", "model.dtype", "f32".into());
    }
    if is_causal && !converter.draft.has("data.pack_samples") {
        converter.default("(packed documents attend to earlier ones)", "data.fuse_positions_prob", 1.into());
    }
    if !is_causal {
        converter.default("(long rows are truncated)", "data.truncation", "truncate".into());
    }
}

/// Converts the stage of training.
fn stage(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.text() {
        Some("sft") => converter.map(item, [("type", "sft".into())]),
        Some("pt") => converter.map(item, [("type", "causal".into())]),
        _ => converter.refuse(item, "stages are sft and pt; preference training and reward models are not supported"),
    }
}

fn rope_scaling(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let kind = item.text().unwrap_or("yarn");
    let advice = format!(
        "the factor follows from the model's context there; set model.hf_config_kwargs: {{max_position_embeddings: N, \
         rope_scaling: {{rope_type: {kind}, factor: F, original_max_position_embeddings: M}}}}"
    );
    converter.nothing(item, &advice);
}

fn attention(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.text() {
        Some("disabled") => converter.map(item, [("model.attn_implementation", "reference".into())]),
        _ if item.flag() == Some(false) => converter.map(item, [("model.attn_implementation", "reference".into())]),
        _ => converter.map(item, [("model.attn_implementation", "auto".into())]),
    }
}

fn aux_loss(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let kind = ("moe.router_load_balancing_type", "transformers_aux_loss".into());
    converter.map(item, [kind, ("moe.aux_loss_coeff", item.scalar())]);
}

fn no_checkpointing(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(off) => {
            let mode = if off { "none" } else { "full" };
            converter.map(item, [("model.activation_checkpoint", mode.into())]);
        }
        None => converter.fail(item, "true or false"),
    }
}

fn from_scratch(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(true) => converter.map(item, [("model.type", "random-weight-hf".into())]),
        _ => converter.built_in(item, "the checkpoint is loaded"),
    }
}

fn pure_bf16(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(true) => {
            let settings = [
                ("model.dtype", "bf16".into()),
                ("deepspeed.bf16.bf16_master_weights_and_grads", true.into()),
                ("deepspeed.bf16.bf16_optimizer_states", true.into()),
            ];
            converter.map(item, settings);
        }
        _ => converter.built_in(item, "off"),
    }
}

fn fp8(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(true) => {
            let note = "scales follow from each tensor's own maximum";
            converter.change(item, [("precision.recipe", "current".into())], note);
        }
        _ => converter.built_in(item, "off"),
    }
}

/// Templates of LLaMA-Factory with a built-in counterpart.
const TEMPLATES: &[ForeignTemplate] = &[
    equal_template("chatml", "chatml"),
    equal_template("llama3", "llama3"),
    equal_template("qwen", "qwen2.5"),
    equal_template("gemma", "gemma"),
    equal_template("gemma2", "gemma"),
    equal_template("gemma3", "gemma"),
    ForeignTemplate {
        name: "qwen3",
        built_in: "qwen3",
        difference: "only answers after the last question have reasoning, and the last answer has an empty block without it",
    },
    ForeignTemplate {
        name: "mistral",
        built_in: "mistral",
        difference: "the system message is part of the last user message, not of the first",
    },
    ForeignTemplate {
        name: "alpaca",
        built_in: "alpaca",
        difference: "the text begins with BOS, and an empty line follows the system message",
    },
];

fn template(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    convert_template(converter, item, TEMPLATES);
}

fn packing(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let is_causal = converter.get("stage").and_then(|stage| stage.text()) == Some("pt");
    match (item.flag(), converter.is_on("neat_packing")) {
        (Some(true), _) if is_causal => converter.built_in(item, "plain text is packed by default"),
        (Some(false), _) if is_causal => converter.map(item, [("data.pack_samples", false.into())]),
        (Some(true), true) => converter.map(item, [("data.pack_samples", true.into())]),
        (Some(true), false) => {
            let note = "packed samples do not attend to each other, as with neat_packing";
            converter.change(item, [("data.pack_samples", true.into())], note);
        }
        _ => converter.built_in(item, "off"),
    }
}

fn neat_packing(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(true) => converter.map(item, [("data.pack_samples", true.into())]),
        _ => converter.built_in(item, "packed samples never attend to each other"),
    }
}

fn mix(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.text() {
        Some("concat") => converter.built_in(item, "rows of all sources are shuffled together"),
        Some("interleave_under") => converter.map(item, [("data.stopping_strategy", "first_exhausted".into())]),
        Some("interleave_over") => converter.map(item, [("data.stopping_strategy", "all_exhausted".into())]),
        _ => converter.fail(item, "concat, interleave_under or interleave_over"),
    }
}

/// Converts the loss on the last answer alone.
fn mask_history(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        None => converter.fail(item, "true or false"),
        Some(false) => converter.built_in(item, "all answers are targets"),
        Some(true) => converter.map(item, [("data.masking_strategy", "train_on_last".into())]),
    }
}

fn no_shuffling(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let order = if item.flag() == Some(true) { "sequential" } else { "shuffle" };
    converter.map(item, [("data.order", order.into())]);
}

fn thinking(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let settings = [("tokenizer.chat_template_kwargs.enable_thinking", item.json())];
    converter.change(
        item,
        settings,
        "a variable of the chat template, which may ignore it; no empty thoughts are added",
    );
}

fn preserve_thinking(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(false) => converter.built_in(item, "the chat template decides on thoughts of earlier turns"),
        _ => converter.nothing(item, "the chat template decides on thoughts of earlier turns"),
    }
}
