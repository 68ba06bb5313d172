//! The `optimizer`, `scheduler` and `deepspeed` sections.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::model::JsonMap;
use super::number::{HumanFloat, HumanInt};

/// The optimizer, with decoupled weight decay that is not applied to norms and biases, and groups of parameters with settings of
/// their own.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerSection {
    /// The optimizer. All types are AdamW. Default `fused_adam`.
    #[serde(rename = "type")]
    pub kind: Option<OptimizerType>,
    /// The peak learning rate; `lr` is an alias. Default: 2e-5 for a pretrained model, 2e-4 for an adapter, 5e-4 from random
    /// weights and in ArcticTraining's dialect.
    #[serde(alias = "lr")]
    pub learning_rate: Option<HumanFloat>,
    /// The weight decay. Default: 0 for a pretrained model or an adapter, 0.1 from random weights and in ArcticTraining's
    /// dialect.
    pub weight_decay: Option<HumanFloat>,
    /// The decay rates of the two moments. Default `[0.9, 0.999]`.
    pub betas: Option<(HumanFloat, HumanFloat)>,
    /// A constant added to the square root of the second moment. Default 1e-8.
    pub eps: Option<HumanFloat>,
    /// Rounds updated master weights in bf16 up or down at random, with the right mean, so that small updates are not lost.
    /// The name is that of torchao's AdamW. Needs `deepspeed.bf16.bf16_master_weights_and_grads: true`. Default false.
    pub bf16_stochastic_round: Option<bool>,
    /// Groups of parameters with settings of their own. The first group whose pattern a parameter's name has counts. Default:
    /// none.
    pub groups: Vec<OptimizerGroupSection>,
}

/// Parameters with optimizer settings of their own.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerGroupSection {
    /// The name of the group in logs and metrics. Default: `group_` and its number, counted from 0.
    pub name: Option<String>,
    /// A regular expression that is searched in the names of the parameters, as Python's `re.search`: `embed_tokens|lm_head`,
    /// `lora_B`. Required. Each group must have a trained parameter that no earlier group has.
    pub pattern: Option<String>,
    /// The optimizer of the group. Default: `optimizer.type`.
    #[serde(rename = "type")]
    pub kind: Option<OptimizerType>,
    /// The peak learning rate of the group; `lr` is an alias. The schedule is that of the run. Default:
    /// `learning_rate_factor` times `optimizer.learning_rate`.
    #[serde(alias = "lr")]
    pub learning_rate: Option<HumanFloat>,
    /// The factor on `optimizer.learning_rate`. Not allowed with `learning_rate`. LoRA+'s ratio is this factor of `lora_B`.
    /// Default 1.
    pub learning_rate_factor: Option<HumanFloat>,
    /// The weight decay of all parameters of the group, norms and biases included. Default: `optimizer.weight_decay`, which is not
    /// applied to norms and biases.
    pub weight_decay: Option<HumanFloat>,
    /// The decay rates of the two moments. Default: those of `optimizer`.
    pub betas: Option<(HumanFloat, HumanFloat)>,
    /// A constant added to the square root of the second moment. Default: that of `optimizer`.
    pub eps: Option<HumanFloat>,
}

/// The optimizer.
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
    /// AdamW. Experts always have parameter groups of their own.
    FusedAdamMoe,
    /// AdamW. Experts always have parameter groups of their own.
    CpuAdamMoe,
}

/// The learning rate schedule, with the names and arguments of transformers' `get_scheduler`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerSection {
    /// The scheduler type: `huggingface` (default) or `wsd`, which is `name: warmup_stable_decay`. ArcticTraining names it
    /// `wds`.
    #[serde(rename = "type")]
    pub kind: Option<SchedulerType>,
    /// The shape of the schedule. Default `linear`.
    pub name: Option<SchedulerName>,
    /// The warm-up as a fraction of the run. Default 0.1. `constant` has no warm-up.
    pub warmup_ratio: Option<HumanFloat>,
    /// The warm-up in steps. Not allowed with `warmup_ratio`. Default: `warmup_ratio` decides.
    #[serde(alias = "num_warmup_steps")]
    pub warmup_steps: Option<HumanInt>,
    /// The warm-up in training tokens, rounded up to a full step. Not allowed with `warmup_steps` or `warmup_ratio`. Default:
    /// `warmup_ratio` decides.
    pub warmup_tokens: Option<HumanInt>,
    /// The decay of `type: wsd` in steps. Other types set it in `scheduler_specific_kwargs`.
    pub num_decay_steps: Option<HumanInt>,
    /// The decay of `type: wsd` in training tokens, rounded up to a full step. Not allowed with another length of the decay.
    pub num_decay_tokens: Option<HumanInt>,
    /// The final learning rate of `type: wsd` as a fraction of the peak. Other types set it in
    /// `scheduler_specific_kwargs`. Default 0.
    pub min_lr_ratio: Option<HumanFloat>,
    /// Further arguments of the schedule.
    pub scheduler_specific_kwargs: SchedulerKwargs,
    /// Moved to `optimizer.learning_rate`.
    #[serde(alias = "lr")]
    pub learning_rate: Option<HumanFloat>,
}

/// The scheduler type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SchedulerType {
    /// transformers' schedules.
    Huggingface,
    /// Warm-up, stable, decay.
    #[serde(alias = "wds")]
    Wsd,
}

/// The shape of the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SchedulerName {
    /// The peak learning rate throughout, without warm-up.
    Constant,
    /// The peak learning rate after a warm-up.
    ConstantWithWarmup,
    /// Linear decay to 0.
    Linear,
    /// Cosine decay to 0.
    Cosine,
    /// Several cosine decays to 0.
    CosineWithRestarts,
    /// Cosine decay to `min_lr` or `min_lr_rate`.
    CosineWithMinLr,
    /// Warm-up, stable, decay.
    #[serde(alias = "wsd")]
    WarmupStableDecay,
    /// 1 / sqrt(step).
    InverseSqrt,
    /// A power of the remaining fraction of the run.
    Polynomial,
}

/// The further arguments of transformers' schedules.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerKwargs {
    /// `cosine*`, `warmup_stable_decay`: the number of cosine periods. Default 0.5 (one decay); of `cosine_with_restarts`
    /// 1.
    pub num_cycles: Option<HumanFloat>,
    /// `cosine_with_min_lr`: the final learning rate. One of this and `min_lr_rate` is required.
    pub min_lr: Option<HumanFloat>,
    /// `cosine_with_min_lr`: the final learning rate as a fraction of the peak.
    pub min_lr_rate: Option<HumanFloat>,
    /// `warmup_stable_decay`: the stable phase in steps. Default: the rest of the run.
    pub num_stable_steps: Option<HumanInt>,
    /// `warmup_stable_decay`: the decay in steps. One of this and `decay_ratio` is required.
    pub num_decay_steps: Option<HumanInt>,
    /// `warmup_stable_decay`: the decay as a fraction of the run.
    pub decay_ratio: Option<HumanFloat>,
    /// `warmup_stable_decay`: the final learning rate as a fraction of the peak. Default 0.
    pub min_lr_ratio: Option<HumanFloat>,
    /// `warmup_stable_decay`: the shape of the warm-up: `linear` (default), `cosine` or `1-sqrt`.
    pub warmup_type: Option<crate::schedule::Ramp>,
    /// `warmup_stable_decay`: the shape of the decay: `cosine` (default), `linear` or `1-sqrt`.
    pub decay_type: Option<crate::schedule::Ramp>,
    /// `inverse_sqrt`: the time scale in steps. Default: the warm-up steps, or 10,000 without a warm-up.
    pub timescale: Option<HumanInt>,
    /// `polynomial`: the final learning rate. Default 1e-7.
    pub lr_end: Option<HumanFloat>,
    /// `polynomial`: the exponent. Default 1.
    pub power: Option<HumanFloat>,
}

/// A DeepSpeed config. Some keys are read, keys that only tune communication have no effect, and others are errors.
pub type DeepSpeedConfig = JsonMap;
