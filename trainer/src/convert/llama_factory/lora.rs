//! LLaMA-Factory's keys of LoRA.

use serde_json::{Value as Json, json};

use crate::convert::converter::{Converter, KeyRule, KeyRules};
use crate::convert::item::ForeignItem;

const FP8: &str = "frozen weights are FP8 codes, a byte a weight; weights of 4 bits are not supported";
const QUANTIZED: &str = "frozen weights are FP8 codes without parameters";

pub(super) const RULES: KeyRules = &[
    ("lora_rank", KeyRule::Elsewhere),
    ("lora_alpha", KeyRule::Elsewhere),
    ("lora_dropout", KeyRule::Elsewhere),
    ("lora_target", KeyRule::Elsewhere),
    ("use_rslora", KeyRule::Elsewhere),
    ("use_dora", KeyRule::MissingFeature("dora")),
    ("pissa_init", KeyRule::Unless("PEFT's default initialization is the only one")),
    ("pissa_iter", KeyRule::BuiltIn("has no effect without pissa_init")),
    ("pissa_convert", KeyRule::BuiltIn("has no effect without pissa_init")),
    ("additional_target", KeyRule::MissingFeature("modules_to_save")),
    (
        "create_new_adapter",
        KeyRule::Unless("merge the adapter first with `trainer merge`, and train a new one on the result"),
    ),
    ("quantization_bit", KeyRule::By(quantized)),
    ("quantization_method", KeyRule::BuiltIn(QUANTIZED)),
    ("quantization_type", KeyRule::BuiltIn(QUANTIZED)),
    ("double_quantization", KeyRule::BuiltIn(QUANTIZED)),
    ("quantization_device_map", KeyRule::BuiltIn(QUANTIZED)),
    ("freeze_trainable_layers", KeyRule::MissingFeature("freeze")),
    ("freeze_trainable_modules", KeyRule::MissingFeature("freeze")),
    ("freeze_extra_modules", KeyRule::MissingFeature("freeze")),
];

/// Converts the method. LoRA is the default.
pub(super) fn method(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match (item.text(), converter.get("adapter_name_or_path").is_some()) {
        (Some("full"), _) => converter.built_in(item, "all weights are trained"),
        (Some("lora"), true) => converter.built_in(item, "the adapter's folder has its config"),
        (Some("lora"), false) => converter.map(item, [("model.peft_config.peft_type", "LORA".into())]),
        _ => converter.refuse(item, "methods are lora and full"),
    }
}

pub(super) fn continued(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.texts().as_deref() {
        Some([one]) => converter.map(item, [("model.adapter_name_or_path", one.as_str().into())]),
        _ => converter.refuse(item, "one adapter is continued; merge the others first with `trainer merge`"),
    }
}

fn trains_adapter(converter: &Converter<'_>) -> bool {
    let method = converter.get("finetuning_type").and_then(|item| item.text().map(str::to_owned));
    method.as_deref().unwrap_or("lora") == "lora"
}

fn quantized(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match trains_adapter(converter) {
        true => converter.change(item, [("model.quantize_base", "fp8".into())], FP8),
        false => converter.nothing(item, "weights that are trained are not quantized"),
    }
}

/// Converts the keys of the adapter with their defaults.
pub(super) fn finish(converter: &mut Converter<'_>) {
    let keys = ["lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora"];
    let is_new = trains_adapter(converter) && converter.get("adapter_name_or_path").is_none();
    if !is_new {
        for item in keys.iter().filter_map(|key| converter.get(key)).collect::<Vec<_>>() {
            converter.built_in(&item, "has no effect: no new adapter is trained");
        }
        return;
    }
    converter.default("finetuning_type", "model.peft_config.peft_type", "LORA".into());
    let rank = converter.get("lora_rank").map_or(Json::from(8), |item| item.scalar());
    let alpha = json!(rank.as_u64().unwrap_or(8) * 2);
    let targets = converter.get("lora_target").and_then(|item| item.texts()).unwrap_or_else(|| vec!["all".to_owned()]);
    let targets = match targets.as_slice() {
        [all] if all == "all" => Json::from("all-linear"),
        names => json!(names),
    };
    setting(converter, "lora_rank", "r", rank);
    let alpha = converter.get("lora_alpha").map_or(alpha, |item| item.scalar());
    setting(converter, "lora_alpha", "lora_alpha", alpha);
    setting(converter, "lora_target", "target_modules", targets);
    for (key, path) in [("lora_dropout", "lora_dropout"), ("use_rslora", "use_rslora")] {
        if let Some(item) = converter.get(key) {
            converter.map(&item, [(&format!("model.peft_config.{path}"), item.scalar())]);
        }
    }
}

fn setting(converter: &mut Converter<'_>, key: &str, path: &str, value: Json) {
    let path = format!("model.peft_config.{path}");
    match converter.get(key) {
        Some(item) => converter.map(&item, [(&path, value)]),
        None => converter.default(key, &path, value),
    }
}
