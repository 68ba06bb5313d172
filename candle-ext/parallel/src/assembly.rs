//! Assembly of an engine from a model, the groups of a mesh, dtypes and a memory plan.

use std::sync::Arc;

use candle_core::{DType, Device, Result};
use candlewick_comm::{Collective, Solo};
use candlewick_model::Model;

use crate::context_parallel::ContextParallel;
use crate::engine::{ActivationCheckpointing, Engine};
use crate::groups::ParallelGroups;
use crate::params::{CpuOffload, ParamDtypes, ParamStore, StoreMode, StoreOptions, ZeroStage};
use crate::pipeline::{Pipeline, PipelineLayout, PipelineScheduleKind};
use crate::placement::SequenceParallel;

/// The dtypes, the parallel layout and the memory plan of an engine.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// Training or inference.
    pub mode: StoreMode,
    /// The dtypes of weights, masters and moments.
    pub dtypes: ParamDtypes,
    /// The ZeRO stage, if parameters are sharded.
    pub zero_stage: Option<ZeroStage>,
    /// ContextParallel parallelism of the tensor-parallel ranks.
    pub sequence_parallel: SequenceParallel,
    /// The blocks of each pipeline stage.
    pub layout: PipelineLayout,
    /// The pipeline schedule.
    pub schedule: PipelineScheduleKind,
    /// The parameters that lie in the memory of a GPU's host.
    pub cpu_offload: CpuOffload,
    /// The activations that each block keeps for backward.
    pub checkpointing: Vec<ActivationCheckpointing>,
}

impl EngineSpec {
    /// Returns the spec of an engine that trains every block of `layout` with its whole tape kept.
    pub fn training(dtypes: ParamDtypes, layout: PipelineLayout) -> Self {
        let checkpointing = vec![ActivationCheckpointing::None; layout.n_blocks()];
        Self {
            mode: StoreMode::Train,
            dtypes,
            zero_stage: None,
            sequence_parallel: SequenceParallel::Off,
            layout,
            schedule: PipelineScheduleKind::default(),
            cpu_offload: CpuOffload::default(),
            checkpointing,
        }
    }

    /// Returns the spec of an engine that computes in `dtype` and trains nothing.
    pub fn inference(dtype: DType, layout: PipelineLayout) -> Self {
        Self { mode: StoreMode::Infer, ..Self::training(ParamDtypes::computing_in(dtype), layout) }
    }

    /// Builds one rank's engine over `groups`, with parameters that are not yet filled. All ranks call it.
    ///
    /// Training sums losses over the ranks of `groups.loss`. In inference each rank keeps its own.
    pub fn build(self, model: Model, groups: &ParallelGroups, device: Device) -> Result<Engine> {
        let Self { mode, dtypes, zero_stage, sequence_parallel, layout, schedule, cpu_offload, checkpointing } = self;
        let sharding = groups.sharding_groups(zero_stage, layout.clone(), sequence_parallel);
        let options = StoreOptions { dtypes, mode, cpu_offload };
        let store = ParamStore::of_units(model.units(), options, &device, sharding)?;
        let losses: Arc<dyn Collective> = match mode {
            StoreMode::Train => Arc::clone(&groups.loss),
            StoreMode::Infer => Arc::new(Solo),
        };
        let pipeline = Pipeline::new(Arc::clone(&groups.pp), layout, schedule)?;
        let mut engine = Engine::new(model, store, checkpointing, losses, device).with_pipeline(pipeline);
        if groups.cp.size() * groups.sp.size() > 1 {
            engine = engine.with_context_parallel(ContextParallel::new(Arc::clone(&groups.cp), Arc::clone(&groups.sp)));
        }
        if groups.tp.size() > 1 {
            engine = engine.with_tensor_parallel(groups.tensor_parallel(sequence_parallel));
        }
        Ok(engine)
    }
}
