//! Expansion of `~/` at the start of a recipe's paths, which no shell expands.

use super::node::{RecipeEntry, RecipeNode, RecipeValue};

/// The keys whose strings, lists of strings or maps to strings are paths.
const PATHS: [&str; 16] = [
    "adapter_name_or_path",
    "base",
    "cache_dir",
    "chat_template",
    "config",
    "data_files",
    "eval_sources",
    "include_path",
    "kill_switch_path",
    "mem_profiler_dir",
    "name_or_path",
    "output_dir",
    "record",
    "replay",
    "sources",
    "train_log_metrics_path",
];

/// Replaces `~` by the home folder in every path of a recipe, if `HOME` is set.
pub(super) fn expand_home(tree: &mut RecipeNode) {
    if let Ok(home) = std::env::var("HOME") {
        expand(tree, &home);
    }
}

fn expand(tree: &mut RecipeNode, home: &str) {
    match &mut tree.value {
        RecipeValue::Map(entries) => entries.iter_mut().for_each(|entry| expand_entry(entry, home)),
        RecipeValue::List(items) => items.iter_mut().for_each(|item| expand(item, home)),
        _ => {}
    }
}

fn expand_entry(entry: &mut RecipeEntry, home: &str) {
    expand(&mut entry.node, home);
    // `eval.data` maps tasks to paths. In the section `data`, only the listed keys are paths.
    if PATHS.contains(&entry.key.as_str()) || entry.key == "data" {
        expand_strings(&mut entry.node, home);
    }
}

fn expand_strings(node: &mut RecipeNode, home: &str) {
    match &mut node.value {
        RecipeValue::Text(text) => {
            if let Some(rest) = text.strip_prefix("~/") {
                *text = format!("{home}/{rest}");
            }
        }
        RecipeValue::List(items) => items.iter_mut().for_each(|item| expand_strings(item, home)),
        RecipeValue::Map(entries) => entries.iter_mut().for_each(|entry| {
            if let RecipeValue::Text(_) = entry.node.value {
                expand_strings(&mut entry.node, home);
            }
        }),
        _ => {}
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_expanded_and_other_strings_are_not() {
        let text = "output_dir: ~/runs\ndata:\n  sources: [~/a.jsonl, {name_or_path: ~/b}, c~/d]\neval:\n  data: {arc: ~/arc}\n\
                    generate:\n  prompts: [~/x]\ncheckpoint: [{output_dir: ~/m}]\nmoe: {routing_replay: {replay: ~/r}}\n";
        let mut tree = crate::recipe::node::parse(text, 0).unwrap();
        expand(&mut tree, "/users/me");
        let at = |key: &str| tree.at(key).unwrap().0.value.clone();
        for (key, want) in [
            ("output_dir", "/users/me/runs"),
            ("data.sources.0", "/users/me/a.jsonl"),
            ("data.sources.1.name_or_path", "/users/me/b"),
            ("data.sources.2", "c~/d"),
            ("eval.data.arc", "/users/me/arc"),
            ("generate.prompts.0", "~/x"),
            ("checkpoint.0.output_dir", "/users/me/m"),
            ("moe.routing_replay.replay", "/users/me/r"),
        ] {
            assert_eq!(at(key), RecipeValue::Text(want.into()), "{key}");
        }
    }
}
