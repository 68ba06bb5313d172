//! axolotl's keys of LoRA.

use serde_json::{Value as Json, json};

use crate::convert::converter::{Converter, KeyRule, KeyRules};
use crate::convert::hugging_face::KERNELS;
use crate::convert::item::ForeignItem;

pub(super) const RULES: KeyRules = &[
    ("adapter", KeyRule::By(adapter)),
    ("load_in_8bit", KeyRule::By(quantized)),
    ("load_in_4bit", KeyRule::By(quantized)),
    ("bnb_config_kwargs", KeyRule::Nothing("frozen weights are FP8 codes without parameters")),
    ("gptq", KeyRule::Unless("GPTQ checkpoints are not supported; use the original model")),
    ("lora_model_dir", KeyRule::By(continued)),
    ("lora_r", KeyRule::By(rank)),
    ("lora_alpha", KeyRule::By(peft)),
    ("lora_dropout", KeyRule::By(peft)),
    ("lora_target_modules", KeyRule::By(targets)),
    ("lora_target_linear", KeyRule::By(all_linear)),
    ("lora_target_parameters", KeyRule::By(peft)),
    ("lora_rank_pattern", KeyRule::By(peft)),
    ("lora_alpha_pattern", KeyRule::By(peft)),
    ("peft_layers_to_transform", KeyRule::By(peft)),
    ("peft_layers_pattern", KeyRule::By(peft)),
    ("peft_use_rslora", KeyRule::By(peft)),
    ("peft_use_dora", KeyRule::MissingFeature("dora")),
    ("peft_init_lora_weights", KeyRule::By(init)),
    ("peft_autocast_adapter_dtype", KeyRule::BuiltIn("the adapter's master weights are f32")),
    ("lora_modules_to_save", KeyRule::MissingFeature("modules_to_save")),
    ("lora_fan_in_fan_out", KeyRule::Unless("linear layers of these models store [outputs, inputs]")),
    ("lora_on_cpu", KeyRule::BuiltIn("`trainer merge` merges on the CPU")),
    ("lora_mlp_kernel", KeyRule::BuiltIn(KERNELS)),
    ("lora_qkv_kernel", KeyRule::BuiltIn(KERNELS)),
    ("lora_o_kernel", KeyRule::BuiltIn(KERNELS)),
    ("lora_embedding_kernel", KeyRule::BuiltIn(KERNELS)),
    ("qlora_sharded_model_loading", KeyRule::BuiltIn("each rank reads the weights of its shard")),
    ("relora", KeyRule::Unless("ReLoRA is not supported")),
    ("merge_lora", KeyRule::Nothing("`trainer merge` merges an adapter")),
];

/// Returns true if the file trains a new adapter.
fn trains_new(converter: &Converter<'_>) -> bool {
    let adapter = converter.get("adapter").and_then(|item| item.text().map(str::to_owned));
    matches!(adapter.as_deref(), Some("lora" | "qlora")) && converter.get("lora_model_dir").is_none()
}

fn unused(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match converter.get("lora_model_dir") {
        Some(_) => converter.built_in(item, "the folder of the adapter has it"),
        None => converter.built_in(item, "has no effect without adapter: lora or qlora"),
    }
}

fn adapter(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let Some(kind @ ("lora" | "qlora")) = item.text() else {
        return match item.text() {
            Some("") => converter.built_in(item, "all weights are trained"),
            _ => converter.refuse(item, "LoRA is the only adapter: lora or qlora"),
        };
    };
    let lora = ("model.peft_config.peft_type", Json::from("LORA"));
    let is_quantized = kind == "qlora";
    let fp8 = ("model.quantize_base", Json::from("fp8"));
    match (converter.get("lora_model_dir").is_some(), is_quantized) {
        (true, false) => converter.built_in(item, "the folder of the adapter has its config"),
        (true, true) => converter.change(item, [fp8], FP8),
        (false, true) => converter.change(item, [lora, fp8], FP8),
        (false, false) => converter.map(item, [lora]),
    }
}

const FP8: &str = "frozen weights are FP8 codes, a byte a weight, not NF4 of 4 bits; 4-bit weights are not supported";

fn quantized(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let has_adapter = converter.get("adapter").is_some_and(|item| item.text() != Some(""));
    match (item.flag(), has_adapter) {
        (Some(true), true) => converter.change(item, [("model.quantize_base", "fp8".into())], FP8),
        (Some(true), false) => converter.nothing(item, "weights that are trained are not quantized"),
        _ => converter.built_in(item, "off"),
    }
}

fn continued(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    converter.map(item, [("model.adapter_name_or_path", item.json())]);
}

fn rank(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match trains_new(converter) {
        true => converter.map(item, [("model.peft_config.r", item.scalar())]),
        false => unused(converter, item),
    }
}

/// Converts a key that PEFT's config has without its prefix.
fn peft(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let name = match item.name() {
        name @ ("lora_alpha" | "lora_dropout") => name,
        name => name.trim_start_matches("peft_").trim_start_matches("lora_"),
    };
    let path = format!("model.peft_config.{name}");
    match trains_new(converter) {
        true => converter.map(item, [(&path, item.scalar())]),
        false => unused(converter, item),
    }
}

fn all_linear(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match (trains_new(converter), item.flag()) {
        (false, _) => unused(converter, item),
        (true, Some(true)) => converter.map(item, [("model.peft_config.target_modules", "all-linear".into())]),
        (true, _) => converter.built_in(item, "off"),
    }
}

fn targets(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    if !trains_new(converter) {
        return unused(converter, item);
    }
    if converter.is_on("lora_target_linear") {
        return converter.built_in(item, "lora_target_linear has all linear layers");
    }
    let targets = match item.text() {
        Some(one) => Json::from(one),
        None => json!(item.texts()),
    };
    converter.map(item, [("model.peft_config.target_modules", targets)]);
}

fn init(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(true) => converter.built_in(item, "PEFT's default initialization"),
        _ => converter.nothing(item, "PEFT's default initialization is the only one"),
    }
}
