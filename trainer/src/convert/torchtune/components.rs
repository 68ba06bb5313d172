//! torchtune's components: model, checkpointer, optimizer, schedule, loss and logger.

use serde_json::{Value as Json, json};

use crate::convert::converter::Converter;
use crate::convert::hugging_face::ADAMW;
use crate::convert::item::ForeignItem;

/// Returns the name of a component without its module.
pub(super) fn name<'s>(item: &ForeignItem<'s>) -> &'s str {
    let path = item.text().unwrap_or_default();
    path.rsplit('.').next().unwrap_or(path)
}

/// Returns the name of the component of a section.
pub(super) fn component(section: &ForeignItem<'_>) -> String {
    section.get("_component_").map(|item| name(&item).to_owned()).unwrap_or_default()
}

/// Returns true if the file trains an adapter.
pub(super) fn is_lora(converter: &Converter<'_>) -> bool {
    converter.get("model").is_some_and(|model| is_lora_name(&component(&model)))
}

fn is_lora_name(name: &str) -> bool {
    name.starts_with("lora_") || name.starts_with("qlora_")
}

/// Converts the model's builder, whose name has its size, and the arguments of LoRA.
pub(super) fn model(converter: &mut Converter<'_>, section: &ForeignItem<'_>) {
    let builder = component(section);
    let is_lora = is_lora_name(&builder);
    if let Some(item) = section.get("_component_") {
        let quantized = ("model.quantize_base", Json::from("fp8"));
        let lora = ("model.peft_config.peft_type", Json::from("LORA"));
        match (is_lora, builder.starts_with("qlora_")) {
            (true, true) => converter.change(&item, [lora, quantized], FP8),
            (true, false) => converter.map(&item, [lora]),
            (false, _) => converter.built_in(&item, "config.json of checkpointer.checkpoint_dir has the architecture"),
        }
    }
    if is_lora {
        targets(converter, section);
        for (key, path, default) in [("lora_rank", "r", 8.0), ("lora_alpha", "lora_alpha", 16.0)] {
            let path = format!("model.peft_config.{path}");
            match section.get(key) {
                Some(item) => converter.map(&item, [(&path, item.scalar())]),
                None => converter.default(&format!("model.{key}"), &path, json!(default as u64)),
            }
        }
    }
    for item in section.entries().into_iter().filter(|item| !item.is_null()) {
        argument(converter, &item, is_lora);
    }
}

const FP8: &str = "frozen weights are FP8 codes, a byte a weight, not NF4 of 4 bits; 4-bit weights are not supported";

fn argument(converter: &mut Converter<'_>, item: &ForeignItem<'_>, is_lora: bool) {
    let is_off = item.flag() == Some(false);
    match item.name() {
        "_component_"
        | "lora_attn_modules"
        | "apply_lora_to_mlp"
        | "apply_lora_to_output"
        | "lora_rank"
        | "lora_alpha"
            if is_lora => {}
        "_component_" => {}
        "lora_dropout" if is_lora => converter.map(item, [("model.peft_config.lora_dropout", item.scalar())]),
        "quantize_base" if is_off => converter.built_in(item, "off"),
        "quantize_base" => converter.change(item, [("model.quantize_base", "fp8".into())], FP8),
        "use_dora" if is_off => converter.built_in(item, "off"),
        "use_dora" => converter.nothing(item, "DoRA is not supported; a plain LoRA adapter trains"),
        _ => converter.nothing(item, "the model's config.json decides; model.hf_config_kwargs overrides its keys"),
    }
}

/// Converts the modules of an adapter. torchtune's names of projections differ from those of transformers.
fn targets(converter: &mut Converter<'_>, section: &ForeignItem<'_>) {
    let attention = section.get("lora_attn_modules");
    let names = attention.as_ref().and_then(ForeignItem::texts).unwrap_or_default();
    let mut targets: Vec<String> = names.iter().map(|name| name.replace("output_proj", "o_proj")).collect();
    let mlp = section.get("apply_lora_to_mlp");
    if mlp.as_ref().and_then(ForeignItem::flag) == Some(true) {
        targets.extend(["gate_proj", "up_proj", "down_proj"].map(str::to_owned));
    }
    let setting = ("model.peft_config.target_modules", json!(targets));
    if let Some(item) = attention {
        converter.map(&item, [setting.clone()]);
    }
    if let Some(item) = mlp {
        match item.flag() {
            Some(true) => converter.map(&item, [setting]),
            _ => converter.built_in(&item, "off"),
        }
    }
    if let Some(item) = section.get("apply_lora_to_output") {
        match item.flag() {
            Some(true) => converter.nothing(&item, "an adapter of the output layer is not supported"),
            _ => converter.built_in(&item, "off"),
        }
    }
}

pub(super) fn checkpointer(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match name(item) {
        "FullModelHFCheckpointer" => converter.built_in(item, "a Hugging Face folder is read"),
        "FullModelMetaCheckpointer" | "FullModelTorchTuneCheckpointer" => {
            converter.change(
                item,
                [],
                "a Hugging Face folder is read; checkpoint_dir must have config.json and safetensors",
            );
        }
        _ => converter.nothing(item, "a Hugging Face folder is read"),
    }
}

pub(super) fn optimizer(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match name(item) {
        "AdamW" => converter.built_in(item, ADAMW),
        "Adam" => converter.change(item, [], "weight decay is decoupled from the gradient"),
        "AdamW8bit" | "PagedAdamW8bit" => {
            let note = "moments are f32, not 8 bits; deepspeed.bf16.bf16_optimizer_states: true halves them";
            converter.change(item, [], note);
        }
        "PagedAdamW" => converter.change(item, [], "moments stay on the device; offload_optimizer offloads them"),
        _ => converter.nothing(item, "AdamW is the only optimizer, and trains instead; check the learning rate"),
    }
}

pub(super) fn scheduler(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match name(item) {
        "get_cosine_schedule_with_warmup" => converter.map(item, [("scheduler.name", "cosine".into())]),
        "get_linear_schedule_with_warmup" => converter.map(item, [("scheduler.name", "linear".into())]),
        "get_constant_schedule_with_warmup" => converter.map(item, [("scheduler.name", "constant_with_warmup".into())]),
        _ => converter.nothing(item, "set scheduler.name to a schedule of transformers"),
    }
}

pub(super) fn loss(converter: &mut Converter<'_>, section: &ForeignItem<'_>) {
    let known = ["LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss"];
    match known.contains(&component(section).as_str()) {
        true => converter.built_in(section, "cross entropy, always computed in chunks"),
        false => converter.refuse(section, "cross entropy is the only loss"),
    }
}

pub(super) fn metric_logger(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match name(item) {
        "DiskLogger" | "StdoutLogger" => converter.built_in(item, "metrics.jsonl has every step"),
        "WandBLogger" => converter.map(item, [("report_to", json!(["wandb"]))]),
        "TensorBoardLogger" => converter.map(item, [("report_to", json!(["tensorboard"]))]),
        _ => converter.nothing(item, "the trackers are tensorboard, wandb and mlflow"),
    }
}
