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
    Asked, Engine, LossScale, Micro, Optimizer, Residency, StepLoss, StepLosses, StepReport, StepResult, Tokens,
    TrainBatch,
};
pub use groups::Groups;
pub use kv_cache::KvCache;
pub use kv_pool::{Growing, Growth, KvPool};
pub use objective::{AuxiliaryLoss, CausalLm, MicroLoss, Objective, TokenLosses};
pub use offload::Parking;
pub use params::{
    CpuOffload, Formats, MicroBatch, Mode, ParamState, ParamStore, ShardingGroups, StoreBytes, StoreOptions, ZeroStage,
};
pub use pipeline::{Action, Layout, Pass, Pipeline, Schedule, Timetable};
pub use placement::{SequenceParallel, max_shard_numel};
pub use regions::Regions;
pub use sequence::Sequence;
pub use tensor::TensorRanks;
