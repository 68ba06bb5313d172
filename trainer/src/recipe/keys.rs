//! The keys of the recipe schema, and advice for unknown keys.

use candlewick_text::suggestion::nearest;
use serde_json::{Map, Value};

use super::foreign_keys::{FOREIGN_KEYS, ForeignKey};
use super::json_schema;
use super::missing_features::{missing_feature_advice, search_word};

/// A key of the schema: `data.max_length`, `checkpoint.N.save_total_limit`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SchemaKey {
    pub(crate) path: String,
    /// True if the key has an effect.
    is_live: bool,
}

impl SchemaKey {
    /// Returns the part after the last dot.
    fn name(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or(&self.path)
    }
}

/// Lists every key of the schema.
pub(crate) fn schema_keys() -> Vec<SchemaKey> {
    let mut keys = Vec::new();
    visit_keys(&json_schema(), &mut |property| {
        let description = property.schema["description"].as_str().unwrap_or_default();
        let is_dead = ["Not implemented", "Moved", "A key of `"].iter().any(|start| description.starts_with(start));
        let is_dead = is_dead || description.contains("Not implemented yet") || description.contains("Not supported");
        keys.push(SchemaKey { path: property.path.to_owned(), is_live: !is_dead });
    });
    keys
}

/// A key of the schema with its own schema.
pub(super) struct SchemaProperty<'a> {
    /// The path, with `N` for an index of a list.
    pub(super) path: &'a str,
    /// The schema of the value.
    pub(super) schema: &'a Value,
    /// True if the section requires the key.
    pub(super) is_required: bool,
}

/// Calls `visit` for every key of the schema, a section before its keys.
pub(super) fn visit_keys(schema: &Value, visit: &mut dyn FnMut(SchemaProperty)) {
    walk(schema, &schema["$defs"], "", visit);
}

fn walk(schema: &Value, definitions: &Value, prefix: &str, visit: &mut dyn FnMut(SchemaProperty)) {
    if let Some(name) = schema["$ref"].as_str().and_then(|at| at.strip_prefix("#/$defs/")) {
        return walk(&definitions[name], definitions, prefix, visit);
    }
    let forms = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|form| schema[form].as_array()).flatten();
    let forms: Vec<&Value> = forms.collect();
    // A key of the form "a list or one item" has the keys of the list.
    let list = forms.iter().position(|form| form.get("items").is_some());
    forms.iter().enumerate().filter(|(idx, _)| list.is_none_or(|list| list == *idx)).for_each(|(_, form)| {
        walk(form, definitions, prefix, visit);
    });
    if schema["items"].is_object() {
        walk(&schema["items"], definitions, &format!("{prefix}N."), visit);
    }
    let none = Map::new();
    for (key, property) in schema["properties"].as_object().unwrap_or(&none) {
        let path = format!("{prefix}{key}");
        let is_required = schema["required"].as_array().is_some_and(|keys| keys.iter().any(|name| name == key));
        visit(SchemaProperty { path: &path, schema: property, is_required });
        walk(property, definitions, &format!("{path}."), visit);
    }
}

/// Returns true if `path` is a key of the schema, or of a map with another program's schema.
pub(crate) fn is_key(path: &str) -> bool {
    const FREE: [&str; 6] =
        ["deepspeed", "model.config", "model.hf_config_kwargs", "model.peft_config", "eval.gen_kwargs", "eval.data"];
    let path = numbered(path);
    FREE.iter().any(|free| path.starts_with(&format!("{free}."))) || schema_keys().iter().any(|key| key.path == path)
}

/// Returns the schema's form of a path: `N` for each index, and `checkpoint.N.` for a key of a single checkpoint.
pub(crate) fn numbered(path: &str) -> String {
    let part = |part: &str| part.parse::<usize>().map_or_else(|_| part.to_owned(), |_| "N".to_owned());
    let path = path.split('.').map(part).collect::<Vec<_>>().join(".");
    match path.strip_prefix("checkpoint.") {
        Some(key) if key != "N" && !key.starts_with("N.") => format!("checkpoint.N.{key}"),
        _ => path,
    }
}

/// Returns the names of a key in other toolkits.
pub(super) fn foreign_names(path: &str) -> impl Iterator<Item = &'static ForeignKey> {
    FOREIGN_KEYS.iter().filter(move |foreign| foreign.recipe_key == path)
}

/// Returns the counterpart of a key of another toolkit, if there is one.
pub(crate) fn counterpart(path: &str) -> Option<&'static str> {
    foreign_key(path).map(|foreign| foreign.recipe_key).filter(|key| !key.is_empty())
}

fn foreign_key(path: &str) -> Option<&'static ForeignKey> {
    let name = path.rsplit('.').next().unwrap_or(path);
    let of_megatron = in_moe_section(name);
    let found = [path, name, &of_megatron].into_iter().find_map(find_foreign);
    found.filter(|foreign| foreign.recipe_key != path)
}

fn find_foreign(name: &str) -> Option<&'static ForeignKey> {
    let word = search_word(name);
    FOREIGN_KEYS.iter().find(|foreign| foreign.name == word)
}

/// Returns the path of a flag of Megatron-LM such as `moe_aux_loss_coeff` in the section `moe`.
fn in_moe_section(name: &str) -> String {
    format!("moe.{}", name.strip_prefix("moe_").unwrap_or(name))
}

/// Returns the key of the section `moe` for a flag of Megatron-LM with the prefix `moe_`.
fn key_of_moe_flag(name: &str) -> Option<String> {
    name.strip_prefix("moe_").map(|_| in_moe_section(name)).filter(|key| is_key(key))
}

/// Returns advice for an unknown key. `siblings` are the keys of the same map.
pub(crate) fn advice(path: &str, siblings: &[&str]) -> Option<String> {
    let name = path.rsplit('.').next().unwrap_or(path);
    if let Some(advice) = foreign_key_advice(path) {
        return Some(advice);
    }
    if let Some(key) = key_of_moe_flag(name) {
        return Some(format!("use `{key}`"));
    }
    let sibling = nearest(name, siblings.iter().copied());
    // In a section its own keys take precedence. At the top level all sections are searched.
    if let Some(sibling) = sibling.filter(|_| path.contains('.')) {
        return Some(meant(&[sibling]));
    }
    let keys = schema_keys();
    let live = || keys.iter().filter(|key| key.is_live);
    let elsewhere: Vec<&str> = live().filter(|key| key.name() == name).map(|key| key.path.as_str()).collect();
    if !elsewhere.is_empty() {
        return Some(meant(&elsewhere[..elsewhere.len().min(3)]));
    }
    if let Some(sibling) = sibling {
        return Some(meant(&[sibling]));
    }
    let near = nearest(name, live().map(SchemaKey::name))?;
    live().find(|key| key.name() == near).map(|key| meant(&[&key.path]))
}

/// Returns advice for a key of another toolkit, or of a feature that is missing.
pub(crate) fn foreign_key_advice(path: &str) -> Option<String> {
    let Some(foreign) = foreign_key(path) else { return missing_feature_advice(path) };
    Some(match (foreign.recipe_key, foreign.remark) {
        ("", remark) => remark.to_owned(),
        (key, "") => format!("use `{key}`"),
        (key, remark) => format!("use `{key}`: {remark}"),
    })
}

/// Returns the key that a command-line option such as `--train-iters` stands for.
pub(crate) fn of_option(option: &str) -> Option<String> {
    let name = option.trim_start_matches('-').replace('-', "_");
    if is_key(&name) {
        return Some(name);
    }
    let foreign = find_foreign(&name).or_else(|| find_foreign(&in_moe_section(&name)));
    let foreign = foreign.filter(|foreign| !foreign.recipe_key.is_empty());
    foreign.map(|foreign| foreign.recipe_key.replace(".N.", ".0.")).or_else(|| key_of_moe_flag(&name))
}

fn meant(keys: &[&str]) -> String {
    let quoted: Vec<String> = keys.iter().map(|key| format!("`{key}`")).collect();
    format!("did you mean {}?", quoted.join(" or "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_foreign_key_maps_to_a_key_of_the_schema() {
        for ForeignKey { name, recipe_key: key, remark } in FOREIGN_KEYS {
            assert!(key.is_empty() || is_key(key), "{name} maps to {key}, which is not a key");
            assert!(!key.is_empty() || !remark.is_empty(), "{name} has neither a key nor a remark");
            assert!(key.is_empty() || *name != *key, "{name} is a key itself");
        }
    }

    #[test]
    fn a_foreign_key_is_unique_and_no_top_level_key() {
        let names: BTreeSet<&str> = FOREIGN_KEYS.iter().map(|foreign| foreign.name).collect();
        assert_eq!(names.len(), FOREIGN_KEYS.len());
        let keys = schema_keys();
        let clashes: Vec<_> = keys.iter().filter(|key| names.contains(key.path.as_str())).collect();
        assert!(clashes.is_empty(), "{clashes:?}");
    }

    #[test]
    fn the_keys_of_a_list_are_those_of_its_items() {
        let keys = schema_keys();
        for path in [
            "checkpoint.N.save_total_limit",
            "data.sources.N.split",
            "scheduler.scheduler_specific_kwargs.min_lr",
            "epochs",
        ] {
            assert!(keys.iter().any(|key| key.path == path), "{path}");
        }
        assert!(!keys.iter().any(|key| key.path == "checkpoint.save_total_limit"));
        for path in
            ["checkpoint.0.save_total_limit", "checkpoint.save_total_limit", "data.sources.3.split", "deepspeed.x.y"]
        {
            assert!(is_key(path), "{path}");
        }
        assert!(!is_key("checkpoint.0.keeep") && !is_key("deepsped.x"));
    }

    #[test]
    fn an_option_of_another_toolkit_becomes_a_key() {
        for (option, key) in [
            ("--train_iters", "train_iters"),
            ("--learning-rate", "optimizer.learning_rate"),
            ("--max_steps", "train_iters"),
            ("--optimizer.lr", "optimizer.lr"),
            ("--save_total_limit", "checkpoint.0.save_total_limit"),
            ("--expert-model-parallel-size", "expert_parallel_size"),
            ("--moe-router-topk", "model.config.num_experts_per_tok"),
            ("--moe-aux-loss-coeff", "moe.aux_loss_coeff"),
        ] {
            assert_eq!(of_option(option).as_deref(), Some(key), "{option}");
        }
        assert_eq!(of_option("--oflfine"), None);
    }
}
