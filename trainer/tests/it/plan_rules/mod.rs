//! Rules of `Plan::resolve`: refused recipes and derived values.

mod arctic;
mod compute;
mod data;
mod moe;
mod moe_keys;
mod optimizer_groups;
pub(super) mod other_toolkits;
mod precision;
mod ranks;
mod tracking;

use std::path::Path;

use candlewick_model::Config;
use serde_json::json;
use trainer::checkpoint::{CheckpointFormat, Moment};
use trainer::metrics::Console;
use trainer::plan::{Plan, WeightInit};
use trainer::plan_report::SettingsFilter;
use trainer::recipe::{FloatDtype, Loaded, RecipeError};
use trainer::resolve::{BuildFeatures, Environment, TempDir, TrackingEnv, WorldInfo};
use trainer::schedule::{Floor, PhaseLength, Shape};
use trainer::step_fraction::RunLength;

/// Returns an environment with a small Llama.
pub(crate) fn known() -> Environment {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "initializer_range": 0.02
    });
    let temp_dir = TempDir { path: "/var/tmp".into(), is_memory: false };
    let config = Some(Config::from_json(config).unwrap());
    Environment {
        config,
        n_cores: 4,
        world: WorldInfo::ALONE,
        features: BuildFeatures { mpi: false, nccl: false },
        temp_dir,
        has_train_py: false,
        tasks_generate: false,
        console: Console::Full,
        capacity: None,
        missing_gpu: None,
        tracking: TrackingEnv::default(),
        lock: None,
    }
}

const BASE: &str = "model: {name_or_path: org/model}\ndata: {sources: [a.jsonl]}\n";

fn resolve(text: &str, arguments: &[&str]) -> Result<Plan, RecipeError> {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), text.to_owned(), &arguments)?;
    Plan::resolve(&loaded, &known())
}

#[track_caller]
fn plan(arguments: &[&str]) -> Plan {
    resolve(BASE, arguments).unwrap_or_else(|e| panic!("{e}"))
}

/// Checks that the base recipe with these arguments is refused with a message that contains these strings.
#[track_caller]
fn refused(arguments: &[&str], want: &[&str]) {
    let message = match resolve(BASE, arguments) {
        Ok(_) => panic!("{arguments:?} is accepted"),
        Err(error) => error.to_string(),
    };
    for part in want {
        assert!(message.contains(part), "no {part:?} in:\n{message}");
    }
}

#[test]
fn no_entry_uses_the_folder_of_the_stop_checkpoint() {
    for folder in ["runs/r/stop_checkpoint", "runs/r/../r/stop_checkpoint/"] {
        let entry = format!("checkpoint={{type: sharded, auto_resume: true, output_dir: {folder}}}");
        refused(&[&entry], &["is for the checkpoint of a stopped run", "give the entry another output_dir"]);
        refused(&[&entry.replace("sharded, auto_resume: true", "huggingface")], &["of a stopped run"]);
    }
}

#[test]
fn unsupported_keys_are_refused_by_name() {
    for argument in [
        "beta=0.1",
        "ref_model={name_or_path: x}",
        "data.max_prompt_length=4K",
        "data.sources.0.kwargs={streaming: true}",
        "deepspeed.zero_optimization.offload_optimizer.device=nvme",
        "deepspeed.zero_optimization.offload_param.device=nvme",
        "deepspeed.zero_optimization.zero_hpz_partition_size=8",
    ] {
        let key = argument.split('=').next().unwrap();
        refused(&[argument], &[&format!("argument `{argument}`:"), key, "` is not supported"]);
    }
    for argument in
        ["type=grpo", "type=dpo", "data.type=kto", "use_dora=true", "optimizer.type=adamw_8bit", "qlora=true"]
    {
        refused(&[argument], &["not supported; use "]);
    }
    refused(&["optimizer.type=muon"], &["unknown value \"muon\"", "values: "]);
    refused(&["group_by_length=true"], &["remove the key: rows are not padded"]);
    refused(&["deepspeed.train_batch_size=8"], &["unknown key", "`gradient_accumulation_steps`"]);
    refused(&["deepspeed.zero_stage=2"], &["unknown key", "`deepspeed.zero_optimization.stage`"]);
    refused(&["code=mine.py"], &["code: Python code (mine.py) is not supported"]);
}

#[test]
fn all_refused_keys_are_listed_with_their_lines() {
    let error = resolve("label_smoothing: 0\nmodel: {name_or_path: a}\nbeta: 1\n", &[]).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("recipes/r.yaml:1:1: `label_smoothing: 0` is not supported"), "{message}");
    assert!(message.contains("recipes/r.yaml:3:1: `beta: 1` is not supported"), "{message}");
    assert!(message.contains("data.sources: no training data are set"), "{message}");
    assert_eq!(error.faults().len(), 3);
}

#[test]
fn default_values_of_unimplemented_keys_are_accepted() {
    plan(&[
        "sequence_parallel_size=1",
        "context_parallel_size=1",
        "expert_parallel_size=1",
        "arctic_moe=auto",
        "enable_routing_replay=false",
        "mem_profiler=null",
        "wandb={enable: false, project: p, name: n}",
        "data.sources.0.kwargs={verification_mode: no_checks}",
        "data.sources.0.process=true",
        "deepspeed={zero_optimization: {stage: 3, reduce_bucket_size: 5e8, offload_param: {device: none}}, steps_per_print: 10}",
        "deepspeed.wall_clock_breakdown=false",
        "deepspeed.bf16.enabled=true",
        "model.attn_implementation=flash_attention_2",
        "model.type=liger",
        "code=train.py",
    ]);
}

#[test]
fn deepspeed_may_not_contradict_the_recipe() {
    refused(&["deepspeed.zero_optimization.stage=4"], &["expected 0, 1, 2 or 3, found 4"]);
    refused(&["deepspeed.bf16.enabled=true", "model.dtype=f32"], &["contradicts model.dtype"]);
    refused(&["deepspeed.gradient_clipping=2", "gradient_clipping=1"], &["keep one of them"]);
    assert_eq!(plan(&["deepspeed.gradient_clipping=0.5"]).optimizer.gradient_clipping, Some(0.5));
    assert_eq!(plan(&["gradient_clipping=0"]).optimizer.gradient_clipping, None);
    assert_eq!(plan(&[]).optimizer.gradient_clipping, Some(1.0));
}

#[test]
fn evaluation_data_are_used_after_each_epoch_unless_there_is_an_interval() {
    notes(&["eval_interval=10"], &["eval_interval has no effect without evaluation data"]);
    assert_eq!(plan(&["eval_interval=10"]).eval, None);
    refused(&["eval_on_start=true"], &["eval_on_start: no evaluation data are set"]);
    for arguments in [&["data.eval_sources=[b.jsonl]"][..], &["data.train_eval_split=[0.9, 0.1]", "eval_interval=0"]] {
        let eval = plan(arguments).eval.unwrap();
        let due = |step, finished_epoch| eval.is_due(Moment { step, finished_epoch, end_of_training: step == 9 });
        assert!(due(4, Some(1)) && due(9, None) && !due(5, None) && !due(0, None), "{arguments:?}");
    }
    let plan = plan(&["data.train_eval_split=[90%, 10%]", "eval_interval=10"]);
    assert_eq!(plan.eval.unwrap().interval, Some(10));
    assert!((plan.data.eval_fraction - 0.1).abs() < 1e-12);
}

/// Checks that the base recipe with these arguments is accepted with notes that contain these strings.
#[track_caller]
fn notes(arguments: &[&str], want: &[&str]) {
    let notes = plan(arguments).notes.join("\n");
    for part in want {
        assert!(notes.contains(part), "no {part:?} in:\n{notes}");
    }
}

#[test]
fn tasks_have_the_interval_of_evaluation() {
    let tasks = "eval={tasks: [arc_easy], limit: 10}";
    assert_eq!(plan(&[tasks]).tasks.unwrap().when.interval, None);
    refused(&["eval={limit: 10}"], &["eval: no tasks are set"]);
    refused(&["eval={tasks: [arc_easy], evry: 10}"], &["evry"]);
    refused(&[tasks, "eval.interval=5", "eval.fewshot_as_multiturn=true"], &["needs prompts that are chats"]);
    let plan = plan(&[tasks, "eval_interval=10", "eval_on_start=true"]);
    assert!(plan.eval.is_none(), "there are no held-out data");
    let tasks_plan = plan.tasks.unwrap();
    assert_eq!((tasks_plan.when.interval, tasks_plan.when.on_start, tasks_plan.limit), (Some(10), true, Some(10.0)));
    assert_eq!((tasks_plan.fewshot_seed, tasks_plan.max_gen_toks, tasks_plan.bootstrap_iters), (1234, 256, 100_000));
}

#[test]
fn intervals_below_one_and_per_epoch_become_steps() {
    let run = RunLength { total_steps: 30, epoch_steps: 10 };
    let counted = |arguments: &[&str]| {
        let held_out = "data.train_eval_split=[90%, 10%]";
        let tasks = "eval={tasks: [arc_easy]}";
        let plan = plan(&[&[held_out, tasks, "checkpoint=[{output_dir: a}]"], arguments].concat());
        assert_eq!(plan.has_fractions(), arguments.iter().any(|it| it.contains("per_epoch") || it.contains("=0.")));
        let counted = plan.with_counted_steps(run);
        assert!(!counted.has_fractions());
        [
            counted.eval.unwrap().interval,
            counted.tasks.unwrap().when.interval,
            Some(counted.checkpoints[0].save_every_n_steps),
        ]
    };
    assert_eq!(counted(&[]), [None, None, Some(0)]);
    assert_eq!(counted(&["eval_interval=7"]), [Some(7), Some(7), Some(0)]);
    assert_eq!(counted(&["eval_interval=0.25"]), [Some(8), Some(8), Some(0)]);
    assert_eq!(counted(&["eval_interval=0.25", "eval.interval=5"]), [Some(8), Some(5), Some(0)]);
    assert_eq!(counted(&["evals_per_epoch=4"]), [Some(3), Some(3), Some(0)]);
    assert_eq!(counted(&["eval_interval=1.005K"]), [Some(1005), Some(1005), Some(0)]);
    assert_eq!(counted(&["checkpoint.0.save_every_n_steps=0.5"]), [None, None, Some(15)]);
    assert_eq!(counted(&["checkpoint.0.saves_per_epoch=2"]), [None, None, Some(5)]);
    refused(
        &["eval_interval=1.5"],
        &["eval_interval: expected a whole number of steps, or a fraction of the run below 1"],
    );
    refused(&["eval_interval=5", "evals_per_epoch=2"], &["evals_per_epoch excludes eval_interval"]);
    let both = "checkpoint=[{output_dir: a, saves_per_epoch: 2, save_every_n_epochs: 1}]";
    refused(&[both], &["checkpoint.0.saves_per_epoch excludes"]);
    refused(&["data.streaming=true", "train_iters=9", "evals_per_epoch=2"], &["evals_per_epoch: not possible"]);
}

#[test]
fn once_per_epoch_is_each_epoch() {
    let tasks = ["data.train_eval_split=[0.9, 0.1]", "eval={tasks: [arc_easy]}"];
    let plan = plan(&[&tasks[..], &["evals_per_epoch=1", "checkpoint=[{output_dir: a, saves_per_epoch: 1}]"]].concat());
    assert!(!plan.has_fractions());
    assert_eq!((plan.eval.unwrap().interval, plan.tasks.unwrap().when.interval), (None, None));
    assert_eq!((plan.checkpoints[0].save_every_n_steps, plan.checkpoints[0].save_every_n_epochs), (0, 1));
}

#[test]
fn evaluations_per_epoch_are_recorded_and_reported_by_their_key() {
    notes(&["evals_per_epoch=2"], &["evals_per_epoch has no effect without evaluation data"]);
    let settings = plan(&["data.train_eval_split=[0.9, 0.1]", "evals_per_epoch=2"]).settings;
    assert!(settings.iter().any(|setting| setting.key == "evals_per_epoch"));
    assert!(!settings.iter().any(|setting| setting.key == "eval_interval"));
    for arguments in [&["eval_interval=5", "evals_per_epoch=2"][..], &["eval_interval=1.5"]] {
        let error = resolve(BASE, &[&["eval={tasks: [arc_easy]}"], arguments].concat()).unwrap_err().to_string();
        assert_eq!(error.matches("eval_interval").count(), if arguments.len() == 2 { 1 } else { 2 }, "{error}");
    }
}

#[test]
fn a_percentage_of_the_run_is_below_100() {
    for key in ["eval_interval=100%", "checkpoint=[{output_dir: a, save_every_n_steps: 150%}]"] {
        refused(&[key], &["a fraction of the run below 1"]);
    }
    assert!(plan(&["data.train_eval_split=[0.9, 0.1]", "eval_interval=50%"]).eval.unwrap().fraction.is_some());
}

#[test]
fn the_metric_of_the_best_checkpoint_must_be_measured() {
    let [tasks, held_out] = ["eval={tasks: [arc_easy]}", "data.train_eval_split=[90%, 10%]"];
    let best = |arguments: &[&str]| {
        let best = plan(&[&["eval_interval=10"], arguments].concat()).best?;
        Some((best.metric, best.greater_is_better))
    };
    assert_eq!(best(&[held_out]), None);
    assert_eq!(best(&[tasks]), Some((None, None)));
    for name in ["loss", "eval_loss", "loss/eval", "eval/loss"] {
        let metric = format!("metric_for_best_model={name}");
        assert_eq!(best(&[held_out, tasks, &metric]), Some((Some("loss/eval".to_owned()), Some(false))), "{name}");
    }
    for name in ["arc_easy/acc", "eval/arc_easy/acc"] {
        let metric = format!("metric_for_best_model={name}");
        let found = best(&[held_out, tasks, &metric, "greater_is_better=true"]);
        assert_eq!(found, Some((Some("arc_easy/acc".to_owned()), Some(true))));
        refused(&[held_out, "eval_interval=10", &metric], &["this run does not measure `arc_easy/acc`"]);
    }
    refused(&[tasks, "eval_interval=10", "metric_for_best_model=acc"], &["does not measure `acc`", "TASK/METRIC"]);
    refused(&[tasks, "eval_interval=10", "metric_for_best_model=loss"], &["no evaluation data are set"]);
    refused(&["greater_is_better=true"], &["greater_is_better needs metric_for_best_model"]);
}

#[test]
fn without_a_checkpoint_the_model_is_exported_at_the_end() {
    let found = plan(&[]);
    assert_eq!(found.checkpoints.len(), 1);
    let checkpoint = &found.checkpoints[0];
    assert_eq!(
        (checkpoint.format, checkpoint.output_dir.as_path()),
        (CheckpointFormat::HuggingFace, Path::new("runs/r/model"))
    );
    assert!(checkpoint.save_end_of_training && checkpoint.save_every_n_steps == 0);
    notes(&[], &["the model will be saved in runs/r/model at the end"]);
    assert_eq!(plan(&["output_dir=out"]).checkpoints[0].output_dir, Path::new("out/model"));
    assert_eq!(plan(&["checkpoint=null"]).checkpoints, found.checkpoints);
    for nothing in ["checkpoint=none", "checkpoint=[]", "output_dir=/dev/null"] {
        assert_eq!(plan(&[nothing]).checkpoints, []);
        notes(&[nothing], &["nothing will be saved"]);
    }
    notes(&["checkpoint={output_dir: a, enabled: false}"], &["nothing will be saved"]);
}

#[test]
fn an_export_has_a_dtype_of_its_own() {
    let export = "checkpoint={type: huggingface, output_dir: a, save_end_of_training: true, dtype: bfloat16}";
    assert_eq!(plan(&[export]).checkpoints[0].dtype, Some(FloatDtype::Bf16));
    refused(&["checkpoint={output_dir: a, dtype: bf16}"], &["checkpoint.dtype: a sharded checkpoint has"]);
}

#[test]
fn the_stop_file_is_in_the_runs_folder() {
    assert_eq!(plan(&[]).exit.kill_switch_path.as_deref(), Some(Path::new("runs/r/stop")));
    assert_eq!(plan(&["kill_switch_path=x"]).exit.kill_switch_path.as_deref(), Some(Path::new("x")));
    assert_eq!(plan(&["output_dir=/dev/null"]).exit.kill_switch_path, None);
}

/// Neither an export nor `save_total_limit` may replace the model that the run loads.
#[test]
fn the_model_in_use_is_not_among_the_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("hf/global_step_10");
    std::fs::create_dir_all(&model).unwrap();
    let [model, root] = [model.display().to_string(), folder.path().display().to_string()];
    let checkpoint =
        |dir: &str| format!("checkpoint={{type: huggingface, output_dir: {dir}, save_end_of_training: true}}");
    let hf = checkpoint(&format!("{root}/other/../hf"));
    for key in ["model.name_or_path", "model.adapter_name_or_path", "tokenizer.name_or_path"] {
        refused(&[&hf, &format!("{key}={model}")], &["this run's checkpoints could replace", key]);
    }
    refused(&[&hf, &format!("model.name_or_path={root}/hf/./global_step_10/")], &["could replace"]);
    std::os::unix::fs::symlink(format!("{root}/hf"), format!("{root}/link")).unwrap();
    refused(&[&checkpoint(&format!("{root}/link")), &format!("model.name_or_path={model}")], &["could replace"]);
    // A folder of links into a checkpoint is in use with it.
    std::fs::write(format!("{model}/config.json"), "{}").unwrap();
    std::fs::create_dir(format!("{root}/linked")).unwrap();
    std::os::unix::fs::symlink(format!("{model}/config.json"), format!("{root}/linked/config.json")).unwrap();
    refused(&[&hf, &format!("tokenizer.name_or_path={root}/linked")], &["could replace", "tokenizer.name_or_path"]);
    plan(&[&checkpoint(&format!("{root}/elsewhere")), &format!("model.name_or_path={model}")]);
    let two = format!("checkpoint=[{{output_dir: {root}/hf}}, {{output_dir: {root}/link}}]");
    refused(&[&two], &["another checkpoint of the same type uses this folder"]);
}

#[test]
fn the_default_rate_and_decay_suit_the_initial_weights() {
    const ARCTIC: &str = "model: {name_or_path: org/model}\ndata: {sources: [a.jsonl], use_data_cache: true}\n";
    const LORA: &str = "model.peft_config={r: 8}";
    let check = |text, arguments: &[&str], want: (f64, f64)| {
        let plan = resolve(text, arguments).unwrap();
        assert_eq!((plan.optimizer.learning_rate, plan.optimizer.weight_decay), want, "{arguments:?}");
        plan.notes.iter().any(|note| note.contains("learning_rate"))
    };
    assert!(!check(BASE, &[], (2e-5, 0.0)));
    assert!(!check(BASE, &[LORA], (2e-4, 0.0)));
    assert!(!check(BASE, &["model.type=random-weight-hf"], (5e-4, 0.1)));
    assert!(!check(BASE, &["optimizer.lr=1e-3", "optimizer.weight_decay=0.2"], (1e-3, 0.2)));
    // ArcticTraining's defaults, with a note.
    assert!(check(ARCTIC, &[], (5e-4, 0.1)));
    assert!(check(ARCTIC, &[LORA], (5e-4, 0.1)));
    assert!(!check(ARCTIC, &["model.type=random-weight-hf"], (5e-4, 0.1)));
    assert!(!check(ARCTIC, &["optimizer.lr=5e-4"], (5e-4, 0.1)));
}

#[test]
fn keys_without_effect_are_noted() {
    notes(&["device=cuda"], &["device: cuda:0, but this program was built without CUDA"]);
    notes(&["optimizer.type=cpu_adam"], &["the states of AdamW are on the device of the weights"]);
    notes(&["data.filter_samples=false"], &["data.filter_samples: false has no effect"]);
    notes(&["train_iters=0"], &["train_iters: 0 has no effect"]);
    let fixed = "deepspeed.fp16={enabled: true, loss_scale: 8, hysteresis: 3}";
    notes(&["model.dtype=fp16", fixed], &["deepspeed.fp16.hysteresis has no effect"]);
}

#[test]
fn a_plan_lists_parameters_batch_and_steps() {
    let facts = plan(&["micro_batch_size=2", "gradient_accumulation_steps=4", "train_iters=1500"]).facts();
    let facts: Vec<String> = facts.iter().map(|(name, fact)| format!("{name}: {fact}")).collect();
    assert_eq!(
        facts,
        [
            "parameters: 90,432, trained: all",
            "global batch: 8 rows a step, at most 16,384 tokens (micro_batch_size 2 x gradient_accumulation_steps 4 x data \
             ranks 1)",
            "steps: 1,500",
        ]
    );
    let facts = plan(&["model.peft_config={r: 1, target_modules: [q_proj]}", "epochs=2"]).facts();
    assert_eq!(facts[0].1, "90,688, trained: 256 (0.28%)");
    assert!(facts[2].1.starts_with("2 epochs; `trainer preprocess RECIPE`"), "{}", facts[2].1);
}

#[test]
fn the_short_table_leaves_out_the_defaults() {
    let text = plan(&["optimizer.lr=1e-4"]).table(SettingsFilter::Set);
    assert!(text.contains("optimizer.learning_rate") && text.contains("--all shows them"), "{text}");
    assert!(!text.contains("gradient_clipping  ") && text.contains("global batch: 1 row a step"), "{text}");
    assert!(plan(&[]).table(SettingsFilter::All).contains("gradient_clipping"));
}

#[test]
fn at_most_one_sharded_checkpoint_may_resume() {
    let two = "checkpoint=[{output_dir: a, auto_resume: true}, {type: deepspeed, output_dir: b, auto_resume: true}]";
    refused(&[two], &["checkpoint.1.auto_resume: checkpoint.0 resumes already"]);
    refused(
        &["checkpoint={type: huggingface, output_dir: a, auto_resume: true}"],
        &["checkpoint.auto_resume: a huggingface checkpoint has only the weights"],
    );
    refused(
        &["checkpoint=[{output_dir: a}, {output_dir: a}]"],
        &["another checkpoint of the same type uses this folder"],
    );
    refused(
        &["checkpoint={output_dir: a, save_total_limit: 0}"],
        &["checkpoint.save_total_limit: expected at least 1"],
    );
    let plan = plan(&[
        "checkpoint=[{type: huggingface, output_dir: a, enabled: false}, {output_dir: b, save_every_n_steps: 1K}]",
    ]);
    assert_eq!(plan.checkpoints.len(), 1);
    assert_eq!(plan.checkpoints[0].save_every_n_steps, 1000);
}

#[test]
fn without_the_config_the_plan_notes_the_unknown_values() {
    let loaded = Loaded::parse(Path::new("r.yaml"), BASE.to_owned(), &[]).unwrap();
    let plan = Plan::resolve(&loaded, &Environment { config: None, ..known() }).unwrap();
    assert!(plan.notes.iter().any(|note| note.starts_with("data.max_length will be")), "{:?}", plan.notes);
}

#[test]
fn a_model_has_one_source() {
    refused(&["model={}"], &["model: no model is set"]);
    refused(&["model.config={model_type: llama}"], &["exclude each other"]);
    refused(
        &["model={config: {}, revision: x}", "tokenizer.name_or_path=t"],
        &["model.revision needs model.name_or_path"],
    );
    refused(&["model={config: {}}"], &["tokenizer.name_or_path is missing"]);
    assert_eq!(plan(&[]).model.init, WeightInit::Load);
    assert_eq!(plan(&["model={config: {}}", "tokenizer.name_or_path=t"]).model.init, WeightInit::Random);
    assert_eq!(plan(&["model.type=random-weight-hf"]).model.init, WeightInit::Random);
    assert_eq!(plan(&["model.hf_config_kwargs={num_hidden_layers: 1}"]).model.init, WeightInit::Random);
    assert_eq!(plan(&["model.hf_config_kwargs={num_hidden_layers: 2}"]).model.init, WeightInit::Load);
    assert_eq!(plan(&["model.dtype=float"]).model.dtype, FloatDtype::F32);
}

#[test]
fn an_adapter_is_checked_at_its_key() {
    assert!(plan(&["model.peft_config={peft_type: LORA, r: 8, target_modules: all-linear}"]).model.adapter.is_some());
    refused(
        &["model.peft_config={peft_type: LORA, r: 0}"],
        &["argument `model.peft_config=", "model.peft_config:", "`r`"],
    );
    refused(
        &["model.peft_config={target_modules: [q_proj], rank_pattern: {k_proj: 4}}"],
        &["model.peft_config:", "rank_pattern", "`k_proj` matches only modules without an adapter"],
    );
}

#[test]
fn optimizer_settings_have_bounds() {
    refused(&["optimizer.lr=0"], &["optimizer.learning_rate: expected above 0"]);
    refused(&["optimizer.betas=[0.9, 1]"], &["below 1, found [0.9, 1]"]);
    refused(&["optimizer.eps=0"], &["optimizer.eps: expected above 0"]);
    refused(&["optimizer.weight_decay=-1"], &["optimizer.weight_decay: expected at least 0, found -1"]);
    refused(&["gradient_clipping=-1"], &["gradient_clipping: expected at least 0"]);
    for factor in ["-0.1", "1"] {
        let want = format!("label_smoothing_factor: expected at least 0 and below 1, found {factor}");
        refused(&[&format!("label_smoothing_factor={factor}")], &[&want]);
    }
    assert_eq!(plan(&["label_smoothing_factor=10%"]).label_smoothing_factor, 0.1);
    assert_eq!(plan(&[]).label_smoothing_factor, 0.0);
    for name in ["fused_adam", "adamw", "adam", "cpu_adam"] {
        plan(&[&format!("optimizer.type={name}")]);
    }
    let optimizer = plan(&[]).optimizer;
    assert_eq!((optimizer.learning_rate, optimizer.weight_decay), (2e-5, 0.0));
    assert_eq!(optimizer.kind.0.settings(), [("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8)]);
}

#[test]
fn schedules_have_the_names_and_numbers_of_transformers() {
    let shape = |arguments: &[&str]| plan(arguments).schedule.shape;
    assert_eq!(shape(&[]), Shape::Linear);
    assert_eq!(plan(&[]).schedule.warmup, PhaseLength::Ratio(0.1));
    assert_eq!(plan(&["scheduler.warmup_steps=10"]).schedule.warmup, PhaseLength::Steps(10));
    assert_eq!(shape(&["scheduler.name=cosine"]), Shape::Cosine { num_cycles: 0.5 });
    assert_eq!(
        shape(&["scheduler.name=cosine_with_min_lr", "scheduler.scheduler_specific_kwargs.min_lr_rate=10%"]),
        Shape::CosineWithMinLr { num_cycles: 0.5, floor: Floor::MinLrRate(0.1) }
    );
    let wsd = shape(&["scheduler={type: wds, num_warmup_steps: 5, num_decay_steps: 20, min_lr_ratio: 0.1}"]);
    assert!(
        matches!(wsd, Shape::WarmupStableDecay { decay: PhaseLength::Steps(20), min_lr_ratio: 0.1, .. }),
        "{wsd:?}"
    );
    assert_eq!(shape(&["scheduler={name: constant, warmup_ratio: 0}"]), Shape::Constant);

    refused(&["scheduler={name: constant, warmup_steps: 5}"], &["constant has no warm-up", "constant_with_warmup"]);
    refused(&["scheduler={warmup_ratio: 0.1, warmup_steps: 5}"], &["exclude each other"]);
    refused(&["scheduler.warmup_ratio=2"], &["scheduler.warmup_ratio: expected 0 to 1, found 2"]);
    refused(&["scheduler.lr=1"], &["scheduler.learning_rate has moved"]);
    refused(&["scheduler.name=cosine_with_min_lr"], &["set one of scheduler_specific_kwargs.min_lr"]);
    refused(&["scheduler.name=wsd"], &["set one of scheduler_specific_kwargs.num_decay_steps"]);
    refused(&["scheduler={type: wsd, name: cosine}"], &["contradicts scheduler.type: wsd"]);
    refused(&["scheduler.scheduler_specific_kwargs.min_lr=1"], &["min_lr is not an argument of this schedule"]);
    refused(&["scheduler.num_decay_steps=3"], &["belongs to the warmup_stable_decay schedule"]);
    refused(
        &["train_iters=10", "scheduler.warmup_steps=11"],
        &["scheduler: failed to fit 11 warm-up steps into a run of 10 steps"],
    );
}

#[test]
fn generation_settings_have_bounds() {
    refused(&["generate={prompts: ['']}"], &["generate.prompts: expected a list of non-empty texts"]);
    assert_eq!(plan(&["generate={prompts: []}"]).generate, None);
    refused(&["generate={prompts: [a], top_p: 0}"], &["generate.top_p: expected above 0"]);
    refused(&["generate={prompts: [a], temperature: -1}"], &["generate.temperature: expected at least 0"]);
    let generate = plan(&["generate={prompts: [a]}", "seed=7"]).generate.unwrap();
    assert_eq!((generate.max_new_tokens, generate.temperatures, generate.seed), (64, vec![0.0], 7));
}

#[test]
fn the_runs_folder_is_named_after_the_recipe() {
    let log = plan(&[]).log;
    assert_eq!(log.output_dir.as_deref(), Some(Path::new("runs/r")));
    assert_eq!(log.metrics_path.as_deref(), Some(Path::new("runs/r/metrics.jsonl")));
    let log = plan(&["output_dir=/dev/null", "logger.print_output_ranks=[1]"]).log;
    assert_eq!((log.output_dir, log.metrics_path, log.console), (None, None, Console::Quiet));
    let logger = plan(&["logger={output_dir: out, level: info}"]).logger;
    assert_eq!(logger.file.as_deref(), Some(Path::new("out/logs/rank_0.log")));
    assert_eq!(logger.level.as_deref(), Some("info"));
}

#[test]
fn a_plan_prints_as_a_table() {
    let text = "model: {name_or_path: org/model, dtype: f32}\ndata:\n  sources: [a.jsonl]\n  max_length: 1Ki\n\
optimizer: {lr: 1e-4}\ncheckpoint:\n  - {output_dir: out, save_every_n_steps: 100, auto_resume: true}\n";
    insta::assert_snapshot!(resolve(text, &["epochs=2"]).unwrap().table(SettingsFilter::All));
}

#[test]
fn early_stopping_needs_an_evaluation_and_a_measured_metric() {
    let eval = "data.eval_sources=[b.jsonl]";
    refused(&["early_stopping={patience: 1}"], &["early_stopping: the run has no evaluation"]);
    refused(&[eval, "early_stopping={patience: 0}"], &["early_stopping.patience: expected at least 1"]);
    refused(&[eval, "early_stopping={min_delta: -1}"], &["early_stopping.min_delta: expected at least 0"]);
    refused(&[eval, "early_stopping={metric: arc_easy/acc}"], &["early_stopping.metric: this run does not measure"]);
    refused(&[eval, "early_stopping={monitor: loss}"], &["early_stopping.monitor", "early_stopping.metric"]);
    let stopping = plan(&[eval, "early_stopping={}"]).early_stopping.unwrap();
    assert_eq!((stopping.patience, stopping.min_delta), (3, 0.0));
    let loss = Some("loss/eval".to_owned());
    assert_eq!((stopping.watched.metric, stopping.watched.greater_is_better), (loss.clone(), Some(false)));
    // Its metric selects the best checkpoint, too.
    assert_eq!(plan(&[eval, "early_stopping={mode: max}"]).best.unwrap().greater_is_better, Some(true));
    let tasks = plan(&["eval.tasks=[a]", "metric_for_best_model=a/acc", "early_stopping={}"]);
    assert_eq!(tasks.early_stopping.unwrap().watched.metric.as_deref(), Some("a/acc"));
    let first = plan(&["eval.tasks=[a]", "early_stopping={}"]);
    assert_eq!((first.early_stopping.unwrap().watched.metric, first.best.unwrap().metric), (None, None));
}

#[test]
fn a_loss_watchdog_has_checked_limits() {
    refused(&["loss_watchdog={action: skp}"], &["loss_watchdog.action", "did you mean `skip`?"]);
    refused(&["loss_watchdog={sigma_factor: 0}"], &["loss_watchdog.sigma_factor: expected above 0"]);
    refused(&["loss_watchdog={rolling_interval_length: 1}"], &["rolling_interval_length: expected at least 2"]);
    refused(&["loss_watchdog={action: rewind}"], &["the run saves none to resume from"]);
    let only_weights = "checkpoint=[{type: huggingface, output_dir: a, save_every_n_steps: 5}]";
    refused(&["loss_watchdog={action: rewind}", only_weights], &["add a checkpoint of type sharded"]);
    let saves = "checkpoint=[{output_dir: a, save_every_n_steps: 5}]";
    assert!(plan(&["loss_watchdog={action: rewind}", saves]).loss_watchdog.is_some());
    let watchdog = plan(&["loss_watchdog={rolling_interval_length: 9}"]).loss_watchdog.unwrap();
    assert_eq!((watchdog.warmup_steps, watchdog.max_events, watchdog.max_loss), (5, 10, None));
    assert_eq!(plan(&[]).loss_watchdog, None);
}

#[test]
fn retained_checkpoints_need_a_limit() {
    let entry = |keys: &str| format!("checkpoint={{output_dir: a, save_every_n_steps: 2, {keys}}}");
    refused(&[&entry("save_retain_interval: 4")], &["save_retain_interval needs save_total_limit"]);
    refused(&[&entry("save_total_limit: 1, save_retain_interval: 0")], &["expected at least 1, found 0"]);
    let odd = plan(&[&entry("save_total_limit: 1, save_retain_interval: 3")]);
    assert!(odd.notes.join("\n").contains("3 is not a multiple of save_every_n_steps, 2"), "{:?}", odd.notes);
}

#[test]
fn sample_generations_at_evaluations_need_an_evaluation() {
    refused(&["generate={prompts: [a], on_evaluate: true}"], &["generate.on_evaluate: the run has no evaluation"]);
    refused(&["generate={prompts: [a], temperature: []}"], &["expected a number or a list of numbers"]);
    let both =
        plan(&["generate={prompts: [a], temperature: [0, 0.8], on_evaluate: true}", "data.eval_sources=[b.jsonl]"]);
    assert_eq!(both.generate.unwrap().temperatures, [0.0, 0.8]);
    assert!(both.log.samples_path.unwrap().ends_with("samples.jsonl"));
}
