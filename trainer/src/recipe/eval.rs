//! The `eval` section: tasks of the evaluator during training.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::model::JsonMap;
use super::number::{HumanFloat, HumanInt};

/// Tasks that the model is asked while it is trained, with the options of `evaluator run`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EvalSection {
    /// Names of tasks, groups and tags, patterns such as `mmlu_*`, and YAML files. Default: none.
    pub tasks: Vec<String>,
    /// Asks every so many steps, and at the end. Default: `eval_interval`, else after each epoch.
    pub interval: Option<HumanInt>,
    /// Documents of each task: a number, or below 1 a share. Default: all.
    pub limit: Option<HumanFloat>,
    /// Examples before a question. Default: what each task says.
    pub num_fewshot: Option<HumanInt>,
    /// Seeds the choice of examples. Default 1234.
    pub fewshot_seed: Option<HumanInt>,
    /// Files and folders of task files, beside the built-in ones and before them.
    pub include_path: Vec<String>,
    /// Where the data of tasks are, instead of where their files say: a path or a Hub id for a task or a pattern.
    pub data: BTreeMap<String, String>,
    /// Writes prompts with the run's chat template. Default false.
    pub apply_chat_template: Option<bool>,
    /// Makes each example a turn of the chat. Default: `apply_chat_template`.
    pub fewshot_as_multiturn: Option<bool>,
    /// What the system says first.
    pub system_instruction: Option<String>,
    /// Changes to the tasks' `generation_kwargs`.
    pub gen_kwargs: JsonMap,
    /// Sequences of a forward. Default: as many as make a good one; the answers do not depend on it.
    pub batch_size: Option<HumanInt>,
    /// Tokens of context. Default: as many as the model was made for.
    pub max_length: Option<HumanInt>,
    /// Tokens that are generated at most, where a task does not say it. Default 256.
    pub max_gen_toks: Option<HumanInt>,
    /// Resamples for the errors of metrics that have no formula. Default 100000.
    pub bootstrap_iters: Option<HumanInt>,
    /// Allows tasks that run code which the model wrote. Default false.
    pub confirm_run_unsafe_code: Option<bool>,
}
