//! Values of valid recipes.

use std::path::Path;

use proptest::prelude::*;
use trainer::recipe::{
    ActivationCheckpoint, CheckpointType, ConfigSource, FloatDtype, HumanFloat, HumanInt, Loaded, OptimizerType,
    Origin, Prompt, Recipe, SchedulerName, SourceType,
};

#[track_caller]
fn load(text: &str, arguments: &[&str]) -> Loaded {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    Loaded::parse(Path::new("r.yaml"), text.to_owned(), &arguments).unwrap_or_else(|e| panic!("{e}"))
}

#[track_caller]
fn recipe(text: &str) -> Recipe {
    load(text, &[]).recipe
}

#[test]
fn a_full_arctic_training_recipe_parses() {
    let recipe = recipe(
        r#"
type: sft
code: train.py
skip_validation: false
micro_batch_size: 1
gradient_accumulation_steps: 4
epochs: 2
train_iters: 1K
exit_iteration: 30
exit_iteration_this_run: 10
min_iterations: 30
sequence_parallel_size: 1
expert_parallel_size: 1
arctic_moe: auto
enable_arctic_moe_custom_optimization: false
enable_routing_replay: false
activation_checkpoint_cpu_offload: true
tiled_mlp_compute: false
seed: 7
loss_log_interval: 10
train_log_iter_interval: 1
train_log_metrics_path: log.jsonl
eval_interval: 1_00
eval_log_iter_interval: 1
overfit_first_batch: no
mem_profiler: null
mem_profiler_max_entries: 100_000
kill_switch_path: /tmp/stop

deepspeed:
  zero_optimization:
    stage: 3
    reduce_bucket_size: 5e8
  seq_parallel_communication_data_type: bf16
  gradient_clipping: 1.0

optimizer:
  type: cpu_adam
  learning_rate: 0.00001
  betas: [0.9, 0.95]
  weight_decay: 1e-2

scheduler:
  name: cosine
  warmup_ratio: 5%

model:
  type: "liger"
  name_or_path: org/model-8B   # a comment
  attn_implementation: flash_attention_3
  dtype: torch.bfloat16
  disable_activation_checkpoint: false
  hf_config_kwargs:
    num_hidden_layers: 2
  peft_config:
    peft_type: LORA
    r: 8
    target_modules: [q_proj, v_proj]

tokenizer:
  type: huggingface
  name_or_path: org/model-8B

data:
  sources:
    - org/chat:train[:1000]
    - type: huggingface_instruct
      name_or_path: org/other
      split: train_sft
      sample_count: 500_000
      role_mapping:
        user: messages.role.user
        assistant: messages.role.assistant
      kwargs:
        verification_mode: no_checks
  eval_sources: [{name_or_path: org/chat, split: test}]
  cache_dir: data-cache
  num_proc: 16
  dl_num_workers: 1
  pack_samples: true
  max_length: 1_200_000
  pad_to: div_length
  div_length: 64

wandb:
  enable: false
  project: "p"

logger:
  level: WARNING
  output_dir: "logs"
  print_output_ranks: [0,1,2,3]
  file_output_ranks: "*"

checkpoint:
  - type: deepspeed
    save_every_n_epochs: 1
    output_dir: /data/checkpoint
    auto_resume: true
  - type: huggingface
    save_end_of_training: true
    output_dir: ./fine-tuned-model
"#,
    );
    assert_eq!(recipe.train_iters, Some(HumanInt(1000)));
    assert_eq!(recipe.overfit_first_batch, Some(false));
    assert_eq!(recipe.mem_profiler, None);
    assert_eq!(recipe.optimizer.kind, Some(OptimizerType::CpuAdam));
    assert_eq!(recipe.optimizer.learning_rate, Some(HumanFloat(1e-5)));
    assert_eq!(recipe.scheduler.warmup_ratio, Some(HumanFloat(0.05)));
    assert_eq!(recipe.model.dtype, Some(FloatDtype::Bf16));
    assert_eq!(recipe.data.max_length, Some(HumanInt(1_200_000)));
    assert_eq!(recipe.data.sources[0].0.name_or_path.as_deref(), Some("org/chat:train[:1000]"));
    assert_eq!(recipe.data.sources[1].0.kind, Some(SourceType::HuggingfaceInstruct));
    let kinds: Vec<_> = recipe.checkpoint.iter().map(|c| c.kind.unwrap()).collect();
    assert_eq!(kinds, [CheckpointType::Sharded, CheckpointType::Huggingface]);
}

#[test]
fn the_extensions_parse() {
    let recipe = recipe(
        r#"
model:
  config: {model_type: llama, hidden_size: 64, rope_theta: 1e4, tie_word_embeddings: true}
  activation_checkpoint: {every: 2}
tokenizer: {name_or_path: tok, chat_template: a.jinja, chat_template_kwargs: {enable_thinking: false}}
data: {sources: [x.jsonl], truncation: truncate, order: longest_first}
checkpoint: {output_dir: out, save_total_limit: 2}
generate: {prompts: ["1 + 1 = ?"], max_new_tokens: 8, temperature: 0.7, top_p: 90%}
on_nonfinite: skip
gradient_clipping: 0
"#,
    );
    let Some(ConfigSource::Inline(config)) = recipe.model.config else { panic!("a map") };
    assert_eq!(config["rope_theta"], 1e4);
    assert_eq!(recipe.model.activation_checkpoint, Some(ActivationCheckpoint::Every(HumanInt(2))));
    assert_eq!(recipe.generate.unwrap().top_p, Some(HumanFloat(0.9)));
    assert_eq!(recipe.checkpoint[0].save_total_limit, Some(HumanInt(2)));
}

#[test]
fn scientific_notation_without_a_point_is_a_number() {
    assert_eq!(recipe("optimizer: {lr: 2e-5}").optimizer.learning_rate, Some(HumanFloat(2e-5)));
    assert_eq!(recipe("optimizer: {lr: '2e-5'}").optimizer.learning_rate, Some(HumanFloat(2e-5)));
}

#[test]
fn counts_may_have_separators_exponents_and_suffixes() {
    for (text, want) in
        [("1_000", 1000), ("10^3", 1000), ("1e3", 1000), ("1K", 1000), ("1Ki", 1024), ("\"7\"", 7), ("0x10", 16)]
    {
        assert_eq!(recipe(&format!("train_iters: {text}")).train_iters, Some(HumanInt(want)), "{text}");
    }
}

#[test]
fn yaml_1_1_booleans_are_read_only_for_boolean_keys() {
    assert_eq!(recipe("overfit_first_batch: yes").overfit_first_batch, Some(true));
    assert_eq!(recipe("overfit_first_batch: Off").overfit_first_batch, Some(false));
    assert_eq!(recipe("wandb: {name: no}").wandb.name.as_deref(), Some("no"));
}

#[test]
fn an_empty_recipe_is_the_default() {
    assert_eq!(recipe(""), Recipe::default());
    assert_eq!(recipe("# nothing\n"), Recipe::default());
}

#[test]
fn anchors_and_merge_keys_work() {
    let recipe = recipe("data:\n  sources:\n    - &a {name_or_path: x, sample_count: 3}\n    - {<<: *a, split: b}\n");
    assert_eq!(recipe.data.sources[1].0.sample_count, Some(HumanInt(3)));
    assert_eq!(recipe.data.sources[1].0.split.as_deref(), Some("b"));
}

#[test]
fn arguments_can_set_every_key() {
    let text = "optimizer: {lr: 1}\ndata: {sources: [a, {name_or_path: b}]}\ncheckpoint: {output_dir: x}\n";
    let loaded = load(
        text,
        &[
            "optimizer.learning_rate=2e-5",
            "data.sources.0.split=train[:10]",
            "data.sources.2=c",
            "checkpoint.0.output_dir=y",
            "model.config.hidden_size=64",
            "scheduler.scheduler_specific_kwargs.min_lr=1e-6",
            "scheduler.name=cosine_with_min_lr",
            "seed=2",
            "generate.prompts=[hello, \"a: b\"]",
            "tokenizer.name_or_path=a=b",
        ],
    );
    let recipe = &loaded.recipe;
    assert_eq!(recipe.optimizer.learning_rate, Some(HumanFloat(2e-5)));
    assert_eq!(recipe.data.sources[0].0.name_or_path.as_deref(), Some("a"));
    assert_eq!(recipe.data.sources[0].0.split.as_deref(), Some("train[:10]"));
    assert_eq!(recipe.data.sources[2].0.name_or_path.as_deref(), Some("c"));
    assert_eq!(recipe.checkpoint[0].output_dir.as_deref(), Some("y"));
    assert!(matches!(&recipe.model.config, Some(ConfigSource::Inline(map)) if map["hidden_size"] == 64));
    assert_eq!(recipe.scheduler.name, Some(SchedulerName::CosineWithMinLr));
    assert_eq!(recipe.seed, Some(HumanInt(2)));
    assert_eq!(recipe.generate.as_ref().unwrap().prompts, ["hello", "a: b"].map(|text| Prompt::Text(text.into())));
    assert_eq!(recipe.tokenizer.name_or_path.as_deref(), Some("a=b"));
    assert_eq!(loaded.origin(&["optimizer.lr", "optimizer.learning_rate"]), Origin::Argument);
    assert_eq!(loaded.origin(&["data.sources"]), Origin::Line(2));
    assert_eq!(loaded.origin(&["epochs"]), Origin::Default);
}

const RECIPE: &str = "type: sft\nmodel: {name_or_path: a/b, dtype: bf16}\noptimizer:\n  lr: 1e-4\n  betas: [0.9, 0.95]\n\
data:\n  sources:\n    - {name_or_path: x, sample_ratio: 10%}\n  max_length: 4Ki\ncheckpoint:\n  - {output_dir: o}\n";

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in ".{0,200}") {
        let _ = Loaded::parse(Path::new("r"), text, &[]).map_err(|e| e.to_string());
    }

    #[test]
    fn no_bytes_of_yaml_make_the_parser_panic(text in "[-a-z:{}\\[\\]&*!|>'\"%@`#, \n\t0-9._?<^]{0,120}") {
        let _ = Loaded::parse(Path::new("r"), text, &[]).map_err(|e| e.to_string());
    }

    #[test]
    fn no_damage_to_a_recipe_makes_the_parser_panic(at in 0..RECIPE.len(), len in 0usize..12, patch in "[-a-z:{}\\[\\]&* \n0-9.%é\u{1F600}]{0,6}") {
        let end = (at + len).min(RECIPE.len());
        let text = format!("{}{patch}{}", &RECIPE[..at], &RECIPE[end..]);
        let _ = Loaded::parse(Path::new("r"), text, &[]).map_err(|e| e.to_string());
    }

    #[test]
    fn no_argument_makes_the_parser_panic(argument in "[a-z.0-9]{0,20}=?.{0,30}") {
        let _ = Loaded::parse(Path::new("r"), RECIPE.to_owned(), &[argument]).map_err(|e| e.to_string());
    }

    #[test]
    fn no_number_makes_the_number_parser_panic(text in "[-+0-9._eE%^kKmMiIbtT ]{0,16}") {
        if let Some(value) = trainer::recipe::parse_number(&text) {
            prop_assert!(value.is_finite());
        }
    }
}

#[track_caller]
fn check_deprecated(old: &str, new: &str, note: &str) {
    let parse = |text: &str, arguments: &[String]| Loaded::parse(Path::new("r.yaml"), text.into(), arguments);
    let current = parse(new, &[]).unwrap();
    assert!(current.notes().is_empty());
    let deprecated = parse(old, &[]).unwrap();
    assert_eq!(deprecated.recipe, current.recipe);
    assert_eq!(deprecated.notes(), [note]);
}

#[test]
fn deprecated_keys_are_read_with_a_note() {
    for (old, new, note) in [
        (
            "sequence_parallel_norms: false",
            "sequence_parallel: false",
            "r.yaml:1: sequence_parallel_norms is deprecated; write sequence_parallel",
        ),
        (
            "pipeline_chunks: 2",
            "virtual_pipeline_parallel_size: 2",
            "r.yaml:1: pipeline_chunks is deprecated; write virtual_pipeline_parallel_size",
        ),
        (
            "checkpoint:\n  - output_dir: out\n    keep: 2",
            "checkpoint: [{output_dir: out, save_total_limit: 2}]",
            "r.yaml:3: checkpoint.keep is deprecated; write checkpoint.save_total_limit",
        ),
        (
            "data:\n  overlong: drop",
            "data: {truncation: drop}",
            "r.yaml:2: data.overlong is deprecated; write data.truncation",
        ),
        (
            "data:\n  unrendered_tool_calls: mask",
            "data: {unrendered_messages: mask}",
            "r.yaml:2: data.unrendered_tool_calls is deprecated; write data.unrendered_messages",
        ),
    ] {
        check_deprecated(old, new, note);
    }
}

#[test]
fn a_deprecated_key_next_to_its_new_name_is_refused() {
    for (text, message) in [
        (
            "sequence_parallel_norms: false\nsequence_parallel: true",
            "sequence_parallel_norms and sequence_parallel are the same key",
        ),
        (
            "pipeline_chunks: 2\nvirtual_pipeline_parallel_size: 2",
            "pipeline_chunks and virtual_pipeline_parallel_size are the same key",
        ),
        (
            "checkpoint: {output_dir: out, keep: 2, save_total_limit: 2}",
            "checkpoint.keep and checkpoint.save_total_limit are the same key",
        ),
        ("data: {overlong: drop, truncation: drop}", "data.overlong and data.truncation are the same key"),
    ] {
        let error = Loaded::parse(Path::new("r.yaml"), text.into(), &[]).unwrap_err().to_string();
        assert!(error.contains("r.yaml:1") && error.contains(message), "{error}");
    }
}

#[test]
fn an_argument_may_name_a_deprecated_key() {
    let text = "data: {truncation: error}\ncheckpoint: {output_dir: out, save_total_limit: 1}\n";
    for (argument, key) in [
        ("data.overlong=drop", "data.truncation"),
        ("data={overlong: drop}", "data.truncation"),
        ("checkpoint.keep=2", "checkpoint.save_total_limit"),
        ("checkpoint.0.keep=2", "checkpoint.save_total_limit"),
        ("pipeline_chunks=2", "virtual_pipeline_parallel_size"),
        ("sequence_parallel_norms=false", "sequence_parallel"),
    ] {
        let loaded = Loaded::parse(Path::new("r.yaml"), text.into(), &[argument.into()]).unwrap();
        let [note] = loaded.notes() else { panic!("{:?}", loaded.notes()) };
        assert!(
            note.starts_with(&format!("argument `{argument}`: ")) && note.ends_with(&format!("write {key}")),
            "{note}"
        );
    }
    let arguments = ["data.overlong=drop".to_owned(), "data.truncation=split".to_owned()];
    let error = Loaded::parse(Path::new("r.yaml"), text.into(), &arguments).unwrap_err().to_string();
    assert!(error.contains("data.truncation is set twice, first in `data.overlong=drop`"), "{error}");
}
