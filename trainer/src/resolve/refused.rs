//! Keys of the schema without support. Each is an error if it would change the run.

use super::resolver::Resolver;
use crate::recipe::DataType;

/// Adds an error for each set key that is not supported and would change the run.
pub(super) fn refuse_unsupported_keys(resolver: &mut Resolver) {
    preferences(resolver);
    code(resolver);
    without_effect(resolver);
}

fn preferences(resolver: &mut Resolver) {
    for key in [
        "ref_model",
        "beta",
        "ignore_label_index",
        "label_smoothing",
        "reference_model_deepspeed",
        "data.max_prompt_length",
        "data.dpo_prompt_truncation_mode",
    ] {
        refuse(resolver, key, resolver.loaded.is_set(key));
    }
}

/// Adds a note for each key that is accepted for compatibility with ArcticTraining and has no effect.
fn without_effect(resolver: &mut Resolver) {
    for key in ["skip_validation", "data.cache_fs_type", "data.use_data_cache", "data.cache_processed_data"] {
        if resolver.loaded.is_set(key) {
            resolver.note(format!("{key} has no effect here"));
        }
    }
    if resolver.recipe().kind == Some(DataType::Causal) {
        for key in [
            "data.mask_inputs",
            "data.masking_strategy",
            "data.roles_to_train",
            "data.train_on_eos",
            "data.ignore_empty_think",
            "tokenizer.chat_template",
        ] {
            if resolver.loaded.is_set(key) {
                resolver.note(format!("{key} has no effect on `type: causal`: every token is a target"));
            }
        }
    }
}

fn code(resolver: &mut Resolver) {
    let train_py = resolver.loaded.source().path.with_file_name("train.py");
    match &resolver.recipe().code {
        Some(name) if name != "train.py" || resolver.env.has_train_py => {
            let advice = "remove the key; the recipe's keys must express what the code changes";
            resolver.report_with_advice(&["code"], format!("code: Python code ({name}) is not supported"), advice);
        }
        None if resolver.env.has_train_py => {
            resolver.note(format!("{} is not executed: Python code is not supported", train_py.display()));
        }
        _ => {}
    }
}

fn refuse(resolver: &mut Resolver, key: &str, is_set: bool) {
    if is_set {
        let what = resolver.loaded.scalar(key).map_or(key.to_owned(), |value| format!("{key}: {value}"));
        resolver.report_missing(&[key], &what, "remove the key, or set it to its default");
    }
}
