//! DeepSpeed's and FSDP's settings as ZeRO stages.

use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_text_file};
use serde_json::Value as Json;

use super::converter::Converter;
use super::item::ForeignItem;

const STAGE: &str = "deepspeed.zero_optimization.stage";
const REDUCE_DTYPE: &str = "deepspeed.communication_data_type";
const OFFLOAD_OPTIMIZER: &str = "deepspeed.zero_optimization.offload_optimizer";
const OFFLOAD_PARAM: &str = "deepspeed.zero_optimization.offload_param";

/// Converts the path of a DeepSpeed config, or the config itself.
pub(super) fn deepspeed(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let Some(path) = item.text() else {
        let config = item.json();
        return apply(converter, item, &config, "of the map");
    };
    if path.is_empty() {
        return converter.built_in(item, "off");
    }
    let file = [converter.folder.join(path), path.into()].into_iter().find(|file| file.is_file());
    let text = file.as_ref().and_then(|file| read_regular_text_file(file, MAX_CONFIG_FILE_BYTES).ok());
    match text.and_then(|text| serde_json::from_str::<Json>(&text).ok()) {
        Some(config) => apply(converter, item, &config, &format!("read from {path}")),
        None => match stage_of_name(path) {
            Some(stage) => {
                let note = format!("{path} is not there, so the stage follows from its name; compare its other keys");
                converter.change(item, [(STAGE, stage.into())], &note);
            }
            None => converter.nothing(item, "the file is not there; set deepspeed.zero_optimization.stage"),
        },
    }
}

/// Applies the stage and the offloading of a DeepSpeed config. The recipe's own keys replace batch, dtype and optimizer.
fn apply(converter: &mut Converter<'_>, item: &ForeignItem<'_>, config: &Json, origin: &str) {
    let zero = &config["zero_optimization"];
    let mut settings = Vec::new();
    if let Some(stage) = zero["stage"].as_u64() {
        settings.push((STAGE, Json::from(stage)));
    }
    for (path, key) in [(OFFLOAD_OPTIMIZER, "offload_optimizer"), (OFFLOAD_PARAM, "offload_param")] {
        if zero[key]["device"] == "cpu" {
            settings.push((path, serde_json::json!({"device": "cpu"})));
        }
    }
    if let Some(dtype) = config["communication_data_type"].as_str() {
        settings.push((REDUCE_DTYPE, Json::from(dtype)));
    }
    let note = format!("stage and offloading {origin}; the recipe's keys replace its batch, dtype and optimizer");
    match settings.is_empty() {
        true => converter.nothing(item, "the config has no zero_optimization.stage"),
        false => converter.record(super::report::FindingKind::Changed, item, settings, &note),
    }
}

/// Returns the stage in a name such as `zero3_bf16.json` or `ds_z2_config.json`.
fn stage_of_name(path: &str) -> Option<u64> {
    let name = path.rsplit('/').next().unwrap_or(path).to_lowercase();
    let after = name.split_once("zero").or_else(|| name.split_once("_z"))?.1;
    let digit = after.trim_start_matches(['_', '-']).chars().next()?.to_digit(10)?;
    (digit <= 3).then_some(u64::from(digit))
}

/// Converts `fsdp` with `fsdp_config`.
pub(super) fn fsdp(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let words = item.texts().unwrap_or_default();
    let config = converter.get("fsdp_config");
    let words = if item.is_section() { Vec::new() } else { words };
    let option = |names: &[&str]| config.as_ref().and_then(|config| names.iter().find_map(|name| config.get(name)));
    let strategy =
        option(&["sharding_strategy", "fsdp_sharding_strategy"]).and_then(|item| item.text().map(str::to_owned));
    let reshards = option(&["reshard_after_forward", "fsdp_reshard_after_forward"]).and_then(|item| item.flag());
    let has = |word: &str| words.iter().any(|own| own == word);
    let grad_op = strategy.as_deref() == Some("SHARD_GRAD_OP") || has("shard_grad_op") || reshards == Some(false);
    let stage = if grad_op { 2 } else { 3 };
    let offloads =
        has("offload") || option(&["offload_params", "fsdp_offload_params"]).and_then(|i| i.flag()) == Some(true);
    let mut settings: Vec<(&str, Json)> = vec![(STAGE, stage.into())];
    if offloads {
        settings.push((OFFLOAD_OPTIMIZER, serde_json::json!({"device": "cpu"})));
        settings.push((OFFLOAD_PARAM, serde_json::json!({"device": "cpu"})));
    }
    // Offloaded weights need stage 3.
    let settings = if offloads && stage == 2 { settings[..2].to_vec() } else { settings };
    let note = "ZeRO shards what FSDP shards; units are blocks, without a wrap policy";
    converter.record(super::report::FindingKind::Changed, item, settings, note);
    if let Some(config) = config.filter(|config| config.key != item.key) {
        converter.built_in(&config, "read with fsdp");
    }
}

/// Converts `fsdp_config` of a file without `fsdp`.
pub(super) fn fsdp_config(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    if converter.get("fsdp").is_none() {
        fsdp(converter, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_name_has_the_stage() {
        let check = |name: &str, stage: Option<u64>| assert_eq!(stage_of_name(name), stage, "{name}");
        check("deepspeed_configs/zero3_bf16.json", Some(3));
        check("zero2.json", Some(2));
        check("examples/deepspeed/ds_z3_offload_config.json", Some(3));
        check("zero_1.json", Some(1));
        check("mine.json", None);
        check("zero9.json", None);
    }
}
