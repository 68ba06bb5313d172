//! The JSON schema of recipes, for completion and validation in editors.

use serde_json::{Map, Value, json};

use super::Recipe;

/// Aliases of keys, which the derived schema lacks: section, key, alias.
const KEY_ALIASES: [(&str, &str, &str); 3] = [
    ("OptimizerSection", "learning_rate", "lr"),
    ("SchedulerSection", "learning_rate", "lr"),
    ("SchedulerSection", "warmup_steps", "num_warmup_steps"),
];

/// Aliases of values: type, aliases.
const VALUE_ALIASES: [(&str, &[&str]); 6] = [
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
        KEY_ALIASES.iter().for_each(|(section, key, alias)| add_key(types, section, key, alias));
        VALUE_ALIASES.iter().for_each(|(name, aliases)| add_names(types, name, aliases));
    }
    // Every derived default means "not set". The descriptions have the real defaults.
    remove_defaults(&mut schema);
    schema
}

fn add_key(types: &mut Map<String, Value>, section: &str, key: &str, alias: &str) {
    let properties = types.get_mut(section).and_then(|section| section.get_mut("properties"));
    if let Some(properties) = properties.and_then(Value::as_object_mut)
        && let Some(mut property) = properties.get(key).cloned()
    {
        property["description"] = format!("Alias of `{key}`.").into();
        properties.insert(alias.to_owned(), property);
    }
}

fn add_names(types: &mut Map<String, Value>, name: &str, aliases: &[&str]) {
    if let Some(values) = types.get_mut(name).and_then(|of_type| of_type.get_mut("oneOf")).and_then(Value::as_array_mut)
    {
        values.push(json!({ "description": "Aliases.", "enum": aliases }));
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
