//! `base`: recipes that include others, and the recipes inside the program.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use trainer::recipe::{ActivationCheckpoint, HumanInt, Loaded, MicroBatchSize, Origin, RecipeError, shipped};

/// A folder of recipe files.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for (name, text) in files {
            let path = folder.path(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn load(&self, name: &str, arguments: &[&str]) -> Result<Loaded, RecipeError> {
        let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
        Loaded::read(&self.path(name), &arguments)
    }

    /// Checks that r.yaml is refused with a message that has these parts. `DIR` stands for the folder.
    #[track_caller]
    fn refused(&self, want: &[&str]) {
        let message = self.load("r.yaml", &[]).expect_err("the recipe is wrong").to_string();
        for part in want {
            let part = part.replace("DIR", self.0.path().to_str().unwrap());
            assert!(message.contains(&part), "no {part:?} in:\n{message}");
        }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut program = Command::new(env!("CARGO_BIN_EXE_trainer"));
        program.args(arguments).current_dir(self.0.path()).env("XDG_CACHE_HOME", self.path("cache"));
        program.output().unwrap()
    }

    /// Runs the program; checks the exit code and that stdout or stderr contains `part`. Returns stdout.
    #[track_caller]
    fn check(&self, arguments: &[&str], code: i32, part: &str) -> String {
        let output = self.run(arguments);
        let text = String::from_utf8([&output.stdout[..], &output.stderr[..]].concat()).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}:\n{text}");
        assert!(text.contains(part), "no {part:?} in:\n{text}");
        String::from_utf8(output.stdout).unwrap()
    }
}

const BASE: &str = "\
model: {name_or_path: org/base, dtype: bf16, activation_checkpoint: {offload: 0.5}}
data: {sources: [a.jsonl, b.jsonl], max_length: 512}
optimizer: {lr: 1e-3, weight_decay: 0.1}
epochs: 3
";

#[test]
fn the_including_recipe_overrides_its_base_key_by_key() {
    let own = "base: base.yaml\nmodel: {name_or_path: org/own, activation_checkpoint: {every: 2}}\n\
               data: {sources: [c.jsonl]}\noptimizer: {learning_rate: 1e-5}\nepochs: null\n";
    let loaded = Folder::new(&[("base.yaml", BASE), ("r.yaml", own)]).load("r.yaml", &["data.max_length=64"]).unwrap();
    let recipe = &loaded.recipe;
    assert_eq!(recipe.model.name_or_path.as_deref(), Some("org/own"));
    assert_eq!(recipe.model.dtype, Some(trainer::recipe::FloatDtype::Bf16), "the base's key stays");
    let Some(ActivationCheckpoint::Every(every)) = &recipe.model.activation_checkpoint else {
        panic!("{:?}", recipe.model.activation_checkpoint)
    };
    assert_eq!(every.0, 2, "the map of one choice is replaced");
    let sources: Vec<_> = recipe.data.sources.iter().map(|source| source.0.name_or_path.as_deref()).collect();
    assert_eq!(sources, [Some("c.jsonl")], "a list is replaced");
    assert_eq!(recipe.optimizer.learning_rate.map(|x| x.0), Some(1e-5), "an alias is the same key");
    assert_eq!(recipe.optimizer.weight_decay.map(|x| x.0), Some(0.1));
    assert_eq!(recipe.epochs, None, "null removes the base's key");
    assert_eq!(recipe.data.max_length.map(|n| n.0), Some(64), "an argument overrides both");
}

#[test]
fn null_removes_a_list_or_a_map_of_the_base() {
    let base = "model: {name_or_path: org/base, hf_config_kwargs: {rope_scaling: {type: linear, factor: 2}}}\n\
                data: {sources: [a.jsonl], eval_sources: [b.jsonl]}\ncheckpoint: [{output_dir: c}]\ngenerate: {prompts: [x]}\n";
    let own = "base: base.yaml\nmodel: {hf_config_kwargs: {rope_scaling: null}}\ndata: {eval_sources: null}\n\
               checkpoint: null\ngenerate: null\n";
    let recipe = Folder::new(&[("base.yaml", base), ("r.yaml", own)]).load("r.yaml", &[]).unwrap().recipe;
    assert!(recipe.data.eval_sources.is_empty() && recipe.checkpoint.is_empty() && recipe.generate.is_none());
    let config = recipe.model.hf_config_kwargs;
    assert!(config["rope_scaling"].is_null() && config.len() == 1, "null is a value in a model's config: {config:?}");
}

#[test]
fn a_base_may_have_a_base_of_its_own() {
    let folder = Folder::new(&[
        ("r.yaml", "base: b/1.yaml\nseed: 1\n"),
        ("b/1.yaml", "base: ../c/2.yaml\nseed: 2\nepochs: 2\n"),
        ("c/2.yaml", "base: 3.yaml\nepochs: 3\nmicro_batch_size: 3\n"),
        ("c/3.yaml", "micro_batch_size: 4\ngradient_accumulation_steps: 4\n"),
    ]);
    let loaded = folder.load("r.yaml", &[]).unwrap();
    let recipe = &loaded.recipe;
    let values = [recipe.seed, recipe.gradient_accumulation_steps];
    assert_eq!(values.map(|n| n.unwrap().0), [1, 4]);
    assert_eq!(recipe.micro_batch_size, Some(MicroBatchSize::Rows(HumanInt(3))));
    assert_eq!(recipe.epochs.unwrap().0, 2.0);
    assert_eq!(loaded.origin(&["seed"]), Origin::Line(2));
    assert_eq!(loaded.origin(&["epochs"]), Origin::Base(folder.path("b/1.yaml"), 3));
    assert_eq!(loaded.origin(&["gradient_accumulation_steps"]), Origin::Base(folder.path("b/../c/3.yaml"), 2));
    assert_eq!(recipe.base.as_deref(), Some("b/1.yaml"));
}

#[test]
fn a_recipe_that_includes_itself_is_refused() {
    Folder::new(&[("r.yaml", "seed: 1\nbase: ./r.yaml\n")])
        .refused(&["DIR/r.yaml:2:7: base: a recipe cannot include itself: DIR/r.yaml -> DIR/./r.yaml"]);
    let folder = Folder::new(&[("r.yaml", "base: a.yaml\n"), ("a.yaml", "base: b.yaml\n"), ("b.yaml", "base: a.yaml")]);
    folder.refused(&[
        "DIR/b.yaml:1:7: base: a recipe cannot include itself: DIR/r.yaml -> DIR/a.yaml -> DIR/b.yaml -> DIR/a.yaml",
        "= included by DIR/a.yaml:1",
    ]);
}

#[test]
fn a_chain_of_bases_has_at_most_32() {
    let names: Vec<String> = (0..=33).map(|idx| format!("{idx}.yaml")).collect();
    let texts: Vec<String> = (1..=34).map(|idx| format!("base: {idx}.yaml\n")).collect();
    let chain = |n_bases: usize| {
        let files = names.iter().zip(&texts).take(n_bases).map(|(name, text)| (name.as_str(), text.as_str()));
        let last = (names[n_bases].as_str(), "seed: 1\n");
        Folder::new(&files.chain([last]).collect::<Vec<_>>())
    };
    assert_eq!(chain(32).load("0.yaml", &[]).unwrap().recipe.seed.unwrap().0, 1);
    let error = chain(33).load("0.yaml", &[]).unwrap_err().to_string();
    assert!(error.contains("32.yaml:1:7: base: a recipe has at most 32 bases: "), "{error}");
}

#[test]
fn a_base_that_does_not_exist_is_refused() {
    let refused = |base: &str, want: &[&str]| Folder::new(&[("r.yaml", base)]).refused(want);
    refused(
        "seed: 1\nbase: no/such.yaml\n",
        &["DIR/r.yaml:2:7: base: neither DIR/no/such.yaml nor a shipped recipe", "`trainer recipes ls`"],
    );
    refused("base: qwen3-0.6b-lara\n", &["did you mean the shipped recipe `qwen3-0.6b-lora`?"]);
    refused("base: [a.yaml]\n", &["r.yaml:1:7: base: expected the path or name of a recipe, found a list"]);
    refused("model: {base: a.yaml}\n", &["unknown key `model.base`"]);
    let error = Folder::new(&[("r.yaml", "")]).load("r.yaml", &["base=quickstart"]).unwrap_err().to_string();
    assert!(error.contains("argument `base=quickstart`: base: an argument cannot include a recipe"), "{error}");
}

#[test]
fn errors_and_notes_of_a_base_name_its_file_and_line() {
    let with_base = |text: &str| Folder::new(&[("r.yaml", "seed: 1\nbase: base.yaml\n"), ("base.yaml", text)]);
    with_base("epochs: 2\nmodle: {}\n").refused(&[
        "DIR/base.yaml:2:1: unknown key `modle`",
        "\n 2 | modle: {}\n",
        "= included by DIR/r.yaml:2",
        "did you mean `model`?",
    ]);
    with_base("epochs: [").refused(&["DIR/base.yaml:1", "= included by DIR/r.yaml:2"]);
    with_base("- a\n").refused(&["DIR/base.yaml:1:1: expected a map of keys, found a list"]);
    with_base("epochs: many\n").refused(&["DIR/base.yaml:1:9: epochs: "]);
    let notes = with_base("checkpoint: {output_dir: x, keep: 1}\n").load("r.yaml", &[]).unwrap().notes().to_vec();
    assert!(notes[0].contains("base.yaml:1: checkpoint.keep is deprecated"), "{notes:?}");
}

#[test]
fn a_shipped_recipe_is_a_base_by_its_name() {
    let text = "base: quickstart\nepochs: 7\n";
    for files in [&[("r.yaml", text)][..], &[("r.yaml", text), ("quickstart/data.jsonl", "")]] {
        let folder = Folder::new(files);
        let loaded = folder.load("r.yaml", &[]).unwrap();
        assert_eq!(loaded.recipe.epochs.map(|n| n.0), Some(7.0));
        assert_eq!(loaded.recipe.data.max_length.map(|n| n.0), Some(512));
        let Origin::Base(path, _) = loaded.origin(&["data.max_length"]) else { panic!() };
        assert_eq!(path, Path::new("<shipped>/quickstart.yaml"));
    }
    let own = Folder::new(&[("r.yaml", "base: quickstart.yaml\n"), ("quickstart.yaml", "epochs: 9\n")]);
    let recipe = own.load("r.yaml", &[]).unwrap().recipe;
    assert_eq!((recipe.epochs.map(|n| n.0), recipe.data.max_length), (Some(9.0), None), "a file takes precedence");
}

#[test]
fn a_check_shows_which_file_set_a_key() {
    let model = "model:\n  config: {model_type: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, \
                 num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 128, \
                 rms_norm_eps: 1e-5}\ntokenizer: {name_or_path: tok}\ndata: {sources: [a.jsonl]}\n";
    let files = [("r.yaml", "base: base.yaml\nseed: 3\n"), ("base.yaml", model), ("a.jsonl", "{}"), ("tok/x", "")];
    let folder = Folder::new(&files);
    let table = folder.check(&["check", "r.yaml"], 0, "plan of r.yaml");
    let origin = |key: &str| table.lines().find(|line| line.trim_start().starts_with(key)).unwrap().to_owned();
    assert!(origin("tokenizer.name_or_path").ends_with("  base.yaml:3"), "{table}");
    assert!(origin("seed").ends_with("  line 2"), "{table}");
    assert!(origin("base ").ends_with("  line 1"), "{table}");
    let json = folder.check(&["check", "r.yaml", "--output-format", "json"], 0, "");
    let plan: serde_json::Value = serde_json::from_str(&json).unwrap();
    let setting = |key: &str| plan["settings"].as_array().unwrap().iter().find(|it| it["key"] == key).unwrap().clone();
    assert_eq!(setting("tokenizer.name_or_path")["value"], "tok");
    assert_eq!(setting("tokenizer.name_or_path")["origin"], "base.yaml:3");
}

#[test]
fn shipped_recipes_are_listed_and_shown() {
    let folder = Folder::new(&[]);
    let listed = folder.check(&["recipes", "ls"], 0, "quickstart");
    let names: Vec<&str> = listed.lines().skip(1).map(|line| line.split_whitespace().next().unwrap()).collect();
    let shipped: Vec<&str> = shipped::SHIPPED.iter().filter(|it| !it.is_base()).map(|it| it.name).collect();
    assert_eq!(names, shipped);
    for recipe in shipped::SHIPPED {
        assert_eq!(folder.check(&["recipes", "show", recipe.name], 0, ""), recipe.text, "{}", recipe.name);
    }
    folder.check(&["recipes", "show", "quikstart"], 2, "shipped recipe `quikstart`; did you mean `quickstart`?");
    folder.check(&["recipes", "cp", "nothing-like-it"], 2, "`trainer recipes ls` lists them");
    folder.check(&["check", "quikstart"], 2, "did you mean the shipped recipe `quickstart`?");
    folder.check(&["check", "quickstart"], 0, "plan of <shipped>/quickstart.yaml");
}

#[test]
fn a_copied_recipe_has_the_settings_of_the_shipped_one() {
    for recipe in shipped::SHIPPED.iter().filter(|it| !it.is_base()) {
        let folder = Folder::new(&[]);
        folder.check(&["recipes", "cp", recipe.name, "new/mine.yaml"], 0, "wrote new/mine.yaml");
        let copied = folder.load("new/mine.yaml", &[]).unwrap();
        let loaded = Loaded::read(Path::new(recipe.name), &[]).unwrap();
        let mut recipe_of_copy = copied.recipe.clone();
        // The data of a recipe inside the program are in the cache folder.
        recipe_of_copy.tokenizer.name_or_path.clone_from(&loaded.recipe.tokenizer.name_or_path);
        recipe_of_copy.data.sources.clone_from(&loaded.recipe.data.sources);
        recipe_of_copy.data.eval_sources.clone_from(&loaded.recipe.data.eval_sources);
        assert_eq!(recipe_of_copy, loaded.recipe, "{}", recipe.name);
        let text = std::fs::read_to_string(folder.path("new/mine.yaml")).unwrap();
        assert_eq!(text, recipe.text);
        let bases = &copied.source().bases;
        assert!(bases.iter().all(|base| base.path.starts_with(folder.0.path())), "{bases:?}");
    }
}

#[test]
fn a_copy_replaces_no_file() {
    let folder = Folder::new(&[("quickstart.yaml", "mine"), ("d/x", "")]);
    folder.check(&["recipes", "cp", "quickstart"], 2, "failed to write quickstart.yaml: the file exists");
    assert_eq!(std::fs::read_to_string(folder.path("quickstart.yaml")).unwrap(), "mine");
    folder.check(&["recipes", "cp", "quickstart.yaml", "d"], 0, "wrote d/quickstart.yaml");
    folder.check(&["recipes", "cp", "quickstart", "e/"], 0, "wrote e/quickstart.yaml");
    folder.check(&["recipes", "cp", "quickstart", "e/"], 0, "kept the equal file e/quickstart.yaml");
    folder.check(&["recipes", "cp", "quickstart", "--force"], 0, "replaced quickstart.yaml");
}

#[test]
fn a_refused_copy_writes_nothing_and_own_data_stay() {
    let folder = Folder::new(&[("quickstart.yaml", "mine"), ("recipes/quickstart/train.jsonl", "mine")]);
    folder.check(&["recipes", "cp", "quickstart"], 2, "the file exists");
    assert!(!folder.path("recipes/quickstart/eval.jsonl").exists());
    let data = "recipes/quickstart/train.jsonl, which the recipe reads";
    folder.check(&["recipes", "cp", "quickstart", "d/"], 0, &format!("kept your own file {data}"));
    assert_eq!(std::fs::read_to_string(folder.path("recipes/quickstart/train.jsonl")).unwrap(), "mine");
    assert!(folder.path("recipes/quickstart/tokenizer/tokenizer.json").exists());
    folder.check(&["recipes", "cp", "quickstart", "d/", "--force"], 0, &format!("replaced {data}"));
}

/// Arguments of a run of the quickstart that is one small step.
const ONE_STEP: [&str; 8] = [
    "train_iters=1",
    "data.max_length=64",
    "data.eval_sources.0.sample_count=2",
    "data.sources.0.sample_count=10",
    "data.pack_samples=false",
    "generate=null",
    "eval_on_start=false",
    "checkpoint.0.auto_resume=true",
];

#[test]
fn a_shipped_recipe_runs_outside_of_the_repository() {
    let folder = Folder::new(&[("own.yaml", "base: quickstart\noutput_dir: runs/own\n")]);
    let train = |recipe: &'static str| [&["train", recipe][..], &ONE_STEP].concat();
    folder.check(&train("quickstart"), 0, "");
    folder.check(&train("quickstart"), 0, "nothing left to train");
    folder.check(&["check", "own.yaml", "--offline"], 0, "/cache/candlewick/recipes/");
    let run_json = std::fs::read_to_string(folder.path("runs/quickstart/run.json")).unwrap();
    let run_json: serde_json::Value = serde_json::from_str(&run_json).unwrap();
    let data = run_json["plan"]["data"]["sources"][0]["name_or_path"].as_str().unwrap();
    assert!(Path::new(data).is_file(), "{data}");
    // A copy of the data in the current folder takes precedence.
    folder.check(&["recipes", "cp", "quickstart"], 0, "wrote recipes/quickstart/train.jsonl, which the recipe reads");
    let plan = folder.check(&["check", "quickstart"], 0, "");
    assert!(!plan.contains("/cache/candlewick/recipes/"), "{plan}");
}

#[test]
fn a_missing_shipped_file_is_an_error_with_the_command_that_copies_it() {
    let text = shipped::find("quickstart").unwrap().text;
    let folder = Folder::new(&[("r.yaml", text)]);
    let here = folder.0.path().canonicalize().unwrap();
    let advice =
        format!("relative paths start at the current folder, {}; `trainer recipes cp quickstart", here.display());
    for command in ["train", "check", "preprocess"] {
        folder.check(&[command, "r.yaml"], 3, &advice);
    }
    for name in ["checkpoints", "model"] {
        assert!(!folder.path(&format!("runs/quickstart/{name}")).exists(), "{name}");
    }
    let data = ["preprocess", "quickstart", "data.sources=[recipes/quickstart/train.jsonl]"];
    folder.check(&data, 3, &advice);
}
