//! Distributed training and inference engine: parameter sharding, pipeline, tensor, sequence and context parallelism.
//!
//! Kernels are in `candlewick-ops`, model families in `candlewick-model`.

mod assembly;
mod batch;
mod context_parallel;
mod engine;
mod expert_parallel;
mod groups;
mod kv_cache;
mod kv_cache_pool;
mod objective;
mod offload;
mod optimizer;
mod params;
mod pipeline;
mod placement;
mod prefix_tree;
mod routing;
mod row_allocator;
mod tensor_parallel;

pub use assembly::EngineSpec;
pub use batch::{ColumnScope, ColumnSpec, Micro, MicroColumn, MicroColumns, StepMicros};
pub use context_parallel::{ContextParallel, ring_exchange};
pub use engine::{
    ActivationCheckpointing, Engine, Fp8LayerStats, HeadCost, InFlightStep, LossScale, OffloadMemory, OptimizerStep,
    PackedTokens, ScoreQuery, SideOutput, SideOutputs, StepBytes, StepCost, StepLoss, StepLosses, StepResult,
    TrainBatch, ZeroGradCount, mtp_loss_name,
};
pub use expert_parallel::{ExpertParallel, TokenDispatcher};
pub use groups::ParallelGroups;
pub use kv_cache::KvCache;
pub use kv_cache_pool::{AppendTokens, KvAppend, KvCachePool};
pub use objective::{
    AuxiliaryLoss, CausalLm, LossNormalizer, MetricReduction, MetricSpec, MicroLoss, OBJECTIVES, Objective,
    REFERENCE_LOG_PROBS, ReferenceModel, TokenLosses,
};
pub use offload::OffloadTarget;
pub use optimizer::{
    DecayedParams, ElementUpdates, GroupsError, Hyperparameter, HyperparameterRange, KindDeclaration, MatrixUpdates,
    OPTIMIZER_KINDS, OptimizerGroup, OptimizerGroups, OptimizerKind, ParamPattern, ShardUpdate, SlotDtype, StateSlot,
    StepUpdates, UpdateNeed,
};
pub use params::{
    BufferState, CpuOffload, MasterRounding, MicroBatch, ParamDtypes, ParamState, ParamStore, ShardingGroups,
    StoreBytes, StoreMode, StoreOptions, ZeroStage, whole_matrix_shard_len,
};
pub use pipeline::{ChunkPass, Pipeline, PipelineLayout, PipelineSchedule, PipelineScheduleKind, StageStep};
pub use placement::{SequenceParallel, SplitSizes, max_shard_bytes, max_shard_numel};
pub use prefix_tree::{Prefix, PrefixKvCache, PrefixTreeAttention, TokenRun};
pub use routing::{RoutedMicro, StepRouting};
pub use row_allocator::RowAllocator;
pub use tensor_parallel::TensorParallel;
