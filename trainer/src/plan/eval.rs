//! The evaluation of a plan: intervals, tasks, and the metric of the best checkpoint.

use std::path::PathBuf;

use serde::Serialize;

use crate::checkpoint::Moment;
use crate::recipe::JsonMap;
use crate::step_fraction::{FractionalInterval, RunLength};

/// The metric name of the evaluation loss.
pub const EVAL_LOSS: &str = "loss/eval";

/// The evaluation loss during training.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalPlan {
    /// Steps between evaluations; `None` evaluates after each epoch. The last step is always evaluated.
    pub interval: Option<usize>,
    /// The interval as a fraction. [`Plan::with_counted_steps`](super::Plan::with_counted_steps) replaces it by `interval`.
    pub fraction: Option<FractionalInterval>,
    /// True if a fresh run is evaluated before its first step.
    pub on_start: bool,
}

/// Task evaluation during training.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TasksPlan {
    /// The interval of the evaluations.
    pub when: EvalPlan,
    /// Names of tasks, groups and tags, patterns, and YAML files.
    pub tasks: Vec<String>,
    /// True if a task generates text.
    pub generates: bool,
    /// Folders and files of further tasks.
    pub include_path: Vec<PathBuf>,
    /// Overrides of the tasks' data, as `TASK=PATH`.
    pub data: Vec<String>,
    /// The number of documents of each task; below 1, the fraction of them.
    pub limit: Option<f64>,
    /// The number of few-shot examples.
    pub num_fewshot: Option<usize>,
    /// Seeds the choice of few-shot examples.
    pub fewshot_seed: u64,
    /// True if prompts are rendered with the chat template.
    pub chat: bool,
    /// True if few-shot examples are turns of the chat.
    pub fewshot_as_multiturn: bool,
    /// The system message.
    pub system_instruction: Option<String>,
    /// Overrides of the tasks' `generation_kwargs`.
    pub gen_kwargs: JsonMap,
    /// The number of sequences in a forward.
    pub batch_size: Option<usize>,
    /// The context length in tokens.
    pub max_length: Option<usize>,
    /// The maximum number of generated tokens.
    pub max_gen_toks: usize,
    /// The number of bootstrap resamples for standard errors.
    pub bootstrap_iters: usize,
    /// True if tasks may run code that the model generated.
    pub confirm_run_unsafe_code: bool,
    /// True if this code may run although the machine cannot confine its writes.
    pub allow_unconfined_code: bool,
}

/// The metric of the best checkpoint, which is never deleted, or of early stopping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BestPlan {
    /// `loss/eval` or `TASK/METRIC`; `None` is the first task's first metric.
    pub metric: Option<String>,
    /// True if a higher metric is better; `None` takes the direction of the metric's task.
    pub greater_is_better: Option<bool>,
}

/// Early stopping.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EarlyStoppingPlan {
    /// The metric and its direction.
    pub watched: BestPlan,
    /// The number of consecutive evaluations without an improvement after which the run ends.
    pub patience: usize,
    /// The smallest change of the best value that counts as an improvement.
    pub min_delta: f64,
}

impl EvalPlan {
    /// Replaces a fraction by its steps.
    pub(crate) fn count_steps(&mut self, run: RunLength) {
        self.interval = self.fraction.take().map_or(self.interval, |fraction| Some(fraction.steps(run)));
    }

    /// Counts the evaluations of a run, whose first epochs have `epoch_steps` steps.
    pub(crate) fn n_evaluations(&self, RunLength { total_steps, epoch_steps }: RunLength) -> usize {
        let interval = self.interval.unwrap_or(epoch_steps);
        let n_before_end = total_steps.saturating_sub(1).checked_div(interval).unwrap_or(0);
        usize::from(self.on_start) + n_before_end + usize::from(total_steps > 0)
    }

    /// Returns true if this step is evaluated.
    pub fn is_due(&self, moment: Moment) -> bool {
        let Moment { step, finished_epoch, end_of_training } = moment;
        let falls_on = self.interval.map_or(finished_epoch.is_some(), |interval| step.is_multiple_of(interval));
        step > 0 && (falls_on || end_of_training)
    }
}
