//! The `optimizer`, `scheduler` and `deepspeed` sections.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::model::JsonMap;
use super::number::{HumanFloat, HumanInt};

/// AdamW. Weight decay is decoupled and spares norms and biases.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerSection {
    /// `fused_adam` (default), `adamw`, `adam` and `cpu_adam` all name the same AdamW.
    #[serde(rename = "type")]
    pub kind: Option<OptimizerType>,
    /// The base learning rate; `lr` is its short name. Default 5e-4.
    #[serde(alias = "lr")]
    pub learning_rate: Option<HumanFloat>,
    /// Default 0.1.
    pub weight_decay: Option<HumanFloat>,
    /// The decay rates of the two moments. Default `[0.9, 0.999]`.
    pub betas: Option<(HumanFloat, HumanFloat)>,
    /// Added to the root of the second moment. Default 1e-8.
    pub eps: Option<HumanFloat>,
}

/// Names of optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerType {
    /// AdamW.
    FusedAdam,
    /// AdamW.
    Adamw,
    /// AdamW.
    Adam,
    /// AdamW.
    CpuAdam,
    /// Not implemented yet.
    FusedAdamMoe,
    /// Not implemented yet.
    CpuAdamMoe,
}

/// How the learning rate moves, with the names and numbers of transformers' `get_scheduler`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerSection {
    /// `huggingface` (default), or `wsd` (also ArcticTraining's `wds`), which is `name: warmup_stable_decay`.
    #[serde(rename = "type")]
    pub kind: Option<SchedulerType>,
    /// The shape. Default `linear`.
    pub name: Option<SchedulerName>,
    /// The share of the run in which the rate rises. Default 0.1. Not used by `constant`.
    pub warmup_ratio: Option<HumanFloat>,
    /// The steps in which the rate rises; excludes `warmup_ratio`.
    #[serde(alias = "num_warmup_steps")]
    pub warmup_steps: Option<HumanInt>,
    /// The decay steps of `type: wsd`; elsewhere they belong into `scheduler_specific_kwargs`.
    pub num_decay_steps: Option<HumanInt>,
    /// The final share of the rate of `type: wsd`; elsewhere it belongs into `scheduler_specific_kwargs`.
    pub min_lr_ratio: Option<HumanFloat>,
    /// Further numbers of the shape.
    pub scheduler_specific_kwargs: SchedulerKwargs,
    /// Moved to `optimizer.learning_rate`.
    #[serde(alias = "lr")]
    pub learning_rate: Option<HumanFloat>,
}

/// Names of scheduler factories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SchedulerType {
    /// transformers' schedules.
    Huggingface,
    /// Warm-up, stable, decay.
    #[serde(alias = "wds")]
    Wsd,
}

/// Names of shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SchedulerName {
    /// The base rate throughout, without warm-up.
    Constant,
    /// The base rate after a warm-up.
    ConstantWithWarmup,
    /// A line to 0.
    Linear,
    /// A cosine to 0.
    Cosine,
    /// Several cosines to 0.
    CosineWithRestarts,
    /// A cosine to `min_lr` or `min_lr_rate`.
    CosineWithMinLr,
    /// Warm-up, stable, decay.
    #[serde(alias = "wsd")]
    WarmupStableDecay,
    /// 1 / sqrt(step).
    InverseSqrt,
    /// A power of the remaining share.
    Polynomial,
}

/// The further arguments of transformers' schedules.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerKwargs {
    /// `cosine*`, `warmup_stable_decay`: waves in the run. Default 0.5 (falls once); of `cosine_with_restarts` 1.
    pub num_cycles: Option<HumanFloat>,
    /// `cosine_with_min_lr`: the final rate.
    pub min_lr: Option<HumanFloat>,
    /// `cosine_with_min_lr`: the final share of the rate.
    pub min_lr_rate: Option<HumanFloat>,
    /// `warmup_stable_decay`: the plateau. Default: what is left over.
    pub num_stable_steps: Option<HumanInt>,
    /// `warmup_stable_decay`: the decay. One of this and `decay_ratio` is required.
    pub num_decay_steps: Option<HumanInt>,
    /// `warmup_stable_decay`: the decay as a share of the run.
    pub decay_ratio: Option<HumanFloat>,
    /// `warmup_stable_decay`: the final share of the rate. Default 0.
    pub min_lr_ratio: Option<HumanFloat>,
    /// `warmup_stable_decay`: `linear` (default), `cosine` or `1-sqrt`.
    pub warmup_type: Option<crate::schedule::Ramp>,
    /// `warmup_stable_decay`: `cosine` (default), `linear` or `1-sqrt`.
    pub decay_type: Option<crate::schedule::Ramp>,
    /// `inverse_sqrt`: default the warm-up steps, or 10,000 without a warm-up.
    pub timescale: Option<HumanInt>,
    /// `polynomial`: the final rate. Default 1e-7.
    pub lr_end: Option<HumanFloat>,
    /// `polynomial`: default 1.
    pub power: Option<HumanFloat>,
}

/// A DeepSpeed config. Keys that cannot matter to one process are accepted, some are read, and all others are refused by
/// name.
pub type DeepSpeedConfig = JsonMap;
