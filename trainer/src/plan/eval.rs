//! Evaluation during training, as a plan has it: when, on what, and which number says which save is the best.

use std::path::PathBuf;

use serde::Serialize;

use crate::checkpoint::Moment;
use crate::recipe::Free;

/// The held-out loss as metrics call it.
pub const EVAL_LOSS: &str = "loss/eval";

/// The held-out loss during training.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EvalPlan {
    /// Steps between evaluations; `None` evaluates after each epoch. The last step is always evaluated.
    pub interval: Option<usize>,
    /// Whether a fresh run is evaluated before its first step.
    pub on_start: bool,
}

/// Tasks during training.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TasksPlan {
    /// When.
    pub when: EvalPlan,
    /// What selects them.
    pub tasks: Vec<String>,
    /// Whether one of them lets the model write.
    pub generates: bool,
    /// Where others than the built-in ones are.
    pub include_path: Vec<PathBuf>,
    /// Where their data are, as `TASK=PATH`.
    pub data: Vec<String>,
    /// Documents of each: a number, or below 1 a share.
    pub limit: Option<f64>,
    /// Examples before a question.
    pub num_fewshot: Option<usize>,
    /// Seeds their choice.
    pub fewshot_seed: u64,
    /// Whether prompts are written with the chat template.
    pub chat: bool,
    /// Whether examples are turns of the chat.
    pub fewshot_as_multiturn: bool,
    /// What the system says first.
    pub system_instruction: Option<String>,
    /// What changes the tasks' `generation_kwargs`.
    pub gen_kwargs: Free,
    /// Sequences of a forward.
    pub batch_size: Option<usize>,
    /// Tokens of context.
    pub max_length: Option<usize>,
    /// Tokens that are generated at most.
    pub max_gen_toks: usize,
    /// Resamples for errors.
    pub bootstrap_iters: usize,
    /// Whether tasks may run code that the model wrote.
    pub confirm_run_unsafe_code: bool,
}

/// Which save is the best, and stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BestPlan {
    /// `loss/eval` or `TASK/METRIC`; `None` is the first task's first metric.
    pub metric: Option<String>,
    /// Whether more is better; `None` is what the metric's task says.
    pub greater_is_better: Option<bool>,
}

impl EvalPlan {
    /// Tells whether to evaluate now.
    pub fn is_due(&self, moment: Moment) -> bool {
        let Moment { step, finished_epoch, end_of_training } = moment;
        let falls_on = self.interval.map_or(finished_epoch.is_some(), |interval| step.is_multiple_of(interval));
        step > 0 && (falls_on || end_of_training)
    }
}
