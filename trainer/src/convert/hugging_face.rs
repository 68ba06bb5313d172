//! Keys of transformers' `TrainingArguments`, which axolotl and LLaMA-Factory pass on, and other keys of both.

use candlewick_text::quantity::counted;
use serde_json::{Value as Json, json};

use super::converter::{Converter, KeyRule, KeyRules};
use super::item::ForeignItem;
use super::optimizer_groups::optimizer_groups;
use super::saving::{has_eval_steps, number};
use crate::recipe::SchedulerKwargs;

const HUB: &str = "pushing to the Hub is not part of a run; `trainer export --push-to-hub` or `hf upload` does it";
const LOADER: &str = "each step builds its batch from memory-mapped tokens";
const LAUNCHER: &str = "the launcher sets it";

pub(super) const ADAMW: &str = "AdamW is the only optimizer";
pub(super) const KERNELS: &str = "fused kernels are always used";
pub(super) const PREPARED: &str = "data are tokenized once and read from the cache; data.streaming needs train_iters, and excludes held-out rows and a mixture";
pub(super) const SYSTEM_MESSAGE: &str = "put the system message into the rows or the chat template";
pub(super) const TOKEN_RATE: &str = "metrics.jsonl has tokens per second";

pub(super) const RULES: KeyRules = &[
    // Optimizer and schedule.
    ("learning_rate", KeyRule::To("optimizer.learning_rate")),
    ("weight_decay", KeyRule::To("optimizer.weight_decay")),
    ("adam_beta1", KeyRule::By(betas)),
    ("adam_beta2", KeyRule::By(betas)),
    ("adam_epsilon", KeyRule::To("optimizer.eps")),
    ("max_grad_norm", KeyRule::To("gradient_clipping")),
    ("label_smoothing_factor", KeyRule::To("label_smoothing_factor")),
    ("lr_scheduler_kwargs", KeyRule::By(scheduler_kwargs)),
    ("warmup_steps", KeyRule::By(warmup_steps)),
    ("warmup_ratio", KeyRule::By(warmup_ratio)),
    ("optim_args", KeyRule::Unless("AdamW takes no further arguments")),
    ("neftune_noise_alpha", KeyRule::MissingFeature("neftune")),
    ("max_steps", KeyRule::By(max_steps)),
    // Data.
    ("group_by_length", KeyRule::Unless("rows are not padded to the longest one, so equal lengths save no time")),
    ("dataloader_drop_last", KeyRule::To("data.drop_last")),
    ("dataloader_num_workers", KeyRule::BuiltIn(LOADER)),
    ("dataloader_pin_memory", KeyRule::BuiltIn(LOADER)),
    ("dataloader_prefetch_factor", KeyRule::BuiltIn(LOADER)),
    ("remove_unused_columns", KeyRule::BuiltIn("unused columns are never read")),
    ("auto_find_batch_size", KeyRule::Elsewhere),
    // Precision and memory.
    ("tf32", KeyRule::BuiltIn("matmuls of f32 are computed in f32")),
    ("torch_compile", KeyRule::BuiltIn("there is nothing to compile")),
    ("torch_compile_backend", KeyRule::BuiltIn("there is nothing to compile")),
    ("torch_compile_mode", KeyRule::BuiltIn("there is nothing to compile")),
    ("gradient_checkpointing_kwargs", KeyRule::BuiltIn("blocks are always recomputed exactly")),
    ("torch_empty_cache_steps", KeyRule::BuiltIn("the allocator needs no such calls")),
    ("use_liger_kernel", KeyRule::BuiltIn(KERNELS)),
    ("bf16", KeyRule::By(dtype)),
    ("fp16", KeyRule::By(dtype)),
    ("gradient_checkpointing", KeyRule::By(gradient_checkpointing)),
    ("average_tokens_across_devices", KeyRule::BuiltIn("the loss is the mean over all target tokens of a step")),
    ("include_num_input_tokens_seen", KeyRule::BuiltIn("metrics.jsonl has the tokens")),
    ("full_determinism", KeyRule::BuiltIn("a run on a CPU is deterministic; on a GPU set model.attn_deterministic")),
    // Ranks.
    ("deepspeed", KeyRule::By(super::zero::deepspeed)),
    ("fsdp", KeyRule::By(super::zero::fsdp)),
    ("fsdp_config", KeyRule::By(super::zero::fsdp_config)),
    ("ddp_timeout", KeyRule::To("ddp_timeout")),
    ("ddp_find_unused_parameters", KeyRule::BuiltIn("gradients are reduced unit by unit")),
    ("ddp_bucket_cap_mb", KeyRule::BuiltIn("gradients are reduced unit by unit")),
    ("ddp_broadcast_buffers", KeyRule::BuiltIn("there are no buffers")),
    ("local_rank", KeyRule::BuiltIn(LAUNCHER)),
    ("world_size", KeyRule::BuiltIn(LAUNCHER)),
    // Evaluation, checkpoints and logs.
    ("seed", KeyRule::By(seed)),
    ("data_seed", KeyRule::To("data.seed")),
    ("logging_steps", KeyRule::To("train_log_iter_interval")),
    ("logging_first_step", KeyRule::BuiltIn("metrics.jsonl has every step")),
    ("logging_strategy", KeyRule::BuiltIn("train_log_iter_interval decides")),
    ("save_steps", KeyRule::Elsewhere),
    ("save_strategy", KeyRule::Elsewhere),
    ("saves_per_epoch", KeyRule::Elsewhere),
    ("save_total_limit", KeyRule::Elsewhere),
    ("save_only_model", KeyRule::Elsewhere),
    ("resume_from_checkpoint", KeyRule::Elsewhere),
    ("output_dir", KeyRule::Elsewhere),
    ("save_safetensors", KeyRule::BuiltIn("weights are always safetensors")),
    ("eval_steps", KeyRule::Elsewhere),
    ("eval_strategy", KeyRule::Elsewhere),
    ("evaluation_strategy", KeyRule::Elsewhere),
    ("evals_per_epoch", KeyRule::Elsewhere),
    ("eval_on_start", KeyRule::To("eval_on_start")),
    ("load_best_model_at_end", KeyRule::By(best_model)),
    ("metric_for_best_model", KeyRule::By(best_metric)),
    ("greater_is_better", KeyRule::Elsewhere),
    ("early_stopping_patience", KeyRule::By(early_stopping)),
    ("report_to", KeyRule::Elsewhere),
    ("run_name", KeyRule::To("run_name")),
    ("push_to_hub", KeyRule::Unless(HUB)),
    ("hub_model_id", KeyRule::Nothing(HUB)),
    ("hub_strategy", KeyRule::Nothing(HUB)),
    ("hub_private_repo", KeyRule::Nothing(HUB)),
    ("hub_token", KeyRule::Nothing("set the environment variable HF_TOKEN")),
    ("overwrite_output_dir", KeyRule::BuiltIn("earlier results move to run.N and are not overwritten")),
    ("do_train", KeyRule::BuiltIn("`trainer train` trains")),
    ("do_eval", KeyRule::BuiltIn("evaluation data are evaluated")),
    ("prediction_loss_only", KeyRule::BuiltIn("evaluation computes the loss")),
    ("disable_tqdm", KeyRule::BuiltIn("a terminal shows a progress bar")),
    // Keys of both toolkits that transformers' arguments lack.
    ("gradient_accumulation_steps", KeyRule::Elsewhere),
    ("trust_remote_code", KeyRule::BuiltIn("a model's code is never executed")),
    ("streaming", KeyRule::By(streaming)),
    ("loraplus_lr_ratio", KeyRule::By(optimizer_groups)),
    ("loraplus_lr_embedding", KeyRule::Nothing("embeddings have no adapters")),
];

/// Converts the patience of transformers' `EarlyStoppingCallback`, a number of evaluations.
pub(super) fn early_stopping(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.whole() {
        None => converter.fail(item, "a number of evaluations"),
        Some(0) => converter.built_in(item, "off"),
        Some(patience) => {
            let mapped = [("early_stopping.patience", patience.into())];
            match n_evaluations(converter).filter(|n| *n <= patience as f64 + 1.0) {
                // The first evaluation always improves, and the last one is at the end of the run.
                Some(n) => {
                    let note = format!(
                        "the run has {}, so this cannot end it; set evals_per_epoch",
                        counted(n.ceil() as u64, "evaluation")
                    );
                    converter.change(item, mapped, &note);
                }
                None => converter.map(item, mapped),
            }
        }
    }
}

/// Returns the number of evaluations of a run, unless it depends on the number of steps.
fn n_evaluations(converter: &Converter<'_>) -> Option<f64> {
    let number = |keys: &[&str]| keys.iter().find_map(|key| converter.get(key)).and_then(|item| item.number());
    let epochs = match number(&["max_steps"]) {
        Some(steps) if steps > 0.0 => return None,
        _ => number(&["num_epochs", "num_train_epochs"])?,
    };
    let eval_steps = number(&["eval_steps"]).filter(|_| has_eval_steps(converter));
    let n = match (eval_steps, number(&["evals_per_epoch"])) {
        (Some(steps), _) if steps >= 1.0 => return None,
        (Some(fraction), _) if fraction > 0.0 => 1.0 / fraction,
        (_, per_epoch) => epochs * per_epoch.unwrap_or(1.0),
    };
    Some(n + if converter.is_on("eval_on_start") { 1.0 } else { 0.0 })
}

/// Converts streaming, if the recipe may have it.
fn streaming(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let is_set = |key: &str| converter.get(key).and_then(|item| item.number()).is_some_and(|number| number > 0.0);
    let is_mixed = converter.get("mix_strategy").is_some_and(|mix| mix.text() != Some("concat"));
    match item.flag() {
        None => converter.fail(item, "true or false"),
        Some(false) => converter.built_in(item, "off"),
        Some(true) if !is_set("max_steps") || is_set("val_size") || is_set("val_set_size") || is_mixed => {
            converter.nothing(item, PREPARED);
        }
        Some(true) => {
            let note = "rows are shuffled and packed within chunks of data.buffer_size rows";
            converter.change(item, [("data.streaming", true.into())], note);
        }
    }
}

/// Converts the number of optimizer steps.
fn max_steps(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.number() {
        Some(steps) if steps <= 0.0 => converter.built_in(item, "the epochs decide"),
        _ => converter.map(item, [("train_iters", item.scalar())]),
    }
}

fn seed(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let seed = item.scalar();
    match converter.get("data_seed") {
        Some(_) => converter.map(item, [("seed", seed)]),
        None => converter.map(item, [("seed", seed.clone()), ("data.seed", seed)]),
    }
}

fn betas(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let beta = |key: &str, default: f64| converter.get(key).map_or(Json::from(default), |item| item.scalar());
    let betas = json!([beta("adam_beta1", 0.9), beta("adam_beta2", 0.999)]);
    converter.map(item, [("optimizer.betas", betas)]);
}

/// Converts a number of warm-up steps. transformers 5 takes a number below 1 as a fraction of the run.
fn warmup_steps(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let has_ratio = converter.get("warmup_ratio").and_then(|ratio| ratio.number()).is_some_and(|ratio| ratio > 0.0);
    match item.number() {
        _ if is_constant(converter) => converter.built_in(item, CONSTANT),
        Some(0.0) if has_ratio => converter.built_in(item, "warmup_ratio decides"),
        Some(ratio) if ratio > 0.0 && ratio < 1.0 => converter.map(item, [("scheduler.warmup_ratio", item.scalar())]),
        Some(1.0) if converter.toolkit == "axolotl" => {
            converter.change(item, [("scheduler.warmup_steps", 2.into())], "axolotl takes one step as two");
        }
        _ => converter.map(item, [("scheduler.warmup_steps", item.scalar())]),
    }
}

const CONSTANT: &str = "the schedule constant has no warm-up, also in transformers";

fn is_constant(converter: &Converter<'_>) -> bool {
    let name = |key: &str| converter.get(key).and_then(|item| item.text().map(str::to_owned));
    name("lr_scheduler").or_else(|| name("lr_scheduler_type")).as_deref() == Some("constant")
}

fn warmup_ratio(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let steps = converter.get("warmup_steps").and_then(|steps| steps.number());
    if is_constant(converter) {
        converter.built_in(item, CONSTANT);
    } else if steps.is_some_and(|steps| steps > 0.0) {
        converter.built_in(item, "warmup_steps decides");
    } else {
        converter.map(item, [("scheduler.warmup_ratio", item.scalar())]);
    }
}

/// Converts the name of a schedule.
pub(super) fn scheduler(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    const SAME: [&str; 9] = [
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "inverse_sqrt",
        "polynomial",
        "warmup_stable_decay",
    ];
    match item.text() {
        Some(name) if SAME.contains(&name) => converter.map(item, [("scheduler.name", name.into())]),
        _ => converter.nothing(item, &format!("schedules: {}; the default, linear, applies", SAME.join(", "))),
    }
}

fn scheduler_kwargs(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let known = json!(SchedulerKwargs::default());
    for entry in item.entries().into_iter().filter(|entry| !entry.is_null()) {
        match known.get(entry.name()).is_some() {
            true => {
                let path = format!("scheduler.scheduler_specific_kwargs.{}", entry.name());
                converter.map(&entry, [(&path, entry.scalar())]);
            }
            false => converter.nothing(&entry, "not an argument of the recipe's schedules"),
        }
    }
}

/// Converts the optimizer's name.
pub(super) fn optimizer(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let name = item.text().unwrap_or_default();
    let same = ["adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla", "adamw"];
    let in_8_bits = ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"];
    if same.contains(&name) {
        converter.built_in(item, ADAMW);
    } else if in_8_bits.contains(&name) {
        let note = "moments are f32, not 8 bits; deepspeed.bf16.bf16_optimizer_states: true halves them";
        converter.change(item, [], note);
    } else if name == "paged_adamw" || name == "paged_adamw_32bit" {
        let note = "moments stay on the device; deepspeed.zero_optimization.offload_optimizer offloads them";
        converter.change(item, [], note);
    } else {
        converter.nothing(item, "AdamW is the only optimizer, and trains instead; check the learning rate");
    }
}

fn best_model(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let note = "the best checkpoint is kept and run.json names it, but the export is that of the last step";
    match (item.flag(), converter.get("metric_for_best_model").is_some()) {
        (Some(false), _) => converter.built_in(item, "off"),
        (_, true) => converter.change(item, [], note),
        (_, false) => converter.change(item, [("metric_for_best_model", "loss".into())], note),
    }
}

fn best_metric(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    if !matches!(item.text(), Some("loss" | "eval_loss")) {
        converter.nothing(item, "metrics are `loss` and `TASK/METRIC` of eval.tasks");
        return;
    }
    converter.map(item, [("metric_for_best_model", "loss".into())]);
    if let Some(greater) = converter.get("greater_is_better") {
        converter.map(&greater, [("greater_is_better", greater.scalar())]);
    }
}

/// Converts the fraction of rows that are held out.
pub(super) fn held_out_rows(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.number() {
        Some(0.0) => converter.built_in(item, "no rows are held out"),
        Some(fraction) if fraction > 0.0 && fraction < 1.0 => {
            let train = ((1.0 - fraction) * 1e9).round() / 1e9;
            converter.map(item, [("data.train_eval_split", json!([train, fraction]))]);
        }
        _ => converter.nothing(item, "a number of rows is not supported; use data.eval_sources: [NAME:train[:100]]"),
    }
}

/// Converts a flag that makes prompts targets.
pub(super) fn train_on_prompts(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(trains) => converter.map(item, [("data.mask_inputs", (!trains).into())]),
        None => converter.fail(item, "true or false"),
    }
}

/// Converts the dtype of `bf16`, `fp16` and their other names.
pub(super) fn dtype(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let is_bf16 = |item: &ForeignItem<'_>| item.flag() == Some(true) || matches!(item.text(), Some("auto" | "full"));
    let any_bf16 = ["bf16", "bfloat16"].iter().any(|key| converter.get(key).is_some_and(|item| is_bf16(&item)));
    let any_fp16 = ["fp16", "float16"].iter().any(|key| converter.is_on(key));
    let dtype = match (any_bf16, any_fp16) {
        (true, _) => "bf16",
        (false, true) => "fp16",
        (false, false) => "f32",
    };
    let settings = [("model.dtype", dtype.into())];
    let is_auto = item.text() == Some("auto");
    let own_weights = converter.toolkit == "axolotl" && converter.get("adapter").is_none() && dtype == "bf16";
    match (is_auto, own_weights) {
        (true, _) => converter.change(item, settings, "auto chooses bf16 if the GPU supports it; the recipe has bf16"),
        (false, true) => {
            let note = "master weights are f32, those of axolotl are bf16; \
                        deepspeed.bf16.bf16_master_weights_and_grads: true stores bf16";
            converter.change(item, settings, note);
        }
        (false, false) => converter.map(item, settings),
    }
}

/// Converts activation checkpointing.
fn gradient_checkpointing(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let key = "model.activation_checkpoint";
    match (item.flag(), item.text()) {
        (Some(true), _) => converter.map(item, [(key, "full".into())]),
        (Some(false), _) => converter.map(item, [(key, "none".into())]),
        (None, Some("unsloth")) => converter.map(item, [(key, "full".into())]),
        (None, Some("offload" | "offload_disk" | "disk" | "legacy" | "hidden_states")) => {
            converter.change(
                item,
                [(key, "offload".into())],
                "a GPU offloads to host memory, a CPU to files in TMPDIR",
            );
        }
        _ => converter.fail(item, "true, false or offload"),
    }
}

/// Keys of the batch.
#[derive(Clone, Copy)]
pub(super) struct BatchKeys {
    pub(super) micro: &'static str,
    pub(super) accumulation: &'static str,
    /// Rows of a micro-batch without the key.
    pub(super) default_micro: u64,
}

/// Converts rows and accumulation. Several packed rows become more micro-batches of one row, which need less memory.
pub(super) fn batch(converter: &mut Converter<'_>, keys: BatchKeys, packs: bool) {
    let (micro, accumulation) = (converter.get(keys.micro), converter.get(keys.accumulation));
    let of = |item: &Option<ForeignItem<'_>>, default| item.as_ref().map_or(Some(default), ForeignItem::whole);
    let (Some(n_rows), Some(n_micro)) = (of(&micro, keys.default_micro), of(&accumulation, 1)) else {
        for item in [&micro, &accumulation].into_iter().flatten().filter(|item| item.whole().is_none()) {
            converter.fail(item, "a whole number");
        }
        return;
    };
    let both = |rows: u64, micros: u64| {
        [("micro_batch_size", Json::from(rows)), ("gradient_accumulation_steps", Json::from(micros))]
    };
    if let Some(item) = converter.get("auto_find_batch_size") {
        if item.flag() == Some(true) {
            let settings =
                [("micro_batch_size", "auto".into()), ("gradient_accumulation_steps", (n_rows * n_micro).into())];
            let note = "the rows of a micro-batch follow from the free memory, and a step keeps its rows";
            for item in [Some(&item), micro.as_ref(), accumulation.as_ref()].into_iter().flatten() {
                converter.change(item, settings.clone(), note);
            }
            return;
        }
        converter.built_in(&item, "off");
    }
    if packs && n_rows > 1 {
        let note = format!(
            "a micro-batch has one packed row, so {n_rows} rows x {n_micro} micro-batches become {} micro-batches",
            n_rows * n_micro
        );
        let settings = both(1, n_rows * n_micro);
        match micro.as_ref().or(accumulation.as_ref()) {
            Some(item) => converter.change(item, settings.clone(), &note),
            None => settings.iter().for_each(|(path, value)| converter.default(keys.micro, path, value.clone())),
        }
        if let (Some(_), Some(item)) = (&micro, &accumulation) {
            converter.change(item, settings, &note);
        }
        return;
    }
    let [rows, micros] = both(n_rows, n_micro);
    if let Some(item) = &micro {
        converter.map(item, [rows.clone()]);
    }
    if let Some(item) = &accumulation {
        converter.map(item, [micros]);
    }
    if n_rows != 1 {
        converter.default(keys.micro, rows.0, rows.1);
    }
}

/// Converts a number of epochs, which may be a fraction.
pub(super) fn epochs(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let steps = converter.get("max_steps").and_then(|steps| steps.number()).unwrap_or(0.0);
    match item.number() {
        _ if steps > 0.0 => converter.built_in(item, "max_steps decides"),
        Some(epochs) if epochs > 0.0 => converter.map(item, [("epochs", number(epochs))]),
        _ => converter.fail(item, "a number above 0"),
    }
}
