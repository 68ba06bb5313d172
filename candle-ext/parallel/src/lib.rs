//! Where each weight and activation lives, and when it moves: the block engine and the parameter store.
//!
//! No kernels and no family names: kernels are in `candlewick-ops`, what a block computes is in `candlewick-model`.

mod assembly;
mod branches;
mod engine;
mod groups;
mod kv_cache;
mod kv_pool;
mod objective;
mod offload;
mod params;
mod pipeline;
mod placement;
mod regions;
mod sequence;
mod tensor;

pub use assembly::EngineSpec;
pub use branches::{Branches, Path, Run, Until};
pub use engine::{
    ActivationCheckpointing, Asked, Engine, HeadCost, LossScale, Micro, Optimizer, StepBytes, StepCost, StepLoss,
    StepLosses, StepReport, StepResult, Tokens, TrainBatch,
};
pub use groups::Groups;
pub use kv_cache::KvCache;
pub use kv_pool::{Growing, Growth, KvPool};
pub use objective::{AuxiliaryLoss, CausalLm, MicroLoss, Objective, TokenLosses};
pub use offload::OffloadTarget;
pub use params::{
    CpuOffload, Formats, MicroBatch, Mode, ParamState, ParamStore, ShardingGroups, StoreBytes, StoreOptions, ZeroStage,
};
pub use pipeline::{ChunkPass, Layout, Pipeline, PipelineSchedule, Schedule, StageStep};
pub use placement::{SequenceParallel, max_shard_bytes, max_shard_numel};
pub use regions::Regions;
pub use sequence::{Sequence, ring_exchange};
pub use tensor::TensorRanks;
