//! The trainer reads every shipped recipe.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::Value;
use suite::{read, root, tracked_files};
use trainer::recipe::{DataSource, Loaded, Prompt, Recipe, SourceOptions, json_schema};

fn recipes() -> Vec<PathBuf> {
    let is_recipe = |path: &PathBuf| path.starts_with("recipes") && path.extension().is_some_and(|e| e == "yaml");
    let recipes: Vec<_> = tracked_files().into_iter().filter(is_recipe).collect();
    assert!(recipes.len() >= 3, "found only {recipes:?}");
    recipes
}

fn load(path: impl Into<PathBuf>, arguments: &[&str]) -> Recipe {
    let arguments: Vec<_> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    Loaded::read(&root().join(path.into()), &arguments).unwrap_or_else(|error| panic!("{error}")).recipe
}

#[test]
fn every_recipe_is_read_without_a_complaint() {
    for path in recipes() {
        let recipe = load(&path, &[]);
        assert!(!recipe.data.sources.is_empty(), "{} has no data", path.display());
        assert!(!recipe.data.eval_sources.is_empty(), "{} does not evaluate", path.display());
    }
}

#[test]
fn every_recipe_names_its_schema_and_a_folder_of_its_own() {
    for path in recipes() {
        let first = read(&path).lines().next().unwrap().to_owned();
        assert_eq!(first, "# yaml-language-server: $schema=./recipe.schema.json", "{}", path.display());
        let own = format!("runs/{}", path.file_stem().unwrap().to_str().unwrap());
        let recipe = load(&path, &[]);
        assert_eq!(recipe.output_dir.as_deref(), Some(own.as_str()), "{}", path.display());
        for checkpoint in recipe.checkpoint {
            assert!(checkpoint.output_dir.starts_with(&own), "{} saves in {}", path.display(), checkpoint.output_dir);
        }
    }
}

#[test]
fn the_committed_schema_is_the_trainers() {
    let committed: Value = serde_json::from_str(&read("recipes/recipe.schema.json")).unwrap();
    assert!(committed == json_schema(), "run `trainer schema >recipes/recipe.schema.json`");
}

/// The overrides of the README and of the recipes' comments.
#[test]
fn the_documented_overrides_reach_their_keys() {
    for name in ["smollm2-135m-sft", "qwen2.5-coder-1.5b-lora"] {
        let path = format!("recipes/{name}.yaml");
        let other_file = ["model.name_or_path=m", "data.sources.0.name_or_path=a.jsonl"];
        let recipe = load(&path, &other_file);
        assert_eq!(recipe.model.name_or_path.as_deref(), Some("m"));
        assert_eq!(recipe.data.sources[0].0.name_or_path.as_deref(), Some("a.jsonl"));
        let recipe = load(&path, &["data.sources=[b.jsonl]"]);
        let plain = SourceOptions { name_or_path: Some("b.jsonl".into()), ..SourceOptions::default() };
        assert_eq!(recipe.data.sources, [DataSource(plain)], "nothing of the old source is left");
    }
    let recipe = load("recipes/quickstart.yaml", &["checkpoint.0.auto_resume=true"]);
    assert_eq!(recipe.checkpoint[0].auto_resume, Some(true));
}

#[test]
fn the_quickstart_is_evaluated_on_held_out_rows() {
    let trained: BTreeSet<_> = questions("train");
    let held_out = questions("eval");
    let prompts = load("recipes/quickstart.yaml", &[]).generate.unwrap().prompts;
    assert!(!prompts.is_empty());
    for prompt in prompts {
        let Prompt::Text(prompt) = prompt else { panic!("{prompt:?}") };
        assert!(held_out.contains(&prompt) && !trained.contains(&prompt), "{prompt:?}");
    }
}

#[test]
fn the_quickstart_trains_and_evaluates_on_different_questions() {
    let (trained, held_out) = (questions("train"), questions("eval"));
    assert_eq!(held_out.len(), 200);
    assert_eq!(held_out.intersection(&trained).next(), None);
}

fn questions(file: &str) -> BTreeSet<String> {
    let text = read(format!("recipes/quickstart/{file}.jsonl"));
    let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    rows.map(|row| row["messages"][0]["content"].as_str().unwrap().to_owned()).collect()
}
