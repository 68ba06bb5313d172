//! The model and its tokenizer.

use std::path::PathBuf;

use candlewick_model::{Config, LoraConfig, Model, ModelError};
use candlewick_ops::{AttentionChoice, AttentionImpl, GroupedGemmImpl};
use candlewick_text::hub::{LocalModel, local_model};
use candlewick_text::template::{ChatTemplateSource, check_variable};
use serde_json::Value;

use super::resolver::Resolver;
use super::{TempDir, autocast, deepspeed};
use crate::plan::{CheckpointingMode, ModelPlan, MtpPlan, TokenizerPlan, WeightInit};
use crate::recipe::{
    ActivationCheckpoint, AttnImplementation, BaseStorage, ConfigSource, ExpertsImplementation, FloatDtype, HumanInt,
    ModelType, Origin, missing_feature_advice,
};

/// The most MTP layers, as a guard against typing errors. Published models have at most 3.
const MAX_MTP_LAYERS: usize = 16;

/// The keys that set activation checkpointing.
pub(super) const ACTIVATIONS: [&str; 3] =
    ["model.activation_checkpoint", "model.disable_activation_checkpoint", "activation_checkpoint_cpu_offload"];

pub(super) fn resolve(resolver: &mut Resolver) -> ModelPlan {
    let model = &resolver.recipe().model;
    check_source(resolver);
    if let Some(name) = &model.name_or_path {
        resolver.pick("model.name_or_path", Some(name), name);
    }
    if let Some(revision) = &model.revision {
        resolver.pick("model.revision", Some(revision), revision);
    }
    let (config, reshaped) = config(resolver);
    let mtp = mtp(resolver);
    let config = config.map(|config| config.with_mtp_layers(mtp.map_or(0, |mtp| mtp.n_layers)));
    let init = init(resolver, &reshaped);
    refuse_random_multimodal(resolver, config.as_ref(), init);
    let dtype = resolver.pick("model.dtype", model.dtype, FloatDtype::Bf16);
    let dtype = autocast::compute_dtype(resolver, dtype);
    let fp32_residual_connection = fp32_residual_connection(resolver, dtype);
    let adapter = adapter(resolver, config.as_ref());
    let quantize_base = quantize_base(resolver, adapter.is_some());
    let experts_implementation = experts(resolver, config.as_ref(), dtype);
    ModelPlan {
        name_or_path: model.name_or_path.as_ref().map(|name| folder_of(resolver, "model", name)),
        revision: model.revision.clone(),
        init,
        config,
        hf_config_kwargs: model.hf_config_kwargs.clone(),
        dtype,
        fp32_residual_connection,
        adapter,
        quantize_base,
        mtp,
        adapter_folder: model.adapter_name_or_path.as_ref().map(|name| folder_of(resolver, "adapter", name).into()),
        activations: activations(resolver),
        activation_offload_dir: resolver.env.temp_dir.path.clone(),
        offloads_to_ram: resolver.env.temp_dir.is_memory,
        tiled_mlp: tiled_mlp(resolver, dtype),
        attention: attention(resolver),
        experts_implementation,
    }
}

/// Returns the local folder of a name; other names stay unchanged.
fn folder_or_name(name: &str) -> String {
    local_model(name).ok().flatten().map_or_else(|| name.to_owned(), path_of)
}

/// Returns the local folder of a name like [`folder_or_name`], and adds a note if it is one of several exports.
fn folder_of(resolver: &mut Resolver, what: &str, name: &str) -> String {
    let Ok(Some(found)) = local_model(name) else { return name.to_owned() };
    found.note(what).into_iter().for_each(|note| resolver.note(note));
    path_of(found)
}

fn path_of(found: LocalModel) -> String {
    found.folder.to_string_lossy().into_owned()
}

fn check_source(resolver: &mut Resolver) {
    let model = &resolver.recipe().model;
    match (&model.name_or_path, &model.config) {
        (None, None) => resolver.report_with_advice(
            &["model"],
            "model: no model is set",
            "set model.name_or_path (a folder or Hub id), or model.config for a model with random weights",
        ),
        (Some(_), Some(_)) => resolver.report_with_advice(
            &["model.config"],
            "model.config and model.name_or_path exclude each other: the first builds a model, the second loads one",
            "to change a loaded model's config set model.hf_config_kwargs; for a tokenizer set tokenizer.name_or_path",
        ),
        _ => {}
    }
    if model.revision.is_some() && model.name_or_path.is_none() {
        resolver.report(&["model.revision"], "model.revision needs model.name_or_path");
    }
}

/// Returns the config with its overrides, and the keys that changed the parameters.
fn config(resolver: &mut Resolver) -> (Option<Config>, Vec<String>) {
    let model = &resolver.recipe().model;
    let Some(mut config) = resolver.env.config.clone() else { return (None, Vec::new()) };
    let (key, origin) = match model.config {
        Some(ConfigSource::Inline(_)) => ("model.config", resolver.loaded.origin(&["model.config"])),
        Some(ConfigSource::Path(_)) => ("model.config", resolver.loaded.origin(&["model.config"])),
        None => ("model.config", Origin::Derived),
    };
    resolver.record(key, summary(&config), origin);
    if model.hf_config_kwargs.is_empty() {
        return (Some(config), Vec::new());
    }
    resolver.pick("model.hf_config_kwargs", Some(&model.hf_config_kwargs), &model.hf_config_kwargs);
    match config.apply_overrides(&model.hf_config_kwargs) {
        Ok(reshaped) => (Some(config), reshaped),
        Err(error) => {
            const KEY: &str = "model.hf_config_kwargs";
            let of_config = error.config_key().map_or(KEY.to_owned(), |key| format!("{KEY}.{key}"));
            resolver.report(&[&of_config, KEY], format!("{KEY}: {error}"));
            (Some(config), Vec::new())
        }
    }
}

fn summary(config: &Config) -> String {
    let (layers, width, vocabulary) = (config.n_layers(), config.hidden_size(), config.vocab_size());
    format!("{}, {layers} layers of {width}, {vocabulary} tokens", config.family().name())
}

fn init(resolver: &mut Resolver, reshaped: &[String]) -> WeightInit {
    let model = &resolver.recipe().model;
    let kind = resolver.pick("model.type", model.kind, ModelType::Huggingface);
    if model.config.is_some() || kind == ModelType::RandomWeightHf {
        return resolver.record("weights", WeightInit::Random, Origin::Derived);
    }
    if !reshaped.is_empty() {
        let keys = reshaped.join(", ");
        resolver
            .note(format!("the weights are initialized randomly, not loaded: model.hf_config_kwargs changes {keys}"));
        return resolver.record("weights", WeightInit::Random, Origin::Derived);
    }
    resolver.record("weights", WeightInit::Load, Origin::Derived)
}

/// Reports a multimodal model with random weights: its vision tower would be missing.
fn refuse_random_multimodal(resolver: &mut Resolver, config: Option<&Config>, init: WeightInit) {
    let Some(family) = config.map(Config::family).filter(|family| family.is_multimodal()) else { return };
    if init == WeightInit::Random {
        resolver.report_with_advice(
            &["model.config", "model.hf_config_kwargs", "model.type", "model"],
            format!(
                "model: the weights of a {} cannot be initialized randomly: its vision tower is not computed here",
                family.title()
            ),
            "load a checkpoint without changed shapes, or train a text model of the same family",
        );
    }
}

const MTP_LAYERS: &str = "model.mtp_num_layers";
const MTP_FACTOR: &str = "model.mtp_loss_scaling_factor";

/// Returns the training of MTP layers. Adapters are trained without them.
fn mtp(resolver: &mut Resolver) -> Option<MtpPlan> {
    let model = &resolver.recipe().model;
    let n_layers = model.mtp_num_layers.map_or(0, |HumanInt(n)| n);
    if n_layers == 0 {
        if model.mtp_loss_scaling_factor.is_some() {
            let message = format!("{MTP_FACTOR}: there are no MTP layers");
            resolver.report_with_advice(&[MTP_FACTOR], message, format!("set {MTP_LAYERS}, or remove the key"));
        }
        return None;
    }
    let n_layers = resolver.count(MTP_LAYERS, model.mtp_num_layers, 0);
    if n_layers > MAX_MTP_LAYERS {
        resolver.report(&[MTP_LAYERS], format!("{MTP_LAYERS}: expected at most {MAX_MTP_LAYERS}, found {n_layers}"));
        return None;
    }
    if model.peft_config.is_some() || model.adapter_name_or_path.is_some() {
        let message = format!("{MTP_LAYERS}: an adapter folder cannot hold MTP layers");
        resolver.report_with_advice(&[MTP_LAYERS], message, "remove the key, or train all weights");
        return None;
    }
    let loss_scaling_factor = resolver.coefficient(MTP_FACTOR, model.mtp_loss_scaling_factor, 0.1);
    Some(MtpPlan { n_layers, loss_scaling_factor })
}

fn fp32_residual_connection(resolver: &mut Resolver, dtype: FloatDtype) -> bool {
    const KEY: &str = "model.fp32_residual_connection";
    let given = resolver.recipe().model.fp32_residual_connection;
    if given.is_none() && autocast::f32_residual(resolver, KEY) {
        return true;
    }
    let is_on = resolver.pick(KEY, given, false);
    if is_on && dtype == FloatDtype::F32 {
        let message = format!("{KEY}: true needs model.dtype: bf16 or fp16; with f32 everything is f32");
        resolver.report_with_advice(&[KEY], message, "remove the key");
    }
    is_on
}

const QUANTIZE_BASE: &str = "model.quantize_base";

/// Returns the storage of frozen weights, which only an adapter run has.
fn quantize_base(resolver: &mut Resolver, has_adapter: bool) -> Option<BaseStorage> {
    let model = &resolver.recipe().model;
    let storage = resolver.pick(QUANTIZE_BASE, model.quantize_base.map(Some), None);
    if storage.is_some() && !has_adapter && model.peft_config.is_none() && model.adapter_name_or_path.is_none() {
        let message = format!("{QUANTIZE_BASE}: only frozen weights are quantized, and this run trains all weights");
        resolver.report_with_advice(&[QUANTIZE_BASE], message, "set model.peft_config, or remove the key");
    }
    storage
}

const ADAPTER: &str = "model.adapter_name_or_path";

/// Returns the trained adapter: a new one by `peft_config`, or an existing one.
fn adapter(resolver: &mut Resolver, config: Option<&Config>) -> Option<LoraConfig> {
    let model = &resolver.recipe().model;
    let (key, adapter) = match (&model.peft_config, &model.adapter_name_or_path) {
        (None, None) => return None,
        (Some(_), Some(_)) => {
            let message = format!("{ADAPTER} and model.peft_config exclude each other: the adapter has its own config");
            resolver.report_with_advice(&[ADAPTER], message, "keep model.peft_config for a new adapter");
            return None;
        }
        (Some(map), None) => ("model.peft_config", LoraConfig::from_json(&Value::Object(map.clone()))),
        (None, Some(name)) => match local_model(name) {
            Ok(found) => (ADAPTER, LoraConfig::read(&found.map_or_else(|| PathBuf::from(name), |found| found.folder))),
            Err(error) => {
                resolver.report(&[ADAPTER], format!("{ADAPTER}: failed to {error}"));
                return None;
            }
        },
    };
    if let Some(map) = &model.peft_config {
        resolver.pick("model.peft_config", Some(map), map);
    }
    if let Some(folder) = &model.adapter_name_or_path {
        resolver.pick(ADAPTER, Some(folder), folder);
    }
    let base = model.name_or_path.as_deref().map(folder_or_name);
    // The target modules can only be checked if the config is known.
    let adapter = adapter.and_then(|adapter| {
        let Some(config) = config else { return Ok(adapter) };
        Model::new(config.clone(), Some(adapter.clone()))?;
        if model.peft_config.is_some() {
            adapter.check_patterns(config)?;
        }
        Ok(adapter)
    });
    match adapter {
        Ok(adapter) => Some(match base {
            Some(base) => adapter.with_base_model(&base),
            None => adapter,
        }),
        Err(error) => {
            report_adapter_error(resolver, key, &error);
            None
        }
    }
}

/// Reports an invalid adapter, with the replacement of a missing feature in its config.
fn report_adapter_error(resolver: &mut Resolver, key: &str, error: &ModelError) {
    let name = error.config_key().unwrap_or_default();
    let value = resolver.recipe().model.peft_config.as_ref().and_then(|map| map.get(name)?.as_str());
    let (at, message) = (format!("{key}.{name}"), format!("{key}: {error}"));
    let advice = value.and_then(missing_feature_advice).or_else(|| missing_feature_advice(&at));
    match advice {
        Some(advice) => resolver.report_with_advice(&[&at, key], message, advice),
        None => resolver.report(&[&at, key], message),
    }
}

/// Combines the three keys that set activation checkpointing, and reports contradictions.
fn activations(resolver: &mut Resolver) -> CheckpointingMode {
    let recipe = resolver.recipe();
    let given = recipe.model.activation_checkpoint;
    if given == Some(ActivationCheckpoint::Every(HumanInt(0))) {
        resolver.report(&[ACTIVATIONS[0]], "model.activation_checkpoint.every: expected at least 1, found 0");
    }
    let disabled = recipe.model.disable_activation_checkpoint;
    let offload = recipe.activation_checkpoint_cpu_offload == Some(true);
    if let (Some(given), Some(disabled)) = (given, disabled)
        && (given == ActivationCheckpoint::None) != disabled
    {
        let message = "model.disable_activation_checkpoint contradicts model.activation_checkpoint";
        resolver.report_with_advice(&[ACTIVATIONS[1]], message, "keep model.activation_checkpoint");
    }
    let offloads = |given| matches!(given, ActivationCheckpoint::Offload | ActivationCheckpoint::OffloadFraction(_));
    if offload && (disabled == Some(true) || given.is_some_and(|given| !offloads(given))) {
        let other = if given.is_some() { ACTIVATIONS[0] } else { ACTIVATIONS[1] };
        let message = format!("activation_checkpoint_cpu_offload contradicts {other}");
        resolver.report_with_advice(&[ACTIVATIONS[2]], message, "keep model.activation_checkpoint: offload");
    }
    let by_other_keys = match (offload, disabled) {
        (true, _) => Some(ActivationCheckpoint::Offload),
        (false, Some(false)) => Some(ActivationCheckpoint::Full),
        (false, Some(true)) => Some(ActivationCheckpoint::None),
        (false, None) => None,
    };
    let given = given.or(by_other_keys);
    let origin = if given.is_some() { resolver.loaded.origin(&ACTIVATIONS) } else { Origin::Default };
    let default = match resolver.is_arctic_training() {
        true => ActivationCheckpoint::Full,
        false => ActivationCheckpoint::None,
    };
    let fraction = match resolver.record(ACTIVATIONS[0], given.unwrap_or(default), origin) {
        ActivationCheckpoint::None => return CheckpointingMode::None,
        ActivationCheckpoint::Full => return CheckpointingMode::Full,
        ActivationCheckpoint::Selective => return CheckpointingMode::Selective,
        ActivationCheckpoint::Every(k) => return CheckpointingMode::EveryKth(k.0),
        ActivationCheckpoint::Offload => 1.0,
        ActivationCheckpoint::OffloadFraction(fraction) => fraction.0,
    };
    if !(0.0..=1.0).contains(&fraction) {
        let message =
            format!("{}.offload: expected a fraction of the blocks from 0 to 1, found {fraction}", ACTIVATIONS[0]);
        resolver.report(&[ACTIVATIONS[0]], message);
    }
    note_offload_folder(resolver);
    CheckpointingMode::Offload(fraction)
}

/// Adds a note with the offload folder, and another if that folder is in RAM.
fn note_offload_folder(resolver: &mut Resolver) {
    let TempDir { path, is_memory } = &resolver.env.temp_dir;
    let folder = path.display();
    let note = format!("activations are offloaded to host memory by a GPU, to {folder} (set by TMPDIR) by the CPU");
    resolver.note(note);
    if *is_memory {
        resolver.note(format!(
            "{folder} is in memory (tmpfs): activations offloaded there save no memory on the CPU; set TMPDIR to a folder on a disk"
        ));
    }
}

const TILED_MLP: &str = "tiled_mlp_compute";

fn tiled_mlp(resolver: &mut Resolver, dtype: FloatDtype) -> bool {
    let tiled = resolver.pick(TILED_MLP, resolver.recipe().tiled_mlp_compute, false);
    if tiled && dtype == FloatDtype::Bf16 && deepspeed::has_bf16_masters(resolver) {
        resolver.note(format!("{TILED_MLP}: bf16 gradients are rounded once a tile instead of once a micro-batch"));
    }
    tiled
}

pub(super) const EXPERTS: &str = "model.experts_implementation";

/// Returns the implementation of the experts' matmuls. A dense model has no such setting.
fn experts(resolver: &mut Resolver, config: Option<&Config>, dtype: FloatDtype) -> GroupedGemmImpl {
    if config.is_some_and(|config| config.moe().is_none()) {
        return GroupedGemmImpl::Fused;
    }
    let given = resolver.recipe().model.experts_implementation;
    let (implementation, name) = match resolver.pick(EXPERTS, given, ExpertsImplementation::default()) {
        ExpertsImplementation::Auto => return GroupedGemmImpl::Auto,
        ExpertsImplementation::Fused => return GroupedGemmImpl::Fused,
        ExpertsImplementation::Cublas => (GroupedGemmImpl::Cublas, "cublas"),
        ExpertsImplementation::Cutlass => (GroupedGemmImpl::Cutlass, "cutlass"),
    };
    let why = match (resolver.recipe().device.as_deref(), dtype, &resolver.env.missing_gpu) {
        (Some("cpu"), ..) => Some("needs a GPU, but device is cpu".to_owned()),
        (_, FloatDtype::F32, _) if implementation == GroupedGemmImpl::Cublas => {
            Some("supports 16-bit dtypes only, but model.dtype is f32".to_owned())
        }
        (_, FloatDtype::F32, _) => Some("supports bf16 only, but model.dtype is f32".to_owned()),
        (_, FloatDtype::F16, _) if implementation == GroupedGemmImpl::Cutlass => {
            Some("supports bf16 only, but model.dtype is fp16".to_owned())
        }
        (.., Some(reason)) => Some(format!("needs a GPU: {reason}")),
        _ => None,
    };
    if let Some(why) = why {
        resolver.report_with_advice(&[EXPERTS], format!("{EXPERTS}: {name} {why}"), "use fused, the default");
    }
    implementation
}

pub(super) const ATTENTION: &str = "model.attn_implementation";

fn attention(resolver: &mut Resolver) -> AttentionChoice {
    let (model, device) = (&resolver.recipe().model, &resolver.recipe().device);
    let implementation = match resolver.pick(ATTENTION, model.attn_implementation, AttnImplementation::Auto) {
        AttnImplementation::Auto => AttentionImpl::Auto,
        AttnImplementation::Cudnn => AttentionImpl::Cudnn,
        AttnImplementation::Fused => AttentionImpl::Fused,
        AttnImplementation::Reference => AttentionImpl::Reference,
    };
    let written = resolver.loaded.scalar(ATTENTION).filter(|name| name != "auto");
    if let (AttentionImpl::Auto, Some(name)) = (implementation, written) {
        resolver.note(format!(
            "{ATTENTION}: {name} is read as auto: cuDNN if it supports the case, else Candlewick's kernels"
        ));
    }
    let deterministic = resolver.pick("model.attn_deterministic", model.attn_deterministic, false);
    if implementation == AttentionImpl::Cudnn && device.as_deref() == Some("cpu") {
        let message = format!("{ATTENTION}: cudnn needs a GPU, but device is cpu");
        resolver.report_with_advice(&[ATTENTION], message, "use auto, or fused for Candlewick's kernels");
    }
    if implementation == AttentionImpl::Cudnn && model.dtype == Some(FloatDtype::F32) {
        let message = format!("{ATTENTION}: cudnn supports 16-bit dtypes only, but model.dtype is f32");
        resolver.report_with_advice(&[ATTENTION], message, "use auto, or model.dtype: bf16");
    }
    if implementation == AttentionImpl::Reference {
        if model.activation_checkpoint == Some(ActivationCheckpoint::Selective) {
            let message = format!("{}: selective cannot save the output of {ATTENTION}: reference", ACTIVATIONS[0]);
            resolver.report_with_advice(&[ACTIVATIONS[0]], message, "use full, or another attention");
        }
        resolver
            .note(format!("{ATTENTION}: reference saves all scores of a sequence in memory; use it only for tests"));
    }
    AttentionChoice { implementation, deterministic }
}

pub(super) fn resolve_tokenizer(resolver: &mut Resolver) -> TokenizerPlan {
    let recipe = resolver.recipe();
    let tokenizer = &recipe.tokenizer;
    let name = match (&tokenizer.name_or_path, &recipe.model.name_or_path) {
        (Some(name), _) => resolver.pick("tokenizer.name_or_path", Some(name.clone()), String::new()),
        (None, Some(name)) => resolver.record("tokenizer.name_or_path", folder_or_name(name), Origin::Derived),
        (None, None) => {
            let message = "tokenizer.name_or_path is missing, and no model folder has a tokenizer";
            resolver.report(&["tokenizer", "model.config"], message);
            String::new()
        }
    };
    let revision = match (&tokenizer.revision, &tokenizer.name_or_path) {
        (Some(revision), _) => Some(resolver.pick("tokenizer.revision", Some(revision.clone()), String::new())),
        (None, None) => recipe.model.revision.clone(),
        (None, Some(_)) => None,
    };
    if !tokenizer.chat_template_kwargs.is_empty() {
        let (key, kwargs) = ("tokenizer.chat_template_kwargs", &tokenizer.chat_template_kwargs);
        resolver.pick(key, Some(kwargs), kwargs);
        for problem in kwargs.keys().filter_map(|name| check_variable(name).err()) {
            resolver.report(&[key], format!("{key}: {problem}"));
        }
    }
    TokenizerPlan {
        name_or_path: name,
        revision,
        chat_template: chat_template(resolver),
        chat_template_kwargs: tokenizer.chat_template_kwargs.clone(),
    }
}

fn chat_template(resolver: &mut Resolver) -> Option<ChatTemplateSource> {
    let text = resolver.recipe().tokenizer.chat_template.as_ref()?;
    resolver.pick("tokenizer.chat_template", Some(text), text);
    let source = ChatTemplateSource::parse(text);
    if let Err(problem) = &source {
        let advice = "set one of these names, the path of a Jinja file, or the template itself (recognized by `{`)";
        let message = format!("tokenizer.chat_template: {problem}");
        resolver.report_with_advice(&["tokenizer.chat_template"], message, advice);
    }
    source.ok()
}
