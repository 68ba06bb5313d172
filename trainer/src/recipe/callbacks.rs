//! The `early_stopping` and `loss_watchdog` sections.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::number::{HumanFloat, HumanInt};

/// Early stopping: ends a run whose evaluations no longer improve.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EarlyStoppingSection {
    /// The metric: `loss` (of the evaluation data), or `TASK/METRIC` of `eval.tasks` such as `arc_easy/acc_norm`. Default:
    /// `metric_for_best_model`, else `loss`, else the first metric of the first task.
    pub metric: Option<String>,
    /// `min` if a lower metric is better, `max` if a higher one is. Default: the direction of the metric's task; `min` for
    /// `loss`.
    pub mode: Option<EarlyStoppingMode>,
    /// The number of consecutive evaluations without an improvement after which the run ends. Default 3.
    pub patience: Option<HumanInt>,
    /// The smallest change of the best value that counts as an improvement. Default 0: any change.
    pub min_delta: Option<HumanFloat>,
}

/// The direction of an improvement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EarlyStoppingMode {
    /// A lower value is better.
    Min,
    /// A higher value is better.
    Max,
}

/// The loss watchdog: detects loss spikes before their update is applied.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LossWatchdogSection {
    /// The reaction to a loss spike: `skip` (default; drops the update), `rewind` (also loads the newest checkpoint, and
    /// continues after the batch of the spike) or `stop` (ends the run with exit code 5).
    pub action: Option<SpikeAction>,
    /// The limit of a loss, as the number of standard deviations above the median of the last losses. The standard deviation
    /// is 1.4826 times the median absolute deviation, or half the distance from the median to the loss that 2.28% of them
    /// exceed, if that is greater. It is at least 0.05. Default 6.
    pub sigma_factor: Option<HumanFloat>,
    /// The number of last losses that determine the limit. Default 128.
    pub rolling_interval_length: Option<HumanInt>,
    /// The number of first steps of the run without this limit. Default: half of `rolling_interval_length`.
    pub warmup_steps: Option<HumanInt>,
    /// A fixed limit of the loss, in addition, which applies from the first step on. Default: none.
    pub max_loss: Option<HumanFloat>,
    /// The number of loss spikes that are skipped or rewound. The next one ends the run. Default 10.
    pub max_events: Option<HumanInt>,
}

/// The reaction to a loss spike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SpikeAction {
    /// Drops the update of the step.
    Skip,
    /// Loads the newest checkpoint, and continues with the data after the step.
    Rewind,
    /// Ends the run.
    Stop,
}
