//! Errors in recipes: each message names the place and a fix.

use std::path::Path;

use trainer::recipe::{Loaded, RecipeError};

fn load(text: &str, arguments: &[&str]) -> Result<Loaded, RecipeError> {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    Loaded::parse(Path::new("r.yaml"), text.to_owned(), &arguments)
}

/// Checks that the error of a recipe contains each of these strings.
#[track_caller]
fn check(text: &str, want: &[&str]) {
    check_with(text, &[], want);
}

#[track_caller]
fn check_with(text: &str, arguments: &[&str], want: &[&str]) {
    let message = load(text, arguments).expect_err("the recipe is wrong").to_string();
    for part in want {
        assert!(message.contains(part), "no {part:?} in:\n{message}");
    }
    assert!(message.lines().count() <= 12, "more than a screen:\n{message}");
}

#[test]
fn an_unknown_key_names_its_place_and_the_nearest_key() {
    check(
        "modle:\n  name_or_path: x\n",
        &["r.yaml:1:1: unknown key `modle`", "did you mean `model`?", "-v lists the keys"],
    );
    check(
        "model:\n  name_or_path: x\n  atn_implementation: sdpa\n",
        &[
            "r.yaml:3:3: unknown key `model.atn_implementation`",
            "\n 3 |   atn_implementation: sdpa\n   |   ^^^^^^^^^^^^^^^^^^\n",
            "did you mean `attn_implementation`?",
            "-v lists the keys",
        ],
    );
    check("tokenizer: {name: x}", &["r.yaml:1:13: unknown key `tokenizer.name`", "keys of `tokenizer`:"]);
    check("data:\n  max_len: 4\n", &["r.yaml:2:3: unknown key `data.max_len`", "`max_length`"]);
    check(
        "data:\n  sources:\n    - a\n    - name_or_path: b\n      sample_cuont: 3\n",
        &["r.yaml:5:7: unknown key `data.sources.1.sample_cuont`", "`sample_count`"],
    );
    check("checkpoint:\n  - output_dir: x\n    save_end: true\n", &["r.yaml:3:5: unknown key `checkpoint.0.save_end`"]);
    check(
        "checkpoint:\n  output_dir: x\n  autoresume: true\n",
        &["unknown key `checkpoint.autoresume`", "`auto_resume`"],
    );
    check("optimizer: {learning_rat: 1}", &["unknown key `optimizer.learning_rat`", "`learning_rate`"]);
    check("optimizer: {beta: 0.9}", &["unknown key `optimizer.beta`", "did you mean `betas`?"]);
    check("scheduler: {warmup: 1}", &["unknown key `scheduler.warmup`"]);
    check(
        "scheduler:\n  scheduler_specific_kwargs:\n    min_lr_rat: 1\n",
        &["r.yaml:3:5: unknown key `scheduler.scheduler_specific_kwargs.min_lr_rat`"],
    );
    check("logger: {levle: INFO}", &["`logger.levle`", "did you mean `level`?"]);
    check("wandb: {enabled: false}", &["`wandb.enabled`", "did you mean `enable`?"]);
    check("generate: {prompt: [a]}", &["`generate.prompt`", "did you mean `prompts`?"]);
    check("model: {activation_checkpoint: {evry: 2}}", &["unknown key `model.activation_checkpoint.evry`"]);
    for neither in ["{}", "{every: 2, offload: 0.5}"] {
        let recipe = format!("model: {{activation_checkpoint: {neither}}}");
        check(&recipe, &["model.activation_checkpoint: expected one of the keys `every` and `offload`"]);
    }
    check("model: {activation_checkpoint: {offload: much}}", &["activation_checkpoint.offload: expected a number"]);
}

#[test]
fn a_key_of_another_section_or_another_trainer_is_recognized() {
    for (key, want) in [
        ("learning_rate", "use `optimizer.learning_rate`"),
        ("warmup_steps", "use `scheduler.warmup_steps`"),
        ("eval_sources", "did you mean `data.eval_sources`?"),
        ("num_proc", "did you mean `data.num_proc`?"),
        ("max_steps", "`train_iters`"),
        ("num_train_epochs", "`epochs`"),
        ("base_model", "`model.name_or_path`"),
        ("gradient_checkpointing", "`model.activation_checkpoint`"),
        ("per_device_train_batch_size", "`micro_batch_size`"),
        ("save_total_limit", "`checkpoint.N.save_total_limit`"),
        ("lora_r", "`model.peft_config.r`"),
        ("bias", "use `model.peft_config.bias`"),
        ("sequence_len", "`data.max_length`"),
        ("zero_stage", "`deepspeed.zero_optimization.stage`"),
        ("load_in_4bit", "4-bit weights are not supported"),
        ("use_comet", "metrics.jsonl"),
        ("metric_logger", "`report_to`"),
        ("wandb_project", "`wandb.project`"),
        ("mlflow_tracking_uri", "`mlflow.tracking_uri`"),
    ] {
        check(&format!("{key}: 1\n"), &[&format!("unknown key `{key}`"), want]);
        check_with("", &[&format!("{key}=1")], &[want]);
    }
    check("optimizer: {warmup_steps: 3}", &["unknown key `optimizer.warmup_steps`", "`scheduler.warmup_steps`"]);
    check("model: {max_length: 3}", &["`data.max_length`"]);
}

#[test]
fn a_flag_of_megatron_names_the_key_of_the_recipe_or_of_the_config() {
    const ALWAYS: &str = "remove the key: this is always on";
    check("expert_model_parallel_size: 2", &["use `expert_parallel_size`"]);
    for (flag, want) in [
        ("router_topk", "use `model.config.num_experts_per_tok`: with a loaded model in model.hf_config_kwargs"),
        ("router_score_function", "use `model.config.moe_router_score_function`"),
        ("router_pre_softmax", "use `model.config.moe_router_pre_softmax`"),
        ("layer_freq", "use `model.config.moe_layer_freq`"),
        ("router_force_load_balancing", "use `moe.benchmark.router_force_load_balancing`"),
        ("shared_expert_overlap", ALWAYS),
        ("grouped_gemm", ALWAYS),
        ("permute_fusion", ALWAYS),
        ("per_layer_logging", ALWAYS),
    ] {
        check(&format!("moe: {{{flag}: 1}}"), &[&format!("unknown key `moe.{flag}`"), want]);
        check(&format!("moe: {{moe_{flag}: 1}}"), &[&format!("unknown key `moe.moe_{flag}`"), want]);
        check(&format!("moe_{flag}: 1"), &[&format!("unknown key `moe_{flag}`"), want]);
    }
    for key in ["num_experts: 8", "moe: {num_experts: 8}"] {
        check(key, &["use `model.config.num_experts`"]);
    }
    for flag in ["aux_loss_coeff", "z_loss_coeff", "router_dtype", "token_dispatcher_type", "token_drop_policy"] {
        check(&format!("moe_{flag}: 1"), &[&format!("use `moe.{flag}`")]);
        check(&format!("moe: {{moe_{flag}: 1}}"), &[&format!("use `moe.{flag}`")]);
    }
}

#[test]
fn the_keys_are_listed_on_request() {
    let error = load("modle: 1\n", &[]).unwrap_err();
    assert!(!error.to_string().contains("top-level keys"));
    let detailed = error.detailed().to_string();
    assert!(detailed.contains("top-level keys: type, ") && detailed.contains("output_dir"), "{detailed}");
}

#[test]
fn an_argument_without_a_value_or_given_twice_is_refused() {
    let text = "optimizer: {lr: 1}\n";
    check_with(
        text,
        &["optimizer.lr="],
        &["optimizer.lr: expected a value, found nothing", "`optimizer.lr=null` removes"],
    );
    check_with(text, &["seed=1", "seed=2"], &["argument `seed=2`", "set twice, first in `seed=1`"]);
    for pair in [
        ["optimizer.lr=1", "optimizer.learning_rate=2"],
        ["scheduler.num_warmup_steps=1", "scheduler.warmup_steps=2"],
        ["checkpoint.output_dir=a", "checkpoint.0.output_dir=b"],
    ] {
        check_with(text, &pair, &[pair[1], "set twice, first in", pair[0]]);
    }
    check_with(
        text,
        &["optimizer.lr=1", "optimizer={eps: 1}"],
        &["replaces the map in which `optimizer.lr=1` sets", "write this argument first"],
    );
    load(text, &["optimizer={eps: 1}", "optimizer.lr=1"]).unwrap();
}

#[test]
fn null_removes_a_key() {
    let text = "optimizer: {lr: 1, eps: 2}\ntokenizer: {name_or_path: t}\nmodel: {config: {pad_token_id: 0}}\n";
    let loaded =
        load(text, &["optimizer.learning_rate=null", "tokenizer=null", "epochs=null", "scheduler=null"]).unwrap();
    assert_eq!((loaded.recipe.optimizer.learning_rate, loaded.recipe.tokenizer.name_or_path.as_deref()), (None, None));
    assert!(loaded.recipe.optimizer.eps.is_some() && !loaded.is_set("tokenizer"));
    // In a model's config null is a value.
    let loaded = load(text, &["model.config.pad_token_id=null"]).unwrap();
    let Some(trainer::recipe::ConfigSource::Inline(config)) = loaded.recipe.model.config else { panic!("a map") };
    assert!(config["pad_token_id"].is_null() && config.contains_key("pad_token_id"));
    check_with(text, &["optimzer=null"], &["unknown key `optimzer`", "`optimizer`"]);
}

#[test]
fn a_duplicate_key_names_its_second_place() {
    check("epochs: 1\nseed: 2\nepochs: 3\n", &["r.yaml:3:1: duplicate key `epochs`", "\n 3 | epochs: 3"]);
    check("data:\n  seed: 1\n  seed: 1\n", &["r.yaml:3:3: duplicate key `seed`"]);
    check("optimizer:\n  lr: 1\n  learning_rate: 2\n", &["r.yaml:3:3: optimizer.learning_rate: given twice"]);
}

#[test]
fn a_wrong_type_names_the_expected_and_the_found_one() {
    check("seed: two\n", &["r.yaml:1:7: seed: expected a whole number", "found the text \"two\""]);
    check("seed: 1.5\n", &["expected a whole number", "found the number 1.5"]);
    check("seed: -1\n", &["seed: expected a whole number of at least 0", "found the integer -1"]);
    check("epochs: [1]\n", &["found a list"]);
    check("epochs: .inf\n", &["found the text \".inf\""]);
    check("optimizer:\n  lr: fast\n", &["r.yaml:2:7: optimizer.lr: expected a number", "found the text \"fast\""]);
    check("optimizer: {betas: [0.9]}", &["optimizer.betas: expected a list of 2, found a list of 1"]);
    check("optimizer: {betas: [0.9, 0.99, 0.999]}", &["optimizer.betas: expected a list of 2, found a list of 3"]);
    check("optimizer: {betas: 0.9}", &["optimizer.betas: expected a list of 2, found the number 0.9"]);
    check("model: llama\n", &["r.yaml:1:8: model: expected a map, found the text \"llama\""]);
    check("tokenizer:\nepochs: 1\n", &["tokenizer: expected a map, found nothing (null)"]);
    check("model: {name_or_path: 7}", &["model.name_or_path: expected text, found the integer 7", "put it in quotes"]);
    check("overfit_first_batch: 2\n", &["overfit_first_batch: expected true or false, found the integer 2"]);
    check("data: {sources: 3}", &["data.sources: expected a list of sources, or one source", "found the integer"]);
    check("data: {sources: [[a]]}", &["data.sources.0: expected text (a name", "found a list"]);
    check("checkpoint: here\n", &["checkpoint: expected a list of maps, one map, or none"]);
    check("model: {config: 3}", &["model.config: expected a map (the config itself) or the path"]);
    check("- a\n", &["r.yaml:1:1: expected a map, found a list"]);
    check("just text\n", &["expected a map, found the text \"just text\""]);
}

#[test]
fn an_unknown_name_lists_the_known_ones() {
    check(
        "model: {dtype: bf61}",
        &["r.yaml:1:16: model.dtype: unknown value \"bf61\"", "did you mean `bf16`?", "values: bf16,"],
    );
    check(
        "data: {truncation: cut}",
        &["data.truncation: unknown value \"cut\"", "values: error, truncate, drop, split"],
    );
    check("scheduler: {name: cosin}", &["did you mean `cosine`?"]);
    check("model: {activation_checkpoint: ful}", &["did you mean `full`?"]);
    check("model: {attn_implementation: cudn}", &["did you mean `cudnn`?", "values: auto,"]);
    check("logger: {level: LOUD}", &["values: DEBUG"]);
    check("on_nonfinite: ignore", &["on_nonfinite: unknown value", "values: stop, skip"]);
}

#[test]
fn an_unsupported_type_is_named_before_its_unknown_keys() {
    check(
        "hidden_loss_layer: -2\ntype: swiftkv\n",
        &["r.yaml:2:7: type: unknown value \"swiftkv\"", "Python code", "values: sft, causal"],
    );
    check("type: sftt\n", &["did you mean `sft`?"]);
}

#[test]
fn a_yaml_syntax_error_names_its_place() {
    check("a: [1\n", &["r.yaml:1:4: unclosed bracket"]);
    check("epochs: 1\n seed: 2\n", &["r.yaml:2:6: mapping values are not allowed"]);
    check("epochs: 1\n---\nepochs: 2\n", &["r.yaml:3:1: a second YAML document starts"]);
    check("model: *nobody\n", &["r.yaml:1:8: alias references unknown anchor"]);
    check("model: \"x\\q\"\n", &["r.yaml:1:8: ", "escape"]);
}

#[test]
fn an_unreadable_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let message = |path: &Path| Loaded::read(path, &[]).unwrap_err().to_string();
    assert!(message(&dir.join("no.yaml")).contains("no.yaml: cannot read the recipe"));
    assert!(message(dir).contains("cannot read the recipe"));
    let latin1 = dir.join("latin1.yaml");
    std::fs::write(&latin1, b"epochs: 1\nmodel: {name_or_path: caf\xe9}\n").unwrap();
    assert!(message(&latin1).contains("not UTF-8: line 2"));
}

#[test]
fn an_argument_obeys_the_rules_of_the_recipe() {
    let recipe = "data: {sources: [a]}";
    check_with(
        recipe,
        &["model.dtpye=f32"],
        &["argument `model.dtpye=f32`: unknown key `model.dtpye`", "did you mean `dtype`?"],
    );
    check_with(recipe, &["epochs=1", "seed=two"], &["argument `seed=two`: seed: expected a whole number"]);
    check_with(recipe, &["epochs"], &["argument `epochs`: expected `key=value`"]);
    check_with(recipe, &["model..x=1"], &["the key has an empty part"]);
    check_with(recipe, &["=1"], &["the key has an empty part"]);
    check_with(recipe, &["data.sources.x=1"], &["`data.sources` is a list: expected an index, found `x`"]);
    check_with(recipe, &["data.sources.3=b"], &["`data.sources` has 1 items: use an index from 0 to 1"]);
    check_with("seed: 3", &["seed.x=1"], &["`seed` has no keys: it is the integer 3"]);
    check_with(recipe, &["data={a"], &["argument `data={a`: the value is not YAML"]);
    check_with(recipe, &["model={dtype: f32, dtype: f32}"], &["the value is not YAML: duplicate key `dtype`"]);
    check_with(recipe, &["data.sources.0.splt=x"], &["unknown key `data.sources.0.splt`"]);
}
