//! axolotl's keys of the model, its precision and its memory.

use crate::convert::converter::Converter;
use crate::convert::hugging_face::KERNELS;
use crate::convert::item::ForeignItem;

pub(super) fn base_model_config(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let same = converter.get("base_model").is_some_and(|model| model.json() == item.json());
    match same {
        true => converter.built_in(item, "the model's own config.json is read"),
        false => converter.nothing(item, "the model's own config.json is read; model.hf_config_kwargs overrides keys"),
    }
}

pub(super) fn overrides(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    for entry in item.entries() {
        let path = format!("model.hf_config_kwargs.{}", entry.name());
        converter.map(&entry, [(&path, entry.json())]);
    }
}

pub(super) fn rope_scaling(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    converter.map(item, [("model.hf_config_kwargs.rope_scaling", item.json())]);
}

pub(super) fn fp8(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(true) => {
            let note = "scales follow from each tensor's own maximum, as torchao's tensorwise scaling";
            converter.change(item, [("precision.recipe", "current".into())], note);
        }
        _ => converter.built_in(item, "off"),
    }
}

pub(super) fn fp8_gather(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match (item.flag(), converter.is_on("fp8")) {
        (Some(true), true) => converter.map(item, [("precision.fp8_param_gather", true.into())]),
        _ => converter.built_in(item, "off"),
    }
}

pub(super) fn special_tokens(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    for entry in item.entries().into_iter().filter(|entry| !entry.is_null()) {
        match entry.name() {
            "pad_token" => converter.built_in(&entry, "rows are not padded, and padding has no loss"),
            _ => converter.missing(&entry, "special_tokens"),
        }
    }
}

pub(super) fn attention(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let key = "model.attn_implementation";
    match item.text() {
        Some("eager") => converter.map(item, [(key, "reference".into())]),
        Some(name @ ("sdpa" | "flash_attention_2" | "flash_attention_3")) => converter.map(item, [(key, name.into())]),
        _ => converter.change(item, [(key, "auto".into())], "the fastest of the own kernels and cuDNN"),
    }
}

pub(super) fn eager(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(true) => converter.map(item, [("model.attn_implementation", "reference".into())]),
        _ => converter.built_in(item, "off"),
    }
}

pub(super) fn plugins(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    for plugin in item.items() {
        let name = plugin.text().unwrap_or_default().to_lowercase();
        match name.contains("liger") || name.contains("cut_cross_entropy") || name.contains("kernels") {
            true => converter.built_in(&plugin, KERNELS),
            false => converter.nothing(&plugin, "plugins are Python code"),
        }
    }
}

pub(super) fn activation_offloading(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(false) => converter.built_in(item, "off"),
        _ => {
            // It replaces the plain checkpointing of another key.
            converter.draft.remove("model.activation_checkpoint");
            let note = "inputs of blocks are offloaded: by a GPU to host memory, by a CPU to files in TMPDIR";
            converter.change(item, [("model.activation_checkpoint", "offload".into())], note);
        }
    }
}

pub(super) fn selective(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match item.flag() {
        Some(false) => converter.built_in(item, "off"),
        _ => {
            converter.draft.remove("model.activation_checkpoint");
            let note = "attention's outputs are saved, and the rest is recomputed";
            converter.change(item, [("model.activation_checkpoint", "selective".into())], note);
        }
    }
}
