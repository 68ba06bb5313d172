//! `deepspeed.torch_autocast`: 16-bit matmuls of a model whose weights and residual stream are f32.

use serde_json::Value;

use super::resolver::Resolver;
use crate::recipe::{FloatDtype, Origin};

/// The prefix of the section's keys in `deepspeed`.
pub(super) const PREFIX: &str = "torch_autocast.";

const DTYPE: &str = "deepspeed.torch_autocast.dtype";

/// The classes of DeepSpeed's default list: linear layers are the only ones that models here have.
const LOWER_PRECISION_MODULES: [&str; 4] = ["torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"];

/// Checks one key of the section.
pub(super) fn check_leaf(resolver: &mut Resolver, key: &str, path: &str, value: &Value) {
    match &key[PREFIX.len()..] {
        "enabled" => {
            if !value.is_boolean() {
                resolver.report(&[path], format!("{path}: expected true or false, found {value}"));
            }
        }
        "dtype" => {
            if !matches!(parse(value), Some(FloatDtype::Bf16 | FloatDtype::F16)) {
                resolver.report(&[path], format!("{path}: expected torch.bfloat16 or torch.float16, found {value}"));
            }
        }
        "lower_precision_safe_modules" => check_modules(resolver, path, value),
        _ => {
            let advice = "the section's keys: enabled, dtype, lower_precision_safe_modules";
            resolver.report_with_advice(&[path], format!("unknown key `{path}`"), advice);
        }
    }
}

fn check_modules(resolver: &mut Resolver, path: &str, value: &Value) {
    let names: Vec<&str> = value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !names.contains(&LOWER_PRECISION_MODULES[0]) || !names.iter().all(|name| LOWER_PRECISION_MODULES.contains(name))
    {
        let message = format!("{path}: the linear layers, and no other modules, compute in the dtype of autocast");
        resolver.report_with_advice(&[path], message, "remove the key, or list torch.nn.Linear");
    }
}

fn parse(value: &Value) -> Option<FloatDtype> {
    serde_json::from_value(value.clone()).ok()
}

fn given<'a>(resolver: &Resolver<'a>, key: &str) -> Option<&'a Value> {
    resolver.recipe().deepspeed.get("torch_autocast")?.get(key)
}

fn is_enabled(resolver: &Resolver) -> bool {
    given(resolver, "enabled") == Some(&Value::Bool(true))
}

/// Returns the dtype of matmuls for weights of `model_dtype`, and reports a section that does not fit it.
pub(super) fn compute_dtype(resolver: &mut Resolver, model_dtype: FloatDtype) -> FloatDtype {
    if !is_enabled(resolver) {
        if given(resolver, "dtype").is_some() {
            resolver.note(format!("{DTYPE} has no effect: deepspeed.torch_autocast.enabled is not true"));
        }
        return model_dtype;
    }
    let Some(dtype) = given(resolver, "dtype").and_then(parse) else {
        if given(resolver, "dtype").is_none() {
            let advice = format!("set {DTYPE}: torch.bfloat16");
            let message = "deepspeed.torch_autocast: the dtype is missing";
            resolver.report_with_advice(&["deepspeed.torch_autocast.enabled"], message, advice);
        }
        return model_dtype;
    };
    match (model_dtype, dtype) {
        (FloatDtype::F32, _) => {
            let origin = resolver.loaded.origin(&[DTYPE]);
            resolver.record(DTYPE, dtype, origin);
        }
        _ if model_dtype == dtype => {
            resolver.note("deepspeed.torch_autocast changes nothing: the layers compute in model.dtype, and norms and losses in f32");
        }
        _ => {
            let advice = "use the same dtype, or model.dtype: f32";
            resolver.report_with_advice(&[DTYPE], format!("{DTYPE} contradicts model.dtype"), advice);
            return model_dtype;
        }
    }
    dtype
}

/// Returns true if autocast computes matmuls of a model with f32 weights, which are then exported in f32.
pub(super) fn has_f32_weights(resolver: &Resolver) -> bool {
    is_enabled(resolver) && resolver.recipe().model.dtype == Some(FloatDtype::F32)
}

/// Returns true if matmuls of f32 weights are computed in fp16, with its loss scaling.
pub(super) fn is_fp16(resolver: &Resolver) -> bool {
    has_f32_weights(resolver) && given(resolver, "dtype").and_then(parse) == Some(FloatDtype::F16)
}

/// Returns the residual stream's default: f32 under autocast of f32 weights, as torch adds f32 and 16-bit tensors.
pub(super) fn f32_residual(resolver: &mut Resolver, key: &str) -> bool {
    if !has_f32_weights(resolver) {
        return false;
    }
    resolver.record(key, true, Origin::Derived)
}
