//! picotron's JSON.

use serde_json::{Value as Json, json};

use super::converter::{Converter, KeyRule, KeyRules};
use super::hugging_face::{self, BatchKeys};
use super::item::ForeignItem;

const SHAPE: &str = "overrides config.json; the weights are random in any case";
const VARIABLE: &str = "the environment of the command has it";

const RULES: KeyRules = &[
    ("distributed.tp_size", KeyRule::By(degree)),
    ("distributed.cp_size", KeyRule::By(degree)),
    ("distributed.pp_size", KeyRule::By(degree)),
    ("distributed.dp_size", KeyRule::By(degree)),
    ("distributed.pp_engine", KeyRule::By(engine)),
    ("distributed.backend", KeyRule::By(backend)),
    ("distributed.use_cpu", KeyRule::By(use_cpu)),
    ("model.name", KeyRule::By(model)),
    ("model.num_hidden_layers", KeyRule::By(shape)),
    ("model.num_attention_heads", KeyRule::By(shape)),
    ("model.num_key_value_heads", KeyRule::By(shape)),
    ("model.dtype", KeyRule::By(dtype)),
    ("model.use_flash_attention", KeyRule::BuiltIn("fused attention is the default")),
    ("model.use_fused_adam", KeyRule::BuiltIn("AdamW is one pass over each flat buffer")),
    ("training.seed", KeyRule::By(seed)),
    ("training.learning_rate", KeyRule::To("optimizer.learning_rate")),
    ("training.total_train_steps", KeyRule::By(steps)),
    ("training.seq_length", KeyRule::By(length)),
    ("training.micro_batch_size", KeyRule::Elsewhere),
    ("training.gradient_accumulation_steps", KeyRule::Elsewhere),
    ("training.num_samples", KeyRule::Elsewhere),
    ("training.max_tokens", KeyRule::By(max_tokens)),
    ("dataset.name", KeyRule::By(dataset)),
    ("dataset.subset_name", KeyRule::Elsewhere),
    ("dataset.split", KeyRule::Elsewhere),
    ("dataset.num_workers", KeyRule::BuiltIn("each step builds its batch from memory-mapped tokens")),
    ("dataset.num_proc", KeyRule::To("data.num_proc")),
    ("checkpoint.save_dir", KeyRule::By(saving)),
    ("checkpoint.save_frequency", KeyRule::Elsewhere),
    ("checkpoint.load_path", KeyRule::Unless("a checkpoint of picotron cannot be resumed")),
    ("logging.use_wandb", KeyRule::By(wandb)),
    ("logging.project_name", KeyRule::Elsewhere),
    ("logging.run_name", KeyRule::To("run_name")),
    ("environment.OMP_NUM_THREADS", KeyRule::BuiltIn(VARIABLE)),
    ("environment.TOKENIZERS_PARALLELISM", KeyRule::BuiltIn("data.num_proc sets the threads of the tokenizer")),
    ("environment.FLASH_ATTEN", KeyRule::BuiltIn("fused attention is the default")),
    ("environment.HF_TOKEN", KeyRule::Nothing("set the environment variable HF_TOKEN; a recipe has no secrets")),
];

/// Converts a file.
pub(super) fn convert(converter: &mut Converter<'_>) {
    converter.apply(&[RULES]);
    let keys = BatchKeys {
        micro: "training.micro_batch_size",
        accumulation: "training.gradient_accumulation_steps",
        default_micro: 1,
    };
    hugging_face::batch(converter, keys, false);
    converter.default("(weight decay of torch's AdamW)", "optimizer.weight_decay", 0.01.into());
    converter.default("(no schedule)", "scheduler.name", "constant".into());
    converter.default("(no clipping)", "gradient_clipping", 0.into());
}

fn degree(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let Some(n) = converter.degree(item) else { return };
    match item.name() {
        "tp_size" => converter.map(item, [("tensor_parallel_size", n.into())]),
        "cp_size" => converter.map(item, [("context_parallel_size", n.into())]),
        "pp_size" => converter.map(item, [("pipeline_parallel_size", n.into())]),
        _ => converter.built_in(item, "follows from the number of ranks that are started"),
    }
}

fn engine(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.text() {
        Some(name @ ("1f1b" | "afab")) => converter.map(item, [("pipeline_schedule", name.into())]),
        _ => converter.fail(item, "1f1b or afab"),
    }
}

fn backend(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.text() {
        Some("nccl") => converter.built_in(item, "ddp_backend: auto is NCCL on GPUs"),
        _ => {
            converter.change(item, [], "ddp_backend: auto connects CPUs of a machine locally, several machines by MPI")
        }
    }
}

fn use_cpu(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(true) => converter.map(item, [("device", "cpu".into())]),
        _ => converter.map(item, [("device", "cuda".into())]),
    }
}

/// Converts the model's name, of which picotron reads the config alone.
fn model(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let settings = [("model.type", "random-weight-hf".into()), ("model.name_or_path", item.json())];
    converter.map(item, settings);
}

fn shape(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let path = format!("model.hf_config_kwargs.{}", item.name());
    converter.record(super::report::FindingKind::Mapped, item, vec![(&path, item.scalar())], SHAPE);
}

/// Converts the dtype. picotron computes in bf16 on GPUs that have it and in f32 on CPUs, whatever the key is.
fn dtype(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match converter.is_on("distributed.use_cpu") {
        true => converter.change(item, [("model.dtype", "f32".into())], "picotron computes in f32 on a CPU"),
        false => {
            let settings = [
                ("model.dtype", "bf16".into()),
                ("deepspeed.bf16.bf16_master_weights_and_grads", true.into()),
                ("deepspeed.bf16.bf16_optimizer_states", true.into()),
            ];
            converter.map(item, settings);
        }
    }
}

fn seed(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    converter.map(item, [("seed", item.scalar()), ("data.seed", item.scalar())]);
}

/// Returns the steps that the tokens of `training.max_tokens` allow.
fn steps_of_tokens(converter: &Converter<'_>) -> Option<u64> {
    let of = |key: &str, default: u64| converter.get(key).map_or(Some(default), |item| item.whole());
    let tokens = converter.get("training.max_tokens")?.whole()?;
    let rows = of("training.micro_batch_size", 1)?
        * of("training.gradient_accumulation_steps", 1)?
        * of("distributed.dp_size", 1)?;
    Some(tokens.div_ceil((rows * of("training.seq_length", 1024)?).max(1)))
}

fn steps(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let Some(steps) = item.whole() else { return converter.fail(item, "a number of steps") };
    match steps_of_tokens(converter).filter(|of_tokens| *of_tokens < steps) {
        Some(fewer) => {
            converter.change(item, [("train_iters", fewer.into())], "training.max_tokens ends the run earlier");
        }
        None => converter.map(item, [("train_iters", steps.into())]),
    }
}

fn max_tokens(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match steps_of_tokens(converter) {
        Some(steps) if converter.get("training.total_train_steps").and_then(|total| total.whole()) <= Some(steps) => {
            converter.built_in(item, "training.total_train_steps ends the run earlier");
        }
        Some(steps) => converter.change(item, [("train_iters", steps.into())], "tokens divided by those of a step"),
        None => converter.fail(item, "a number of tokens"),
    }
}

fn length(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let length = item.scalar();
    let settings = [("data.max_length", length.clone()), ("model.hf_config_kwargs.max_position_embeddings", length)];
    converter.map(item, settings);
}

/// Converts the data set: rows of exactly `seq_length` tokens in the order of the data, in which documents attend to earlier
/// ones.
fn dataset(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let text = |key: &str| converter.get(key).and_then(|item| item.text().map(str::to_owned));
    let split = text("dataset.split").unwrap_or_else(|| "train".to_owned());
    let n_rows = converter.get("training.num_samples");
    let split = match n_rows.as_ref().and_then(ForeignItem::whole).filter(|n| *n > 0) {
        Some(n) => format!("{split}[:{n}]"),
        None => split,
    };
    let mut source = json!({"name_or_path": item.json(), "split": split});
    let subset = converter.get("dataset.subset_name");
    if let Some(subset) = &subset {
        source["subset"] = subset.json();
    }
    let sources = ("data.sources", json!([source]));
    let settings = [
        sources.clone(),
        ("type", "causal".into()),
        ("data.fuse_positions_prob", 1.into()),
        ("data.add_eos_token", false.into()),
        ("data.order", "sequential".into()),
    ];
    converter.map(item, settings);
    for item in [n_rows, subset, converter.get("dataset.split")].into_iter().flatten() {
        converter.map(&item, [sources.clone()]);
    }
}

fn saving(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let folder = item.text().unwrap_or("ckpt").trim_end_matches('/').to_owned();
    let frequency = converter.get("checkpoint.save_frequency");
    let mut sharded = json!({"type": "sharded"});
    if let Some(frequency) = &frequency {
        sharded["save_every_n_steps"] = frequency.scalar();
    }
    let exported = json!({"type": "huggingface", "save_end_of_training": true});
    let list = ("checkpoint", json!([sharded, exported]));
    let note = "checkpoints have the format of this program; the model is exported at the end, too";
    converter.change(item, [("output_dir", folder.into()), list.clone()], note);
    if let Some(item) = frequency {
        converter.map(&item, [list]);
    }
}

fn wandb(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let project = converter.get("logging.project_name");
    if item.flag() != Some(true) {
        converter.built_in(item, "off");
        if let Some(project) = project {
            converter.built_in(&project, "has no effect without use_wandb");
        }
        return;
    }
    converter.map(item, [("report_to", json!(["wandb"]))]);
    if let Some(project) = project {
        let name: Json = project.json();
        converter.map(&project, [("wandb.project", name)]);
    }
}
