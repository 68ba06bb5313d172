//! The resolved run: every check, every default and every derived value, computed once.
//!
//! The files of this folder have the plan's types, which are plain data. `resolve` builds them from a recipe.

mod build;
mod eval;
mod facts;
mod model;
mod pipeline;
mod precision;
mod profiling;
mod ranks;
mod resolve;
mod router;
mod run;
mod setting;
mod table;

pub use eval::{BestPlan, EVAL_LOSS, EarlyStoppingPlan, EvalPlan, TasksPlan};
pub use model::{CheckpointingMode, ModelPlan, MtpPlan, TokenizerPlan, WeightInit};
pub(crate) use model::{checkpointing, dtype};
pub use pipeline::PipelinePlan;
pub use precision::{Fp8Plan, Fp8RecipePlan, ScaleRulePlan};
pub use profiling::{MemoryProfilePlan, ProfilingPlan};
pub use ranks::RanksPlan;
pub use resolve::{
    BuildFeatures, Environment, EnvironmentError, HubAccess, HubView, Machines, RecipeLock, TempDir, TrackingEnv,
    WorldInfo,
};
pub(crate) use resolve::{conversation, is_path};
pub use router::{RouterLossTerm, RouterPlan, RoutingReplayPlan};
pub use run::{ExitPlan, GeneratePlan, LoggerPlan, LossWatchdogPlan, MicroBatchChoice, OptimizerPlan, Plan};
pub use setting::ResolvedSetting;
pub(crate) use setting::value_in_words;
pub use table::SettingsFilter;
