//! Learning rates of groups of parameters: axolotl's embeddings and groups, and LoRA+.

use serde_json::{Value as Json, json};

use super::converter::Converter;
use super::item::ForeignItem;

/// Patterns of axolotl's embeddings.
const EMBEDDINGS: &str = r"embed_tokens|lm_head";

/// Converts all keys of groups at each of them: `optimizer.groups` is one list.
pub(super) fn optimizer_groups(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    match groups(converter) {
        Some(groups) if groups.is_empty() => converter.built_in(item, "off"),
        Some(groups) => converter.map(item, [("optimizer.groups", groups.into())]),
        None => converter.fail(item, "learning rates above 0, and names of modules"),
    }
}

/// Returns the groups of the recipe, in axolotl's order: the first that matches counts.
fn groups(converter: &Converter<'_>) -> Option<Vec<Json>> {
    let mut groups = Vec::new();
    // axolotl gives embeddings no weight decay.
    for (key, own) in [("embedding_lr", "learning_rate"), ("embedding_lr_scale", "learning_rate_factor")] {
        if let Some(rate) = number(converter, key)? {
            let group = json!({"name": "embeddings", "pattern": EMBEDDINGS, own: rate, "weight_decay": 0});
            groups.push(group);
            break;
        }
    }
    for group in converter.get("lr_groups").filter(|item| !item.is_null()).iter().flat_map(ForeignItem::items) {
        let modules = group.get("modules")?.texts()?;
        let pattern = modules.iter().map(|name| escaped(name)).collect::<Vec<_>>().join("|");
        let mut own = json!({"pattern": pattern, "learning_rate": group.get("lr")?.number()?});
        if let Some(name) = group.get("name") {
            own["name"] = name.json();
        }
        groups.push(own);
    }
    if let Some(ratio) = number(converter, "loraplus_lr_ratio")? {
        groups.push(json!({"name": "lora_B", "pattern": "lora_B", "learning_rate_factor": ratio}));
    }
    Some(groups)
}

/// Returns a number above 0 if the key has a value; `None` if the value is another.
fn number(converter: &Converter<'_>, key: &str) -> Option<Option<f64>> {
    match converter.get(key).filter(|item| !item.is_null()) {
        None => Some(None),
        Some(item) => item.number().filter(|number| *number > 0.0).map(Some),
    }
}

/// Escapes the characters of a name that have a meaning in a regular expression.
fn escaped(name: &str) -> String {
    name.replace('.', r"\.")
}
