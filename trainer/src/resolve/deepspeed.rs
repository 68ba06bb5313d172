//! The `deepspeed` section: accepts keys that only tune communication, reads some, and refuses all others by name.

use serde_json::Value;

use candlewick_ops::LossScaling;

use super::autocast;
use super::resolver::Resolver;
use crate::recipe::{FloatDtype, foreign_key_advice, parse_number};

/// Keys that only tune bucket sizes or overlap. Here each unit is communicated while others are computed.
const WITHOUT_EFFECT: &[&str] = &[
    "allgather_bucket_size",
    "seq_parallel_communication_data_type",
    "steps_per_print",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.allgather_partitions",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.memory_efficient_linear",
    "zero_optimization.offload_param.buffer_count",
    "zero_optimization.offload_param.buffer_size",
    "zero_optimization.offload_param.max_in_cpu",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.reduce_scatter",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.sub_group_size",
];

/// Keys that are only accepted with the value that disables them.
const DISABLED_ONLY: &[(&str, DisabledValue)] = &[
    ("fp16.auto_cast", DisabledValue::False),
    ("fp16.consecutive_hysteresis", DisabledValue::False),
    ("prescale_gradients", DisabledValue::False),
];

/// The key for the number of ranks in a shard group (MiCS); the groups replicate each other.
pub(super) const SHARD_SIZE: &str = "deepspeed.zero_optimization.mics_shard_size";

/// The key of the ZeRO stage.
pub(super) const STAGE: &str = "zero_optimization.stage";

/// The key of the dtype in which data-parallel ranks send gradients.
const REDUCE_DTYPE: &str = "communication_data_type";

/// The key of the times of a step's phases.
const WALL_CLOCK: &str = "wall_clock_breakdown";

/// The prefix of the keys of optimizer offload.
const OFFLOAD: &str = "zero_optimization.offload_optimizer.";
/// The prefix of the keys of parameter offload.
const OFFLOAD_PARAM: &str = "zero_optimization.offload_param.";

/// The keys that store training state in bf16 instead of f32: master weights with gradients, and moments.
const BF16_STATES: [&str; 2] = ["bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"];

/// The keys of fp16 loss scaling: the key, DeepSpeed's default, the smallest and the largest value. A `loss_scale` of
/// 0 selects dynamic scaling.
const SCALING: [(&str, f64, f64, f64); 5] = [
    ("fp16.loss_scale", 0.0, 0.0, 4_294_967_296.0),
    ("fp16.initial_scale_power", 16.0, 0.0, 32.0),
    ("fp16.loss_scale_window", 1000.0, 1.0, 1e6),
    ("fp16.hysteresis", 2.0, 1.0, 1e6),
    ("fp16.min_loss_scale", 1.0, 1.0, 4_294_967_296.0),
];

/// The value that disables a key.
#[derive(Clone, Copy)]
enum DisabledValue {
    False,
}

/// Reports unsupported keys and values of the recipe's `deepspeed` section.
pub(super) fn check_section(resolver: &mut Resolver) {
    let mut leaves = Vec::new();
    collect("", &resolver.recipe().deepspeed, &mut leaves);
    for (key, value) in leaves {
        check_leaf(resolver, &key, value);
    }
}

/// Returns the section's gradient clipping.
pub(super) fn gradient_clipping(resolver: &Resolver) -> Option<f64> {
    number(resolver.recipe().deepspeed.get("gradient_clipping")?)
}

fn check_leaf(resolver: &mut Resolver, key: &str, value: &Value) {
    let path = format!("deepspeed.{key}");
    match key {
        "gradient_clipping" if number(value).is_none() => {
            resolver.report(&[&path], format!("{path}: expected a number, found {value}"));
        }
        "gradient_clipping" => {}
        "zero_optimization.stage" if number(value).is_none_or(|stage| ![0.0, 1.0, 2.0, 3.0].contains(&stage)) => {
            resolver.report(&[&path], format!("{path}: expected 0, 1, 2 or 3, found {value}"));
        }
        "zero_optimization.stage" if resolver.env.world.n_ranks == 1 && !wants_weights_on_host(resolver) => {
            resolver.note(format!("{path} has no effect on a single rank"));
        }
        "zero_optimization.stage" => {}
        "zero_optimization.mics_shard_size" if !number(value).is_some_and(|n| n >= 1.0 && n.fract() == 0.0) => {
            resolver.report(&[&path], format!("{path}: expected a number of ranks, found {value}"));
        }
        "zero_optimization.mics_shard_size" => {}
        REDUCE_DTYPE => check_reduce_dtype(resolver, &path, value),
        "bf16.enabled" | "bfloat16.enabled" => check_dtype(resolver, &path, value, FloatDtype::Bf16),
        "fp16.enabled" => check_dtype(resolver, &path, value, FloatDtype::F16),
        _ if BF16_STATES.contains(&key) => {
            if !value.is_boolean() {
                resolver.report(&[&path], format!("{path}: expected true or false, found {value}"));
            }
        }
        _ if key.starts_with(OFFLOAD) => check_offload(resolver, key, &path, value),
        _ if key.starts_with(OFFLOAD_PARAM) && !WITHOUT_EFFECT.contains(&key) => {
            check_offload_param(resolver, key, &path, value);
        }
        _ if key.starts_with(autocast::PREFIX) => autocast::check_leaf(resolver, key, &path, value),
        WALL_CLOCK => {
            if !value.is_boolean() {
                resolver.report(&[&path], format!("{path}: expected true or false, found {value}"));
            }
        }
        _ if key.starts_with("fp16.") => check_scaling(resolver, key, &path, value),
        _ if WITHOUT_EFFECT.contains(&key) => resolver.note(format!("{path} has no effect here")),
        _ => check_only(resolver, key, &path, value),
    }
}

fn check_only(resolver: &mut Resolver, key: &str, path: &str, value: &Value) {
    match DISABLED_ONLY.iter().find(|(only, _)| *only == key) {
        Some((_, DisabledValue::False)) if *value == Value::Bool(false) => {}
        Some(_) => {
            let advice = "remove the key, or set it to false";
            resolver.report_missing(&[path], &format!("{path}: {value}"), advice);
        }
        None => match foreign_key_advice(path) {
            Some(advice) => resolver.report_with_advice(&[path], format!("unknown key `{path}`"), advice),
            None => resolver.report_missing(&[path], path, "remove the key"),
        },
    }
}

/// Checks a key of `zero_optimization.offload_optimizer`. Its numbers have no effect without a device.
fn check_offload(resolver: &mut Resolver, key: &str, path: &str, value: &Value) {
    let device = given(resolver, &format!("{OFFLOAD}device"));
    let to_cpu = device.and_then(Value::as_str) == Some("cpu");
    match &key[OFFLOAD.len()..] {
        "device" if matches!(value.as_str(), Some("cpu" | "none")) => {}
        "device" => {
            let advice = "use cpu, or none to keep the optimizer with the weights";
            resolver.report_missing(&[path], &format!("{path}: {value}"), advice);
        }
        "ratio" if !number(value).is_some_and(|share| (0.0..=1.0).contains(&share)) => {
            resolver
                .report(&[path], format!("{path}: expected a fraction of the parameters from 0 to 1, found {value}"));
        }
        "ratio" if !to_cpu => {
            let advice = format!("set deepspeed.{OFFLOAD}device: cpu, or remove the ratio");
            resolver.report_with_advice(&[path], format!("{path}: nothing is offloaded"), advice);
        }
        "ratio" => {}
        "pin_memory" => check_pinning(resolver, path, value),
        _ => check_only(resolver, key, path, value),
    }
}

/// Checks a key of `zero_optimization.offload_param`. Offloaded weights need ZeRO stage 3's all-gather and an
/// optimizer that is offloaded, too.
fn check_offload_param(resolver: &mut Resolver, key: &str, path: &str, value: &Value) {
    match &key[OFFLOAD_PARAM.len()..] {
        "device" if value.as_str() == Some("none") => {}
        "device" if value.as_str() == Some("cpu") => {
            if given(resolver, STAGE).and_then(number) != Some(3.0) {
                let advice = format!("set deepspeed.{STAGE}: 3");
                resolver.report_with_advice(&[path], format!("{path}: cpu needs ZeRO stage 3"), advice);
            }
            let optimizer = |key| given(resolver, &format!("{OFFLOAD}{key}"));
            let is_whole = optimizer("ratio").and_then(number).is_none_or(|ratio| ratio == 1.0);
            if optimizer("device").and_then(Value::as_str) != Some("cpu") || !is_whole {
                let advice = format!("set deepspeed.{OFFLOAD}device: cpu, without a ratio");
                resolver.report_with_advice(&[path], format!("{path}: cpu needs the optimizer offloaded, too"), advice);
            }
        }
        "device" => {
            let advice = "use cpu, or none to keep the weights on the GPU";
            resolver.report_missing(&[path], &format!("{path}: {value}"), advice);
        }
        "pin_memory" => check_pinning(resolver, path, value),
        _ => check_only(resolver, key, path, value),
    }
}

fn check_pinning(resolver: &mut Resolver, path: &str, value: &Value) {
    if !value.is_boolean() {
        return resolver.report(&[path], format!("{path}: expected true or false, found {value}"));
    }
    resolver.note(format!("{path} has no effect: copies always go through pinned memory"));
}

/// Returns true if the times of a step's phases are logged.
pub(super) fn wall_clock_breakdown(resolver: &mut Resolver) -> bool {
    let path = format!("deepspeed.{WALL_CLOCK}");
    let given_value = given(resolver, WALL_CLOCK).and_then(Value::as_bool);
    resolver.pick(&path, given_value, false)
}

/// Returns true if the weights are offloaded to a GPU's host.
pub(super) fn weights_on_host(resolver: &mut Resolver) -> bool {
    let is_wanted = wants_weights_on_host(resolver);
    if is_wanted {
        let path = format!("deepspeed.{OFFLOAD_PARAM}device");
        let origin = resolver.loaded.origin(&[&path]);
        resolver.record(&path, "cpu", origin);
    }
    is_wanted
}

pub(super) fn wants_weights_on_host(resolver: &Resolver) -> bool {
    given(resolver, &format!("{OFFLOAD_PARAM}device")).and_then(Value::as_str) == Some("cpu")
}

/// Returns the ZeRO stage, by default 0, or 2 in ArcticTraining's dialect. A stage out of bounds is reported elsewhere.
pub(super) fn zero_stage(resolver: &mut Resolver) -> usize {
    let default = if resolver.is_arctic_training() && leaves_stage_open(resolver) { 2 } else { 0 };
    resolver.pick("deepspeed.zero_optimization.stage", stage(resolver), default)
}

/// Returns true if the recipe has no key of `zero_optimization`. With any of them, DeepSpeed's default stage applies, 0.
pub(super) fn leaves_stage_open(resolver: &Resolver) -> bool {
    !resolver.recipe().deepspeed.contains_key("zero_optimization")
}

/// Returns the ZeRO stage that the section sets, if it is within bounds.
pub(super) fn stage(resolver: &Resolver) -> Option<usize> {
    let given = lookup(&resolver.recipe().deepspeed, STAGE).and_then(number);
    given.filter(|stage| [0.0, 1.0, 2.0, 3.0].contains(stage)).map(|stage| stage as usize)
}

/// Reports an unknown dtype of communication.
fn check_reduce_dtype(resolver: &mut Resolver, path: &str, value: &Value) {
    if parse_reduce_dtype(value).is_none() {
        resolver.report(&[path], format!("{path}: expected fp32, bf16 or fp16, found {value}"));
    }
}

fn parse_reduce_dtype(value: &Value) -> Option<FloatDtype> {
    serde_json::from_value(value.clone()).ok()
}

/// Returns the dtype in which data-parallel ranks send gradients, if the section sets it. Adds a note if the dtype has no effect,
/// or loses gradients. `n_ranks` is the number of ranks that sum a gradient.
pub(super) fn reduce_dtype(resolver: &mut Resolver, n_ranks: usize) -> Option<FloatDtype> {
    let given = given(resolver, REDUCE_DTYPE).and_then(parse_reduce_dtype)?;
    let path = format!("deepspeed.{REDUCE_DTYPE}");
    if n_ranks == 1 {
        resolver.note(format!("{path} has no effect: no other rank has gradients of the same parameters"));
        return None;
    }
    let scales_loss = resolver.recipe().model.dtype == Some(FloatDtype::F16) || autocast::is_fp16(resolver);
    if given == FloatDtype::F16 && !scales_loss {
        resolver.note(format!(
            "{path}: fp16 rounds gradients below 6e-8 to 0, because nothing scales the loss; sums above 65504 become inf; \
             use bf16"
        ));
    }
    Some(resolver.pick(&path, Some(given), given))
}

/// Returns the number of ranks in a shard group, if the section sets it.
pub(super) fn shard_size(resolver: &Resolver) -> Option<usize> {
    let given = lookup(&resolver.recipe().deepspeed, "zero_optimization.mics_shard_size").and_then(number);
    given.filter(|n| *n >= 1.0).map(|n| n as usize)
}

/// Returns the fraction of the parameters whose optimizer state is offloaded to the host.
pub(super) fn optimizer_on_host(resolver: &mut Resolver) -> f64 {
    let section = &resolver.recipe().deepspeed;
    let given = |key: &str| lookup(section, &format!("{OFFLOAD}{key}"));
    if given("device").and_then(Value::as_str) != Some("cpu") {
        return 0.0;
    }
    let share = given("ratio").and_then(number).unwrap_or(1.0);
    let paths = ["ratio", "device"].map(|key| format!("deepspeed.{OFFLOAD}{key}"));
    let origin = resolver.loaded.origin(&[&paths[0], &paths[1]]);
    resolver.record(&paths[0], share, origin)
}

/// Checks a number of the `fp16` section.
fn check_scaling(resolver: &mut Resolver, key: &str, path: &str, value: &Value) {
    let Some((_, _, least, most)) = SCALING.iter().find(|(name, ..)| *name == key) else {
        return check_only(resolver, key, path, value);
    };
    match number(value) {
        Some(n) if (*least..=*most).contains(&n) && n.fract() == 0.0 => {}
        _ => resolver.report(&[path], format!("{path}: expected a whole number from {least} to {most}, found {value}")),
    }
    if resolver.recipe().model.dtype != Some(FloatDtype::F16) && !autocast::is_fp16(resolver) {
        resolver.note(format!("{path} has no effect: model.dtype is not f16"));
    }
}

/// Returns the dtypes of master weights (with gradients) and of moments.
pub(super) fn bf16_states(resolver: &mut Resolver, dtype: FloatDtype) -> (FloatDtype, FloatDtype) {
    let [masters, moments] = BF16_STATES.map(|key| {
        let path = format!("deepspeed.{key}");
        if lookup(&resolver.recipe().deepspeed, key) != Some(&Value::Bool(true)) {
            return FloatDtype::F32;
        }
        let origin = resolver.loaded.origin(&[&path]);
        resolver.record(&path, true, origin);
        FloatDtype::Bf16
    });
    if masters == FloatDtype::Bf16 && dtype != FloatDtype::Bf16 {
        let path = format!("deepspeed.{}", BF16_STATES[0]);
        resolver.report_with_advice(&[&path], format!("{path}: true needs model.dtype: bf16"), "remove the key");
    }
    (masters, moments)
}

/// Returns true if the section stores master weights and gradients in bf16.
pub(super) fn has_bf16_masters(resolver: &Resolver) -> bool {
    lookup(&resolver.recipe().deepspeed, BF16_STATES[0]) == Some(&Value::Bool(true))
}

/// Returns the loss scaling; keys that are not set have DeepSpeed's defaults.
pub(super) fn loss_scaling(resolver: &mut Resolver) -> LossScaling {
    let [fixed, power, window, hysteresis, min] = [0, 1, 2, 3, 4].map(|at| {
        let (key, default, ..) = SCALING[at];
        let path = format!("deepspeed.{key}");
        let origin = resolver.loaded.origin(&[&path]);
        let given = lookup(&resolver.recipe().deepspeed, key).and_then(number);
        resolver.record(&path, given.unwrap_or(default), origin)
    });
    if fixed > 0.0 {
        note_fixed_scale(resolver);
        return LossScaling { initial: fixed, window: 0, hysteresis: 1, min: fixed };
    }
    LossScaling { initial: power.exp2(), window: window as usize, hysteresis: hysteresis as usize, min }
}

/// Adds a note that a fixed loss scale ignores the keys of dynamic scaling.
fn note_fixed_scale(resolver: &mut Resolver) {
    let given = SCALING[1..].iter().filter(|(key, ..)| lookup(&resolver.recipe().deepspeed, key).is_some());
    let paths: Vec<String> = given.map(|(key, ..)| format!("deepspeed.{key}")).collect();
    for path in paths {
        resolver.note(format!("{path} has no effect: deepspeed.fp16.loss_scale is fixed"));
    }
}

/// Returns the section's value at a path.
fn given<'a>(resolver: &Resolver<'a>, path: &str) -> Option<&'a Value> {
    lookup(&resolver.recipe().deepspeed, path)
}

fn lookup<'a>(map: &'a serde_json::Map<String, Value>, path: &str) -> Option<&'a Value> {
    let mut keys = path.split('.');
    let first = map.get(keys.next()?)?;
    keys.try_fold(first, |value, key| value.get(key))
}

fn check_dtype(resolver: &mut Resolver, path: &str, value: &Value, dtype: FloatDtype) {
    let is_model_dtype = resolver.recipe().model.dtype.unwrap_or(FloatDtype::Bf16) == dtype;
    if *value != Value::Bool(is_model_dtype) {
        let advice = "remove the key: model.dtype sets the dtype";
        resolver.report_with_advice(&[path], format!("{path}: {value} contradicts model.dtype"), advice);
    }
}

fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| parse_number(value.as_str()?))
}

/// Collects the leaves of nested maps with their paths. An empty map has no leaves.
fn collect<'a>(prefix: &str, map: &'a serde_json::Map<String, Value>, leaves: &mut Vec<(String, &'a Value)>) {
    for (key, value) in map {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            Value::Object(inner) => collect(&path, inner, leaves),
            Value::Null => {}
            leaf => leaves.push((path, leaf)),
        }
    }
}
