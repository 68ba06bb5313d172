//! Process groups of a device mesh.

use std::sync::Arc;

use candle_core::Result;
use candlewick_comm::mesh::{Axis, Mesh};
use candlewick_comm::{Collective, Solo};

use crate::expert_parallel::{ExpertParallel, TokenDispatcher};
use crate::params::{GroupRanks, ShardingGroups, Stages, ZeroStage};
use crate::pipeline::PipelineLayout;
use crate::placement::SequenceParallel;
use crate::tensor_parallel::TensorParallel;

/// Process groups of this rank. Creating them is a collective call.
#[derive(Clone)]
pub struct ParallelGroups {
    /// Data parallel ranks, which train on different tokens.
    pub dp: Arc<dyn Collective>,
    /// Data parallel ranks of all pipeline stages, over which losses are summed.
    pub loss: Arc<dyn Collective>,
    /// Ranks that shard parameters (`dp_shard`, as in torchtitan).
    pub dp_shard: Arc<dyn Collective>,
    /// Ranks that replicate a shard (`dp_replicate`, as in HSDP).
    pub dp_replicate: Arc<dyn Collective>,
    /// Ulysses sequence parallel ranks, which exchange tokens for heads in attention.
    pub sp: Arc<dyn Collective>,
    /// Context parallel ranks, which exchange keys and values (ring attention).
    pub cp: Arc<dyn Collective>,
    /// Tensor parallel ranks.
    pub tp: Arc<dyn Collective>,
    /// Pipeline stages.
    pub pp: Arc<dyn Collective>,
    /// First and last pipeline stage, which hold tied embeddings. On other stages a group of one.
    pub tied_embedding: Arc<dyn Collective>,
    /// Tensor and pipeline parallel ranks of one model replica.
    pub model_parallel: Arc<dyn Collective>,
    /// Ranks of one model replica that is also sharded over `dp_shard`.
    pub model_parallel_shard: Arc<dyn Collective>,
    /// Process groups of expert parameters.
    expert: Option<ExpertGroups>,
}

/// Process groups of expert parameters.
#[derive(Clone)]
struct ExpertGroups {
    /// Expert-data parallel ranks, over which gradients of experts are reduced.
    edp: Arc<dyn Collective>,
    /// Ranks that hold all experts of a stage exactly once: expert parallel ranks times the shards of each expert.
    ep: Arc<dyn Collective>,
    /// Expert tensor parallel ranks, which split each expert.
    etp: Arc<dyn Collective>,
    /// Ranks that hold all experts of all stages exactly once.
    model: Arc<dyn Collective>,
    /// Ranks that hold all experts once if `edp` shards them.
    model_shards: Arc<dyn Collective>,
    /// Ranks that split the tokens of a micro-batch without and with sequence parallelism.
    micro_batch: [Arc<dyn Collective>; 2],
    /// Ranks that split the tokens of a step without and with sequence parallelism.
    step: [Arc<dyn Collective>; 2],
}

impl ParallelGroups {
    /// Creates the process groups of `mesh`. `world` is the group of all its ranks. Collective: all ranks must call it.
    pub fn new(mesh: &Mesh, world: &dyn Collective) -> Result<Self> {
        let dp = [Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Sp];
        let loss = [Axis::Pp, Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Sp];
        let model_parallel_shard = [Axis::Pp, Axis::DpShard, Axis::Cp, Axis::Sp, Axis::Tp];
        let pp = mesh.group(world, &[Axis::Pp])?;
        Ok(Self {
            dp: mesh.group(world, &dp)?,
            loss: mesh.group(world, &loss)?,
            dp_shard: mesh.group(world, &[Axis::DpShard, Axis::Cp, Axis::Sp])?,
            dp_replicate: mesh.group(world, &[Axis::DpReplicate])?,
            sp: mesh.group(world, &[Axis::Sp])?,
            cp: mesh.group(world, &[Axis::Cp])?,
            tp: mesh.group(world, &[Axis::Tp])?,
            tied_embedding: first_and_last(&*pp)?,
            pp,
            model_parallel: mesh.group(world, &[Axis::Pp, Axis::Tp])?,
            model_parallel_shard: mesh.group(world, &model_parallel_shard)?,
            expert: None,
        })
    }

    /// Adds expert parallel groups, for a mixture-of-experts model. Collective: all ranks of `world` must call it.
    pub fn with_experts(self, mesh: &Mesh, world: &dyn Collective) -> Result<Self> {
        let expert = ExpertGroups {
            edp: mesh.group(world, &[Axis::Edp])?,
            ep: mesh.group(world, &[Axis::Ep, Axis::Etp])?,
            etp: mesh.group(world, &[Axis::Etp])?,
            model: mesh.group(world, &[Axis::Pp, Axis::Ep, Axis::Etp])?,
            model_shards: mesh.group(world, &Axis::EXPERT)?,
            micro_batch: [
                mesh.group(world, &[Axis::Cp, Axis::Sp])?,
                mesh.group(world, &[Axis::Cp, Axis::Sp, Axis::Tp])?,
            ],
            step: [
                Arc::clone(&self.dp),
                mesh.group(world, &[Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Sp, Axis::Tp])?,
            ],
        };
        Ok(Self { expert: Some(expert), ..self })
    }

    /// Returns the tensor parallel group with or without sequence parallelism.
    pub fn tensor_parallel(&self, sequence_parallel: SequenceParallel) -> TensorParallel {
        TensorParallel { ranks: Arc::clone(&self.tp), sequence_parallel }
    }

    /// Returns the expert parallel groups; `None` without [`ParallelGroups::with_experts`].
    pub fn expert_parallel(&self, sequence_parallel: SequenceParallel) -> Option<ExpertParallel> {
        let ExpertGroups { ep, etp, micro_batch, step, .. } = self.expert.as_ref()?;
        let of_tokens = |[without, with]: &[Arc<dyn Collective>; 2]| match sequence_parallel {
            SequenceParallel::Off => Arc::clone(without),
            SequenceParallel::On => Arc::clone(with),
        };
        Some(ExpertParallel {
            ep: Arc::clone(ep),
            n_shards: etp.size(),
            micro_batch: of_tokens(micro_batch),
            step: of_tokens(step),
            dispatcher: TokenDispatcher::default(),
        })
    }

    /// Returns true if model replicas exchange tokens of experts, or gather experts from each other (`zero3`). All ranks
    /// must then run equally many forwards.
    pub fn replicas_share_experts(&self, zero3: bool) -> bool {
        self.expert.as_ref().is_some_and(|ExpertGroups { ep, edp, .. }| {
            let (replica, shared) = match zero3 {
                true => (self.dp_shard.size() * self.tp.size(), ep.size() * edp.size()),
                false => (self.tp.size(), ep.size()),
            };
            // Both are consecutive ranks of a stage.
            !replica.is_multiple_of(shared)
        })
    }

    /// Returns the process groups that shard parameters in a ZeRO stage.
    ///
    /// Without a stage, each rank of `dp` holds all parameters of its pipeline stage and tensor parallel rank.
    pub fn sharding_groups(
        &self,
        zero_stage: Option<ZeroStage>,
        layout: PipelineLayout,
        sequence_parallel: SequenceParallel,
    ) -> ShardingGroups {
        let solo: Arc<dyn Collective> = Arc::new(Solo);
        let (shard, replicate, distinct) = match zero_stage {
            Some(_) => (&self.dp_shard, &self.dp_replicate, &self.model_parallel_shard),
            None => (&solo, &self.dp, &self.model_parallel),
        };
        let ranks = |[shard, replicate]: [&Arc<_>; 2], [split, tensor]: [&Arc<_>; 2], distinct: &Arc<_>| {
            let [shard, replicate, split, tensor, distinct] =
                [shard, replicate, split, tensor, distinct].map(Arc::clone);
            GroupRanks { shard, replicate, split, tensor, distinct }
        };
        let dense = ranks([shard, replicate], [&self.tp, &self.tp], distinct);
        let expert = self.expert.as_ref().map(|expert| {
            let ExpertGroups { edp, ep, etp, model, model_shards, .. } = expert;
            match zero_stage {
                Some(_) => ranks([edp, &solo], [ep, etp], model_shards),
                None => ranks([&solo, edp], [ep, etp], model),
            }
        });
        let stages = Stages {
            ranks: Arc::clone(&self.pp),
            layout: Some(layout),
            tied_embedding: Arc::clone(&self.tied_embedding),
        };
        ShardingGroups { zero_stage: zero_stage.unwrap_or(ZeroStage::One), dense, expert, sequence_parallel, stages }
    }
}

/// Returns the group of the first and last pipeline stage; on other stages, a group of one.
fn first_and_last(stages: &dyn Collective) -> Result<Arc<dyn Collective>> {
    let last = stages.size() - 1;
    let ends = if last == 0 { vec![0] } else { vec![0, last] };
    let lists: Vec<_> = std::iter::once(ends).chain((1..last).map(|stage| vec![stage])).collect();
    Ok(stages.split("ties", &lists)?)
}
