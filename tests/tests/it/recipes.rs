//! The trainer reads every shipped recipe.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candlewick_model::Config;
use serde_json::Value;
use suite::{read, root, tracked_files};
use trainer::estimate::{Capacity, Category, EstimateReport, Setup, format_bytes, parse_bytes};
use trainer::metrics::Console;
use trainer::plan::Plan;
use trainer::recipe::shipped::{SHIPPED, ShippedRecipe};
use trainer::recipe::{ConfigSource, DataSource, Loaded, Prompt, Recipe, SourceOptions, json_schema};
use trainer::resolve::{BuildFeatures, Environment, TempDir, TrackingEnv, WorldInfo};

fn recipes() -> Vec<PathBuf> {
    let is_yaml = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "yaml");
    let is_recipe = |path: &PathBuf| is_yaml(path) && path.parent() == Some(Path::new("recipes"));
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
        let has_folder = recipe.checkpoint.iter().any(|checkpoint| checkpoint.output_dir.is_some());
        assert!(!has_folder, "{}: checkpoints belong below output_dir", path.display());
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

/// Resolves a shipped recipe on its devices, with the committed `config.json` of its model.
fn plan(recipe: &ShippedRecipe, n_ranks: usize) -> Plan {
    let path = format!("recipes/{}.yaml", recipe.name);
    let loaded = Loaded::read(&root().join(path), &[]).unwrap_or_else(|error| panic!("{error}"));
    let model = &loaded.recipe.model;
    let config = match (&model.config, &model.name_or_path) {
        (Some(ConfigSource::Inline(map)), _) => Config::from_handwritten(map).unwrap(),
        (_, Some(name)) => committed_config(name),
        _ => panic!("{} names no model", recipe.name),
    };
    resolve(&loaded, config, n_ranks)
}

/// Returns the committed `config.json` of a model on the Hub.
fn committed_config(name: &str) -> Config {
    let file = format!("tests/tests/fixtures/configs/{}.json", name.rsplit('/').next().unwrap());
    Config::from_json(serde_json::from_str(&read(file)).unwrap()).unwrap()
}

pub(crate) fn resolve(loaded: &Loaded, config: Config, n_ranks: usize) -> Plan {
    let environment = Environment {
        config: Some(config),
        n_cores: 4,
        world: WorldInfo::first_of(n_ranks),
        features: BuildFeatures { mpi: false, nccl: true },
        temp_dir: TempDir { path: "/var/tmp".into(), is_memory: false },
        has_train_py: false,
        tasks_generate: false,
        console: Console::Full,
        capacity: None,
        missing_gpu: None,
        tracking: TrackingEnv::default(),
        lock: None,
    };
    Plan::resolve(loaded, &environment).unwrap_or_else(|error| panic!("{error}"))
}

/// Resolves every recipe for its ranks, and compares the memory in its comment with the estimate.
#[test]
fn every_recipe_fits_its_devices_with_the_memory_that_it_states() {
    let mut wrong = Vec::new();
    for recipe in SHIPPED.iter().filter(|recipe| !recipe.is_base()) {
        let stated = recipe.stated_memory().unwrap_or_else(|| panic!("{} states no device and memory", recipe.name));
        let plan = plan(recipe, stated.n_ranks);
        let capacity = Capacity::parse(stated.device, plan.device).unwrap();
        let capacity = Capacity { host: None, offload_disk: None, ..capacity };
        let report = EstimateReport::new(recipe.name.into(), &Setup::on(&plan, &capacity).unwrap(), &capacity);
        let host = report.estimate.host.filter(|bytes| *bytes > 8 << 30);
        if report.fits != Some(true) {
            wrong.push(format!("{} does not fit:\n{report}", recipe.name));
        }
        let is_near = is_near(stated.device_memory, report.peak_bytes)
            && stated.host_ram.is_some() == host.is_some()
            && host.is_none_or(|bytes| is_near(stated.host_ram.unwrap(), bytes));
        if !is_near {
            let host = host.map_or(String::new(), |bytes| format!(" and {} of host RAM", format_bytes(bytes)));
            wrong.push(format!("{}: # Memory of each: {}{host}", recipe.name, format_bytes(report.peak_bytes)));
        }
    }
    assert!(wrong.is_empty(), "the estimates are:\n{}", wrong.join("\n"));
}

/// Recomputes the table of the section Memory of docs/moe.md.
#[test]
fn the_memory_of_experts_in_the_documentation_is_the_estimate() {
    let page = read("docs/moe.md");
    let rows = page.lines().skip_while(|line| !line.starts_with("| model | GPUs | weights, master weights |")).skip(2);
    let rows: Vec<Vec<&str>> = rows
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert_eq!(rows.len(), 4);
    for row in rows {
        let [model, n_ranks, weights, gradients, moments, peak] = row[..] else { panic!("{row:?}") };
        let name = if model.starts_with("Mixtral") { "Mixtral-8x7B-Instruct-v0.1" } else { model };
        let text = "{type: sft, micro_batch_size: 1, expert_parallel_size: 8, \
                    deepspeed: {zero_optimization: {stage: 3}}, \
                    model: {name_or_path: org/model, dtype: bf16, activation_checkpoint: full}, \
                    data: {sources: [a.jsonl], max_length: 2048}}";
        let loaded = Loaded::parse(Path::new("recipes/r.yaml"), text.to_owned(), &[]).unwrap();
        let plan = resolve(&loaded, committed_config(name), n_ranks.parse().unwrap());
        let capacity = Capacity::parse("h100-80g", plan.device).unwrap();
        let capacity = Capacity { host: None, offload_disk: None, ..capacity };
        let report = EstimateReport::new(name.to_owned(), &Setup::on(&plan, &capacity).unwrap(), &capacity);
        let peak_phase = &report.estimate.peak().breakdown;
        let of = |categories: &[Category]| categories.iter().map(|category| peak_phase.of(*category)).sum::<u64>();
        for (what, stated, bytes) in [
            ("weights", weights, of(&[Category::Weights, Category::Masters])),
            ("gradients", gradients, of(&[Category::Gradients])),
            ("moments", moments, of(&[Category::OptimizerStates])),
            ("peak", peak.trim_end_matches(" (does not fit)"), report.peak_bytes),
        ] {
            let estimate = format_bytes(bytes);
            assert!(is_near(stated, bytes), "{name} on {n_ranks} GPUs, {what}: {stated} for {estimate}");
        }
        assert_eq!(report.fits, Some(!peak.ends_with("(does not fit)")), "{name} on {n_ranks} GPUs");
    }
}

/// Returns true if a text such as `1.5 GiB` differs from `bytes` by at most 2%, and 32 MiB for the size of the program, which
/// the build decides.
fn is_near(text: &str, bytes: u64) -> bool {
    let stated = parse_bytes(&text.replace(' ', "")).unwrap_or_else(|| panic!("{text} is no number of bytes"));
    stated.abs_diff(bytes) <= bytes / 50 + (32 << 20)
}

#[test]
fn every_launch_command_starts_the_stated_ranks_of_its_recipe() {
    for recipe in SHIPPED.iter().filter(|recipe| !recipe.is_base()) {
        let name = recipe.name;
        let n_ranks = recipe.stated_memory().unwrap().n_ranks;
        let comment = recipe.text.lines().take_while(|line| line.starts_with('#')).map(|line| line[1..].trim());
        let comment = comment.collect::<Vec<_>>().join(" ").replace("\\ ", "");
        let number = |flag: &str| {
            let value = comment.split(flag).nth(1).and_then(|rest| rest.split_whitespace().next());
            value.map_or(1, |value| value.parse::<usize>().unwrap())
        };
        assert_eq!(number("--nnodes ") * number("--nproc-per-node "), n_ranks, "{name}");
        let commands = [
            format!("trainer train {name}"),
            format!("-- train recipes/{name}.yaml"),
            format!("trainer train recipes/{name}.yaml"),
        ];
        assert!(commands.iter().any(|command| comment.contains(command)), "{name} has no command");
    }
}

#[test]
fn the_program_has_every_recipe() {
    let shipped: BTreeSet<PathBuf> =
        SHIPPED.iter().map(|recipe| format!("recipes/{}.yaml", recipe.name).into()).collect();
    let is_recipe = |path: &PathBuf| path.starts_with("recipes") && path.extension().is_some_and(|e| e == "yaml");
    assert_eq!(shipped, tracked_files().into_iter().filter(is_recipe).collect());
    for recipe in SHIPPED {
        assert_eq!(recipe.text, read(format!("recipes/{}.yaml", recipe.name)), "rebuild the trainer");
    }
}
