//! Detection of ArcticTraining recipes, whose defaults differ in a few keys.

use super::node::{RecipeNode, RecipeValue};

/// The dialect of a recipe file. It selects the defaults of a few keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecipeDialect {
    /// Candlewick's own.
    Candlewick,
    /// ArcticTraining's. It has the first key or value that only ArcticTraining's recipes need.
    ArcticTraining(String),
    /// Candlewick's. The recipe has a key of Candlewick alone, and one that only ArcticTraining's recipes need.
    Mixed {
        /// The key of ArcticTraining.
        mark: String,
        /// The key of Candlewick.
        own_key: String,
    },
}

/// ArcticTraining's top-level keys without a section.
const TOP_LEVEL: &[&str] = &[
    "type",
    "code",
    "skip_validation",
    "epochs",
    "loss_log_interval",
    "train_log_iter_interval",
    "train_log_metrics_path",
    "gradient_accumulation_steps",
    "micro_batch_size",
    "sequence_parallel_size",
    "expert_parallel_size",
    "arctic_moe",
    "enable_arctic_moe_custom_optimization",
    "enable_routing_replay",
    "activation_checkpoint_cpu_offload",
    "tiled_mlp_compute",
    "seed",
    "train_iters",
    "eval_interval",
    "eval_log_iter_interval",
    "exit_iteration",
    "exit_iteration_this_run",
    "min_iterations",
    "overfit_first_batch",
    "mem_profiler",
    "mem_profiler_dir",
    "mem_profiler_max_entries",
    "kill_switch_path",
];

/// ArcticTraining's sections with their keys. `deepspeed` and the maps of other programs have keys of their own.
const SECTIONS: &[(&str, &[&str])] = &[
    (
        "model",
        &[
            "type",
            "name_or_path",
            "dtype",
            "save_name",
            "attn_implementation",
            "disable_activation_checkpoint",
            "peft_config",
            "hf_config_kwargs",
        ],
    ),
    ("tokenizer", &["type", "name_or_path", "tokenize_kwargs"]),
    (
        "data",
        &[
            "type",
            "sources",
            "eval_sources",
            "train_eval_split",
            "max_length",
            "num_proc",
            "dl_num_workers",
            "seed",
            "use_data_cache",
            "cache_processed_data",
            "cache_dir",
            "cache_fs_type",
            "fail_on_missing_cache",
            "div_length",
            "mask_inputs",
            "always_max_length",
            "pad_to",
            "filter_samples",
            "pack_samples",
            "drop_last",
            "fuse_positions_prob",
            "repeat_to_pack_max_length",
            "ignore_empty_think",
        ],
    ),
    ("logger", &["output_dir", "level", "print_output_ranks", "file_output_ranks"]),
    ("wandb", &["enable", "entity", "project", "name"]),
    (
        "scheduler",
        &[
            "type",
            "name",
            "warmup_ratio",
            "scheduler_specific_kwargs",
            "num_warmup_steps",
            "num_decay_steps",
            "min_lr_ratio",
        ],
    ),
    ("optimizer", &["type", "learning_rate", "lr", "weight_decay", "betas"]),
    (
        "checkpoint",
        &[
            "type",
            "output_dir",
            "enabled",
            "auto_resume",
            "save_every_n_steps",
            "save_every_n_epochs",
            "save_end_of_training",
        ],
    ),
];

/// The keys of a source in ArcticTraining.
const SOURCE: &[&str] = &[
    "type",
    "name_or_path",
    "split",
    "sample_ratio",
    "sample_count",
    "sample_seed",
    "process",
    "kwargs",
    "split_mapping",
    "role_mapping",
    "content_key",
    "column",
    "sql",
    "table_name",
    "dataset_uri",
    "column_mapping",
    "limit",
    "batch_size",
];

/// The keys that a Candlewick recipe does not need: each is set for ArcticTraining.
const MARKS: &[&str] = &[
    "code",
    "skip_validation",
    "arctic_moe",
    "enable_arctic_moe_custom_optimization",
    "enable_routing_replay",
    "activation_checkpoint_cpu_offload",
    "model.disable_activation_checkpoint",
    "tokenizer.type",
    "data.use_data_cache",
    "data.cache_processed_data",
    "data.cache_fs_type",
    "data.filter_samples",
    "optimizer.type",
];

/// The keys and the beginnings of values that only ArcticTraining's recipes need.
const MARKED_VALUES: [(&str, &str); 6] = [
    ("model.type", "huggingface"),
    ("model.type", "liger"),
    ("scheduler.type", "huggingface"),
    ("data.sources.type", "huggingface"),
    ("data.eval_sources.type", "huggingface"),
    ("checkpoint.type", "deepspeed"),
];

/// Returns the dialect of a recipe file, without its arguments. A recipe with a key of Candlewick alone is Candlewick's.
pub(super) fn detect(tree: &RecipeNode) -> RecipeDialect {
    let mut keys = Vec::new();
    collect(tree, "", &mut keys);
    let is_marked = |(key, node): &&(String, &RecipeNode)| {
        let text = match &node.value {
            RecipeValue::Text(text) => text.as_str(),
            _ => "",
        };
        MARKS.contains(&key.as_str())
            || MARKED_VALUES.iter().any(|(marked, start)| key == marked && text.starts_with(start))
    };
    let Some((mark, _)) = keys.iter().find(is_marked) else { return RecipeDialect::Candlewick };
    match keys.iter().find(|(key, _)| !is_of_arctic_training(key)) {
        None => RecipeDialect::ArcticTraining(mark.clone()),
        Some((own_key, _)) => RecipeDialect::Mixed { mark: mark.clone(), own_key: own_key.clone() },
    }
}

/// Collects the keys of sections and of lists, without indices. Deeper maps belong to other programs.
fn collect<'a>(node: &'a RecipeNode, prefix: &str, keys: &mut Vec<(String, &'a RecipeNode)>) {
    match &node.value {
        RecipeValue::List(items) => items.iter().for_each(|item| collect(item, prefix, keys)),
        RecipeValue::Map(entries) => {
            for entry in entries {
                let key = if prefix.is_empty() { entry.key.clone() } else { format!("{prefix}.{}", entry.key) };
                let is_section = key == "data.sources" || key == "data.eval_sources" || section(&key).is_some();
                if is_section {
                    collect(&entry.node, &key, keys);
                } else {
                    keys.push((key, &entry.node));
                }
            }
        }
        _ => {}
    }
}

fn section(name: &str) -> Option<&'static [&'static str]> {
    SECTIONS.iter().find(|(section, _)| *section == name).map(|(_, keys)| *keys)
}

fn is_of_arctic_training(key: &str) -> bool {
    let Some((section_name, name)) = key.rsplit_once('.') else {
        return key == "deepspeed" || TOP_LEVEL.contains(&key);
    };
    match section_name {
        "data.sources" | "data.eval_sources" => SOURCE.contains(&name),
        _ => section(section_name).is_some_and(|keys| keys.contains(&name)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::recipe::node::parse;

    fn of(text: &str) -> RecipeDialect {
        detect(&parse(text, 0).unwrap())
    }

    fn arctic(mark: &str) -> RecipeDialect {
        RecipeDialect::ArcticTraining(mark.to_owned())
    }

    #[test]
    fn a_key_of_arctic_training_alone_marks_its_recipes() {
        let model = "model: {name_or_path: a}\n";
        for (text, mark) in [
            ("data: {sources: [a], use_data_cache: true}", "data.use_data_cache"),
            ("data: {sources: [a, {type: huggingface, name_or_path: b}]}", "data.sources.type"),
            ("skip_validation: true\ndata: {sources: a}", "skip_validation"),
            ("data: {sources: a}\ncheckpoint: [{type: deepspeed, output_dir: c}]", "checkpoint.type"),
            ("data: {sources: a}\ncheckpoint: {type: deepspeed, output_dir: c}", "checkpoint.type"),
            ("data: {sources: a}\noptimizer: {type: cpu_adam}\ndeepspeed: {any: {key: 1}}", "optimizer.type"),
        ] {
            assert_eq!(of(&format!("{model}{text}")), arctic(mark), "{text}");
        }
    }

    #[test]
    fn recipes_without_a_mark_are_candlewicks() {
        for text in [
            "model: {name_or_path: a}\ndata: {sources: [a]}",
            "model: {name_or_path: a}\ndata: {sources: [a]}\ncheckpoint: [{type: huggingface, output_dir: c}]",
            "data: {sources: [{type: snowflake, sql: a}], dl_num_workers: 1}",
            "model: {type: random-weight-hf, name_or_path: a}\nscheduler: {type: wsd}",
            "",
        ] {
            assert_eq!(of(text), RecipeDialect::Candlewick, "{text}");
        }
    }

    #[test]
    fn a_key_of_candlewick_is_named_with_the_mark() {
        for (text, mark, own_key) in [
            ("output_dir: runs/a\ndata: {sources: [a], use_data_cache: true}", "data.use_data_cache", "output_dir"),
            ("base: other.yaml\nmodel: {type: liger}", "model.type", "base"),
            ("model: {type: liger, revision: main}", "model.type", "model.revision"),
            (
                "data: {sources: [{type: huggingface, name_or_path: a, subset: b}]}",
                "data.sources.type",
                "data.sources.subset",
            ),
            (
                "checkpoint: [{type: deepspeed, output_dir: c, save_total_limit: 1}]",
                "checkpoint.type",
                "checkpoint.save_total_limit",
            ),
        ] {
            let (mark, own_key) = (mark.to_owned(), own_key.to_owned());
            assert_eq!(of(text), RecipeDialect::Mixed { mark, own_key }, "{text}");
        }
    }
}
