//! The JSON schema of recipes.

use std::path::Path;

/// To write the schema after a change of the recipe's types: `CANDLEWICK_UPDATE_SCHEMA=1 cargo test -p trainer --test it recipe_schema`.
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

/// An editor underlines a value that the parser accepts and the schema lacks.
#[test]
fn aliases_are_in_the_schema_and_are_parsed() {
    let schema = trainer::recipe::json_schema();
    for (section, key) in
        [("OptimizerSection", "lr"), ("SchedulerSection", "lr"), ("SchedulerSection", "num_warmup_steps")]
    {
        assert!(schema["$defs"][section]["properties"][key].is_object(), "{section}.{key}");
    }
    for (name, key) in [
        ("FloatDtype", "model: {dtype: X}"),
        ("CheckpointType", "checkpoint: {output_dir: o, type: X}"),
        ("SchedulerType", "scheduler: {type: X}"),
        ("SchedulerName", "scheduler: {name: X}"),
        ("LogLevel", "logger: {level: X}"),
    ] {
        let forms = schema["$defs"][name]["oneOf"].as_array().unwrap();
        let consts = forms.iter().filter_map(|form| form["const"].as_str());
        let seconds = forms.iter().filter_map(|form| form["enum"].as_array()).flatten().filter_map(|v| v.as_str());
        let names: Vec<&str> = consts.chain(seconds).collect();
        for value in &names {
            let text = key.replace('X', value);
            let loaded = trainer::recipe::Loaded::parse(Path::new("r.yaml"), text.clone(), &[]);
            assert!(loaded.is_ok(), "{text}");
        }
        // The schema lists the values that the parser suggests.
        let error = trainer::recipe::Loaded::parse(Path::new("r.yaml"), key.replace('X', "nothing"), &[]).unwrap_err();
        let offered = error.faults()[0].notes.iter().find_map(|note| note.strip_prefix("values: ")).unwrap().to_owned();
        for value in offered.split(", ") {
            assert!(names.contains(&value), "{value} of {name} is not in the schema: {names:?}");
        }
    }
}
