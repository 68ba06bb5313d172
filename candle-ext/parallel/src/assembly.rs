//! Assembly of an engine from a model, the groups of a mesh, dtypes and a memory plan.

use std::sync::Arc;

use candle_core::{DType, Device, Result};
use candlewick_comm::{Collective, Solo};
use candlewick_model::Model;

use crate::engine::{ActivationCheckpointing, Engine};
use crate::groups::Groups;
use crate::params::{CpuOffload, Formats, Mode, ParamStore, StoreOptions, ZeroStage};
use crate::pipeline::{Layout, Pipeline, Schedule};
use crate::placement::SequenceParallel;
use crate::sequence::Sequence;

/// The dtypes, the parallel layout and the memory plan of an engine.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// Training or inference.
    pub mode: Mode,
    /// The dtypes of weights, masters and moments.
    pub formats: Formats,
    /// The ZeRO stage, if parameters are sharded.
    pub zero_stage: Option<ZeroStage>,
    /// Sequence parallelism of the tensor-parallel ranks.
    pub sequence_parallel: SequenceParallel,
    /// The blocks of each pipeline stage.
    pub layout: Layout,
    /// The pipeline schedule.
    pub schedule: Schedule,
    /// The parameters that lie in the memory of a GPU's host.
    pub cpu_offload: CpuOffload,
    /// The activations that each block keeps for backward.
    pub checkpointing: Vec<ActivationCheckpointing>,
}

impl EngineSpec {
    /// Returns the spec of an engine that trains every block of `layout` with its whole tape kept.
    pub fn training(formats: Formats, layout: Layout) -> Self {
        let checkpointing = vec![ActivationCheckpointing::None; layout.n_blocks()];
        Self {
            mode: Mode::Train,
            formats,
            zero_stage: None,
            sequence_parallel: SequenceParallel::Off,
            layout,
            schedule: Schedule::default(),
            cpu_offload: CpuOffload::default(),
            checkpointing,
        }
    }

    /// Returns the spec of an engine that computes in `dtype` and trains nothing.
    pub fn inference(dtype: DType, layout: Layout) -> Self {
        Self { mode: Mode::Infer, ..Self::training(Formats::computing_in(dtype), layout) }
    }

    /// Builds one rank's engine over `groups`, with parameters that are not yet filled. All ranks call it.
    ///
    /// Training sums losses over the ranks of `groups.loss`. In inference each rank keeps its own.
    pub fn build(self, model: Model, groups: &Groups, device: Device) -> Result<Engine> {
        let Self { mode, formats, zero_stage, sequence_parallel, layout, schedule, cpu_offload, checkpointing } = self;
        let sharding = groups.sharding_groups(zero_stage, layout.clone(), sequence_parallel);
        let options = StoreOptions { formats, mode, cpu_offload };
        let store = ParamStore::of_units(model.units(), options, &device, sharding)?;
        let losses: Arc<dyn Collective> = match mode {
            Mode::Train => Arc::clone(&groups.loss),
            Mode::Infer => Arc::new(Solo),
        };
        let pipeline = Pipeline::new(Arc::clone(&groups.pp), layout, schedule)?;
        let mut engine = Engine::new(model, store, checkpointing, losses, device).with_pipeline(pipeline);
        if groups.cp.size() * groups.sp.size() > 1 {
            engine = engine.with_sequence(Sequence::new(Arc::clone(&groups.cp), Arc::clone(&groups.sp)));
        }
        if groups.tp.size() > 1 {
            engine = engine.with_tensor(groups.tensor_ranks(sequence_parallel));
        }
        Ok(engine)
    }
}
