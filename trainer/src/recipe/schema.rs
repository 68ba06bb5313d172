//! The JSON schema of recipes, which editors complete and check from.

use serde_json::{Map, Value, json};

use super::Recipe;

/// Second names of keys, which the derived schema does not know: section, key, second name.
const SECOND_KEYS: [(&str, &str, &str); 3] = [
    ("OptimizerSection", "learning_rate", "lr"),
    ("SchedulerSection", "learning_rate", "lr"),
    ("SchedulerSection", "warmup_steps", "num_warmup_steps"),
];

/// Second names of values: type, second names.
const SECOND_NAMES: [(&str, &[&str]); 6] = [
    (
        "FloatDtype",
        &[
            "bfloat16",
            "bfloat",
            "torch.bfloat16",
            "fp32",
            "float32",
            "float",
            "torch.float32",
            "fp16",
            "float16",
            "half",
            "torch.float16",
        ],
    ),
    ("AttnImplementation", &["sdpa", "flash_attention_2", "flash_attention_3", "eager"]),
    ("CheckpointType", &["deepspeed"]),
    ("SchedulerType", &["wds"]),
    ("SchedulerName", &["wsd"]),
    ("LogLevel", &["debug", "info", "warning", "WARN", "warn", "error", "CRITICAL", "critical"]),
];

/// Returns the JSON schema of recipes, for editors.
pub fn json_schema() -> Value {
    let mut schema = schemars::schema_for!(Recipe).to_value();
    if let Some(types) = schema.get_mut("$defs").and_then(Value::as_object_mut) {
        SECOND_KEYS.iter().for_each(|(section, key, second)| add_key(types, section, key, second));
        SECOND_NAMES.iter().for_each(|(name, seconds)| add_names(types, name, seconds));
    }
    // Every default here is "not given"; the descriptions say what that means.
    remove_defaults(&mut schema);
    schema
}

fn add_key(types: &mut Map<String, Value>, section: &str, key: &str, second: &str) {
    let properties = types.get_mut(section).and_then(|section| section.get_mut("properties"));
    if let Some(properties) = properties.and_then(Value::as_object_mut)
        && let Some(mut property) = properties.get(key).cloned()
    {
        property["description"] = format!("The same as `{key}`.").into();
        properties.insert(second.to_owned(), property);
    }
}

fn add_names(types: &mut Map<String, Value>, name: &str, seconds: &[&str]) {
    if let Some(values) = types.get_mut(name).and_then(|of_type| of_type.get_mut("oneOf")).and_then(Value::as_array_mut)
    {
        values.push(json!({ "description": "Second names.", "enum": seconds }));
    }
}

fn remove_defaults(value: &mut Value) {
    match value {
        Value::Object(map) => {
            // A property may be named `default`, and is a map then with its own description.
            if map.get("default").is_none_or(|default| default.get("description").is_none()) {
                map.remove("default");
            }
            map.values_mut().for_each(remove_defaults);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_defaults),
        _ => {}
    }
}
