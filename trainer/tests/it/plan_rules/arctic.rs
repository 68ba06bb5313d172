//! Recipes in ArcticTraining's dialect: their defaults, and the keys that only they use.

use std::path::Path;

use candlewick_model::Config;
use trainer::data::{Packing, Truncation};
use trainer::plan::{CheckpointingMode, Plan};
use trainer::recipe::{FloatDtype, Loaded, MemProfiler};
use trainer::resolve::{Environment, WorldInfo};

use super::{known, plan, refused};

fn on_ranks(n_ranks: usize, text: &str) -> Result<Plan, String> {
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), text.to_owned(), &[]).map_err(|error| error.to_string())?;
    let known = Environment { world: WorldInfo::first_of(n_ranks), ..known() };
    Plan::resolve(&loaded, &known).map_err(|error| error.to_string())
}

/// A recipe for long sequences, with every key that ArcticTraining's recipes of this kind set.
const LONG: &str = "
type: sft
micro_batch_size: 1
exit_iteration: 4
min_iterations: 4
activation_checkpoint_cpu_offload: true
tiled_mlp_compute: true
sequence_parallel_size: 2
deepspeed:
  zero_optimization:
    stage: 3
    offload_optimizer: {device: cpu}
    offload_param: {device: cpu}
  seq_parallel_communication_data_type: bf16
optimizer: {type: cpu_adam, learning_rate: 0.00001}
model: {type: liger, name_or_path: org/model, attn_implementation: flash_attention_2}
data:
  sources:
    - type: huggingface_instruct
      name_or_path: org/chats
      split: train_sft
      role_mapping: {user: messages.role.user, assistant: messages.role.assistant}
  cache_dir: data-cache
  dl_num_workers: 1
  max_length: 1024
logger: {level: WARNING, output_dir: logs, file_output_ranks: [0], print_output_ranks: [0, 1, 2, 3, 4, 5, 6, 7]}
checkpoint: [{type: huggingface, save_end_of_training: true, output_dir: ./fine-tuned-model}]
";

/// A recipe of a workstation, with the states of the optimizer in bf16.
const WORKSTATION: &str = "
type: sft
micro_batch_size: 1
tiled_mlp_compute: true
deepspeed:
  zero_optimization: {stage: 3, offload_optimizer: {device: cpu, ratio: 0.7}}
  bf16: {enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true}
  torch_autocast: {enabled: true, dtype: torch.bfloat16}
optimizer: {type: cpu_adam, learning_rate: 0.00001}
model: {type: liger, name_or_path: org/model, attn_implementation: flash_attention_2}
data:
  sources: [{type: huggingface_instruct, name_or_path: org/chats, split: train_sft}]
  cache_dir: /tmp/data-cache
  dl_num_workers: 1
  pack_samples: true
  max_length: 1_024
wandb: {enable: false, entity: me, project: ulysses, name: workstation}
";

/// A recipe that names no ZeRO stage.
const SHORT: &str = "
type: sft
micro_batch_size: 2
epochs: 1
gradient_accumulation_steps: 1
model: {type: liger, name_or_path: org/model}
wandb: {enable: false, project: arctic, name: sft}
data:
  sources: [/data/sft]
  use_data_cache: true
  cache_processed_data: true
  cache_dir: /data/cache
  num_proc: 16
  max_length: 1024
scheduler: {name: 'linear', warmup_ratio: 0.0}
optimizer: {betas: [0.9,0.999], weight_decay: 0.1, lr: 1e-5}
checkpoint: [{type: huggingface, save_every_n_steps: 10000, output_dir: /data/out, save_end_of_training: true}]
";

const CAUSAL: &str = "
type: causal
micro_batch_size: 1
exit_iteration: 10
min_iterations: 10
deepspeed: {zero_optimization: {stage: 3}}
optimizer: {learning_rate: 1e-5}
model: {name_or_path: org/model, attn_implementation: flash_attention_2, dtype: bf16}
data:
  sources: [{type: huggingface_causal, name_or_path: 'org/books:train[:100]'}]
  cache_dir: /tmp/data-cache
  num_proc: 16
  dl_num_workers: 1
  max_length: 1024
logger: {level: WARNING, output_dir: logs, print_output_ranks: [0, 1]}
checkpoint: [{type: huggingface, save_every_n_steps: 300, output_dir: /tmp/ft-model}]
";

/// Returns a recipe of a benchmark of Qwen3-30B-A3B on 8 GPUs: the common keys, one more of the model, and others.
fn of_benchmark(model: &str, max_length: &str, others: &str) -> String {
    let common = "
type: sft
micro_batch_size: 1
min_iterations: 12
exit_iteration: 12
deepspeed: {zero_optimization: {stage: 2}}
logger: {level: WARNING, output_dir: logs, print_output_ranks: [0, 1, 2, 3, 4, 5, 6, 7]}
model: {type: liger, name_or_path: org/moe, attn_implementation: flash_attention_2, MODEL}
data:
  sources: ['org/chats:train[:10000]']
  cache_dir: /data/cache
  dl_num_workers: 1
  pack_samples: true
  max_length: MAX_LENGTH
";
    common.replace("MODEL", model).replace("MAX_LENGTH", max_length) + others
}

/// Returns the benchmark's recipe with the experts divided over all GPUs.
fn experts() -> String {
    let others = "
exit_iteration_this_run: 6
arctic_moe: true
expert_parallel_size: 8
optimizer: {type: fused_adam_moe, learning_rate: 0.00001}
wandb: {enable: true, project: moe, name: ep8}
checkpoint:
  - {type: deepspeed, save_every_n_epochs: 1, save_every_n_steps: 6, output_dir: /data/checkpoint,
     save_end_of_training: true, auto_resume: true}
  - {type: huggingface, save_end_of_training: true, output_dir: /data/model}
";
    of_benchmark("hf_config_kwargs: {num_hidden_layers: 48}", "32_000", others)
}

/// Returns the recipe of the benchmark's dense model of the same sizes, with this key of the model.
fn dense_twin(model: &str) -> String {
    let others = "
arctic_moe: false
expert_parallel_size: 1
optimizer: {type: fused_adam, learning_rate: 0.00001}
wandb: {enable: true, project: moe, name: dense}
";
    of_benchmark(model, "16_000", others)
}

/// Resolves a recipe of Qwen3-30B-A3B for 8 ranks.
fn of_qwen3_moe(text: &str) -> Result<Plan, String> {
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), text.to_owned(), &[]).map_err(|error| error.to_string())?;
    let config = include_str!("../../../../tests/tests/fixtures/configs/Qwen3-30B-A3B.json");
    let config = Some(Config::from_json(serde_json::from_str(config).unwrap()).unwrap());
    let known = Environment { world: WorldInfo::first_of(8), config, ..known() };
    Plan::resolve(&loaded, &known).map_err(|error| error.to_string())
}

#[test]
fn recipes_of_arctic_training_for_experts_and_their_dense_twin_resolve_as_they_are() {
    let plan = of_qwen3_moe(&experts()).unwrap();
    assert_eq!((plan.ranks.expert, plan.ranks.zero_stage, plan.ranks.dp_shard), (Some(8), 2, 8));
    assert_eq!((plan.data.max_length, plan.model.activations), (32_000, CheckpointingMode::Full));
    assert_eq!((plan.moe.unwrap().n_layers, plan.checkpoints.len()), (48, 2));
    let no_experts = "hf_config_kwargs: {num_experts: 0}";
    let dense = of_qwen3_moe(&dense_twin(no_experts)).unwrap();
    assert_eq!((dense.ranks.zero_stage, dense.ranks.dp_shard, dense.data.max_length), (2, 8, 16_000));
    assert!(dense.moe.is_none() && dense.model.config.unwrap().moe().is_none());
    let without_experts =
        of_qwen3_moe(&dense_twin(no_experts).replace("arctic_moe: false", "arctic_moe: true")).unwrap_err();
    assert!(without_experts.contains("this model has no experts"), "{without_experts}");
    // An older version of the recipe.
    let error = of_qwen3_moe(&dense_twin("arch_variant: moe-dense-equivalent")).unwrap_err();
    assert!(error.contains("arch_variant") && error.contains("`num_experts: 0` makes the dense model"), "{error}");
}

#[test]
fn recipes_of_arctic_training_resolve_as_they_are() {
    let long = on_ranks(8, LONG).unwrap();
    assert_eq!((long.ranks.zero_stage, long.ranks.sequence, long.data.dl_num_workers), (3, 2, 1));
    assert_eq!(long.model.activations, CheckpointingMode::Offload(1.0));
    let workstation = on_ranks(1, WORKSTATION).unwrap();
    assert_eq!((workstation.model.dtype, workstation.optimizer.masters), (FloatDtype::Bf16, FloatDtype::Bf16));
    assert!(workstation.notes.iter().any(|note| note.contains("torch_autocast changes nothing")));
    let causal = on_ranks(8, CAUSAL).unwrap();
    assert_eq!((causal.data.packing, causal.ranks.zero_stage), (Packing::Exact, 3));
}

#[test]
fn a_recipe_of_arctic_training_has_its_defaults() {
    let short = on_ranks(8, SHORT).unwrap();
    assert_eq!((short.ranks.zero_stage, short.ranks.dp_shard), (2, 8));
    assert_eq!(short.model.activations, CheckpointingMode::Full);
    assert_eq!(short.data.truncation, Truncation::Drop);
    let note = "the recipe is in ArcticTraining's dialect (model.type), so its defaults apply: \
                deepspeed.zero_optimization.stage: 2, model.activation_checkpoint: full, data.truncation: drop";
    assert!(short.notes.iter().any(|own| own == note), "{:?}", short.notes);
    // DeepSpeed's default of the stage applies below `zero_optimization`.
    let with_section = on_ranks(8, &format!("{SHORT}deepspeed: {{zero_optimization: {{reduce_bucket_size: 1}}}}\n"));
    assert_eq!(with_section.unwrap().ranks.zero_stage, 0);
    let explicit = SHORT.replace("{type: liger, ", "{type: liger, disable_activation_checkpoint: true, ");
    assert_eq!(on_ranks(8, &explicit).unwrap().model.activations, CheckpointingMode::None);
}

#[test]
fn a_recipe_of_candlewick_keeps_its_defaults() {
    let unmarked =
        SHORT.replace("type: liger, ", "").replace("  use_data_cache: true\n  cache_processed_data: true\n", "");
    let mixed = "output_dir is a key of Candlewick alone, so ArcticTraining's defaults do not apply (in spite of model.type): \
                 deepspeed.zero_optimization.stage: 2, model.activation_checkpoint: full, data.truncation: drop";
    for (text, note) in [(unmarked, None), (format!("{SHORT}output_dir: runs/a\n"), Some(mixed))] {
        let own = on_ranks(8, &text).unwrap();
        assert_eq!((own.ranks.zero_stage, own.model.activations), (0, CheckpointingMode::None), "{text}");
        assert_eq!((own.data.truncation, own.data.dl_num_workers), (Truncation::Error, 0));
        let notes = own.notes.iter().map(String::as_str);
        assert_eq!(notes.clone().find(|note| note.contains("ArcticTraining's defa")), note);
        assert!(!notes.clone().any(|note| note.contains("dialect")), "{:?}", own.notes);
    }
}

#[test]
fn recipes_that_need_python_code_have_one_clear_error() {
    let own_type = on_ranks(1, "type: swiftkv\ncode: ../train.py\nmodel: {name_or_path: a, num_key_value_layers: 16}");
    let error = own_type.unwrap_err();
    assert!(error.contains("type: unknown value \"swiftkv\""), "{error}");
    assert!(error.contains("types registered by Python code of a recipe are not supported"), "{error}");
    let preferences = on_ranks(1, "type: dpo\nmodel: {name_or_path: a}\ndata: {sources: [a]}").unwrap_err();
    assert!(
        preferences.contains("reinforcement learning and reward models (DPO, KTO, GRPO, PPO): not supported; use"),
        "{preferences}"
    );
    assert!(preferences.contains("type: unknown value \"dpo\""), "{preferences}");
}

#[test]
fn autocast_of_f32_weights_multiplies_in_16_bits_and_exports_f32() {
    const ON: &str = "deepspeed.torch_autocast={enabled: true, dtype: torch.bfloat16}";
    let mixed = plan(&["model.dtype=f32", ON, "checkpoint={type: huggingface, output_dir: o}"]);
    assert_eq!((mixed.model.dtype, mixed.model.fp32_residual_connection), (FloatDtype::Bf16, true));
    assert_eq!((mixed.optimizer.masters, mixed.checkpoints[0].dtype), (FloatDtype::F32, Some(FloatDtype::F32)));
    let half = plan(&["model.dtype=f32", "deepspeed.torch_autocast={enabled: true, dtype: fp16}"]);
    assert!(half.optimizer.loss_scaling.initial > 1.0);
    assert_eq!(plan(&["model.dtype=f32", "deepspeed.torch_autocast.enabled=false"]).model.dtype, FloatDtype::F32);
    let bf16 = plan(&[ON]);
    assert_eq!((bf16.model.dtype, bf16.model.fp32_residual_connection), (FloatDtype::Bf16, false));
    refused(&["model.dtype=fp16", ON], &["torch_autocast.dtype contradicts model.dtype"]);
    refused(&["deepspeed.torch_autocast.enabled=true"], &["the dtype is missing", "torch.bfloat16"]);
    refused(&["deepspeed.torch_autocast={enabled: true, dtype: int8}"], &["expected torch.bfloat16"]);
    refused(&["deepspeed.torch_autocast={enabled: true, dtype: bf16, cache: 1}"], &["unknown key", "cache"]);
    let modules =
        "deepspeed.torch_autocast={enabled: true, dtype: bf16, lower_precision_safe_modules: [torch.nn.LayerNorm]}";
    refused(&[modules], &["lower_precision_safe_modules", "list torch.nn.Linear"]);
    refused(&["deepspeed.wall_clock_breakdown=3"], &["expected true or false"]);
    assert!(plan(&["deepspeed.wall_clock_breakdown=true"]).profiling.wall_clock_breakdown);
}

#[test]
fn save_name_is_a_folder_of_exported_models() {
    let named = plan(&["model.save_name=mine", "checkpoint=[{output_dir: a}, {type: huggingface, output_dir: b}]"]);
    let folders: Vec<_> = named.checkpoints.iter().map(|checkpoint| checkpoint.output_dir.as_path()).collect();
    assert_eq!(folders, [Path::new("a"), Path::new("b/mine")]);
    for name in ["a/b", "..", "''"] {
        refused(&[&format!("model.save_name={name}")], &["model.save_name: expected the name of a folder"]);
    }
}

#[test]
fn tokenize_kwargs_cut_plain_text_and_nothing_else() {
    let kwargs = |text: &str| format!("tokenizer.tokenize_kwargs={text}");
    let cut = plan(&["type=causal", &kwargs("{truncation: true, max_length: 1K, verbose: false, padding: false}")]);
    assert_eq!(cut.data.max_text_tokens, Some(1000));
    assert_eq!(plan(&["type=causal", &kwargs("{add_special_tokens: false}")]).data.max_text_tokens, None);
    let chats = plan(&[&kwargs("{truncation: true, max_length: 10}")]);
    assert_eq!(chats.data.max_text_tokens, None);
    assert!(chats.notes.iter().any(|note| note.contains("tokenize_kwargs has no effect on `type: sft`")));
    for (text, want) in [
        ("{add_special_tokens: true}", "would add BOS and EOS twice"),
        ("{truncation: true}", "the maximum length is missing"),
        ("{truncation: only_second, max_length: 4}", "expected true, false, longest_first or only_first"),
        ("{max_length: 0, truncation: true}", "expected a whole number"),
        ("{padding: max_length}", "data.pad_to pads rows"),
        ("{stride: 3}", "`tokenizer.tokenize_kwargs.stride` is not supported"),
    ] {
        refused(&["type=causal", &kwargs(text)], &[want]);
    }
}

#[test]
fn tokenized_rows_have_no_other_columns() {
    let tokenized = plan(&["data.sources.0={name_or_path: a.jsonl, process: false}"]);
    assert_eq!(tokenized.data.sources[0].format.as_deref(), Some("token_ids"));
    refused(
        &["data.sources.0={name_or_path: a.jsonl, process: false, column: body}"],
        &["data.sources.0.column contradicts process: false"],
    );
    refused(&["data.repeat_to_pack_max_length=true"], &["needs data.pack_samples: true"]);
    refused(&["data.dl_num_workers=1000"], &["expected at most 64"]);
}

#[test]
fn a_stream_needs_its_number_of_steps_and_refuses_keys_that_need_all_rows() {
    let streamed = plan(&["data.streaming=true", "train_iters=10"]).data;
    assert_eq!((streamed.streaming.unwrap().buffer_size, streamed.dl_num_workers), (1024, 1));
    refused(&["data.streaming=true"], &["data.streaming: the number of steps", "set train_iters"]);
    refused(&["data.buffer_size=10"], &["data.buffer_size needs data.streaming: true"]);
    for (argument, key) in [
        ("data.train_eval_split=[0.9, 0.1]", "data.train_eval_split"),
        ("min_iterations=5", "min_iterations"),
        ("overfit_first_batch=true", "overfit_first_batch"),
        ("data.order=longest_first", "data.order"),
        ("data.fail_on_missing_cache=true", "data.fail_on_missing_cache"),
        ("checkpoint={output_dir: a, save_every_n_epochs: 1}", "checkpoint"),
    ] {
        let want = format!("{key}: not possible with data.streaming");
        refused(&["data.streaming=true", "train_iters=10", argument], &[&want]);
    }
}

#[test]
fn a_stream_and_repeated_samples_refuse_a_mixture_and_a_stream_refuses_lengths_in_tokens() {
    let sources =
        |key: &str| format!("data.sources=[{{name_or_path: a.jsonl, {key}}}, {{name_or_path: b.jsonl, {key}}}]");
    for (key, path) in [("weight: 1", "data.sources.0.weight"), ("repeat: 2", "data.sources.0.repeat")] {
        let want = format!("{path}: not possible with data.streaming");
        refused(&["data.streaming=true", "train_iters=10", &sources(key)], &[&want]);
        let want = format!("data.repeat_to_pack_max_length: not possible with {path}");
        refused(&["data.repeat_to_pack_max_length=true", "data.pack_samples=true", &sources(key)], &[&want]);
    }
    let interleaved = ["data.stopping_strategy=all_exhausted", &sources("split: train")];
    let want = "data.stopping_strategy: not possible with data.streaming";
    refused(&[&["data.streaming=true", "train_iters=10"][..], &interleaved].concat(), &[want]);
    let want = "scheduler.warmup_tokens: not possible with data.streaming";
    refused(&["data.streaming=true", "train_iters=10", "scheduler.warmup_tokens=100"], &[want]);
    plan(&["data.streaming=true", "train_iters=10", &sources("split: train")]);
}

#[test]
fn the_memory_profile_is_in_the_run_folder() {
    assert_eq!(plan(&[]).profiling.memory, None);
    let memory = plan(&["mem_profiler=step"]).profiling.memory.unwrap();
    assert_eq!((memory.mode, memory.max_entries), (MemProfiler::Step, 100_000));
    assert_eq!(memory.dir, Path::new("runs/r/mem-prof"));
    let all = ["mem_profiler=e2e", "mem_profiler_dir=prof", "mem_profiler_max_entries=1K"];
    let memory = plan(&all).profiling.memory.unwrap();
    assert_eq!((memory.mode, memory.dir.as_path(), memory.max_entries), (MemProfiler::E2e, Path::new("prof"), 1000));
    refused(&["mem_profiler=always"], &["mem_profiler: unknown value", "step, e2e"]);
    refused(&["mem_profiler=e2e", "output_dir=/dev/null", "checkpoint=none"], &["set mem_profiler_dir"]);
    let idle = plan(&["mem_profiler_max_entries=5"]);
    assert!(idle.notes.iter().any(|note| note == "mem_profiler_max_entries has no effect without mem_profiler"));
}

#[test]
fn a_snowflake_source_is_one_query() {
    let source = |keys: &str| format!("data.sources.0={{type: snowflake, {keys}}}");
    let table = plan(&[&source("table_name: DB.S.T, limit: 5, column_mapping: {TEXT: text}")]);
    let query = table.data.sources[0].snowflake.clone().unwrap();
    assert_eq!((query.statement.as_str(), query.limit), ("SELECT * FROM DB.S.T", Some(5)));
    assert_eq!(query.column_mapping, [("TEXT".to_owned(), "text".to_owned())]);
    let sql = plan(&[&source("sql: 'SELECT A FROM T;', batch_size: 8")]);
    assert_eq!(sql.data.sources[0].snowflake.as_ref().unwrap().statement, "SELECT A FROM T");
    assert!(sql.notes.iter().any(|note| note.contains("batch_size has no effect")), "{:?}", sql.notes);
    let dataset = source("dataset_uri: 'snow://dataset/DB.S.D/versions/v1'");
    refused(&[&dataset], &["a Snowflake Dataset is a set of files", "use sql or table_name"]);
    refused(&[&source("sql: a, table_name: b")], &["expected one of the keys sql, table_name, dataset_uri"]);
    refused(&[&source("table_name: 'a; drop'")], &["expected the name of a table"]);
    refused(&[&source("table_name: a, revision: b")], &["data.sources.0.revision has no meaning for Snowflake"]);
    refused(
        &["data.sources.0={name_or_path: a, sql: b}"],
        &["data.sources.0.sql needs data.sources.0.type: snowflake"],
    );
}
