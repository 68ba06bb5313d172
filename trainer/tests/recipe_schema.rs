//! The committed JSON schema is the one that the types have.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;

/// After a change of the recipe's types: `CANDLEWICK_UPDATE_SCHEMA=1 cargo test -p trainer --test recipe_schema`.
#[test]
fn the_committed_schema_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../recipes/recipe.schema.json");
    let current = format!("{:#}\n", trainer::recipe::json_schema());
    if std::env::var_os("CANDLEWICK_UPDATE_SCHEMA").is_some() {
        std::fs::write(&path, &current).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap();
    assert!(committed == current, "recipes/recipe.schema.json is not current: run `trainer schema` into it");
}

#[test]
fn every_key_of_the_schema_is_described() {
    fn visit(path: &str, value: &serde_json::Value, bare: &mut Vec<String>) {
        for (key, property) in value["properties"].as_object().into_iter().flatten() {
            if property["description"].as_str().is_none_or(str::is_empty) {
                bare.push(format!("{path}.{key}"));
            }
        }
    }
    let schema = trainer::recipe::json_schema();
    let mut bare = Vec::new();
    visit("Recipe", &schema, &mut bare);
    for (name, definition) in schema["$defs"].as_object().unwrap() {
        visit(name, definition, &mut bare);
    }
    bare.retain(|key| !key.ends_with(".every"));
    assert!(bare.is_empty(), "without a description: {bare:?}");
}
