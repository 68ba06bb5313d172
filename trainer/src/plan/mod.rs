//! The types of a resolved run, which are plain data. `resolve` builds them from a recipe.

mod build;
mod eval;
mod model;
mod objective;
mod pipeline;
mod precision;
mod profiling;
mod ranks;
mod router;
mod run;
mod setting;

pub use eval::{BestPlan, EVAL_LOSS, EarlyStoppingPlan, EvalPlan, TasksPlan};
pub use model::{CheckpointingMode, ModelPlan, MtpPlan, TokenizerPlan, WeightInit};
pub(crate) use model::{checkpointing, dtype};
pub use objective::ObjectivePlan;
pub use pipeline::PipelinePlan;
pub use precision::{Fp8Plan, Fp8RecipePlan, ScaleRulePlan};
pub use profiling::{MemoryProfilePlan, ProfilingPlan};
pub use ranks::RanksPlan;
pub use router::{RouterLossTerm, RouterPlan, RoutingReplayPlan};
pub use run::{
    ExitPlan, GeneratePlan, LoggerPlan, LossWatchdogPlan, MicroBatchChoice, OptimizerGroupPlan, OptimizerKindPlan,
    OptimizerPlan, Plan,
};
pub use setting::ResolvedSetting;
pub(crate) use setting::value_in_words;
