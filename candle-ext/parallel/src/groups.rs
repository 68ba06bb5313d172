//! The groups of a mesh that training needs.

use std::sync::Arc;

use candle_core::{Result, bail};
use candlewick_comm::mesh::{Axis, Mesh};
use candlewick_comm::{Collective, Solo};

use crate::params::{GroupRanks, ShardingGroups, Stages, ZeroStage};
use crate::pipeline::PipelineLayout;
use crate::placement::SequenceParallel;
use crate::tensor_parallel::TensorParallel;

/// This rank's process groups. All ranks make them together.
#[derive(Clone)]
pub struct ParallelGroups {
    /// Data parallel ranks: those with different tokens.
    pub dp: Arc<dyn Collective>,
    /// Data parallel ranks of all pipeline stages; losses, known on the last stage alone, are summed over them.
    pub loss: Arc<dyn Collective>,
    /// Data parallel ranks that keep one shard each.
    pub dp_shard: Arc<dyn Collective>,
    /// Data parallel ranks that keep the same shard.
    pub dp_replicate: Arc<dyn Collective>,
    /// Ranks that split a micro-batch's tokens and exchange heads in attention (Ulysses).
    pub sp: Arc<dyn Collective>,
    /// Ranks that split a micro-batch's tokens and send each other keys and values (ring attention).
    pub cp: Arc<dyn Collective>,
    /// Tensor parallel ranks: those with a slice each of every matrix.
    pub tp: Arc<dyn Collective>,
    /// Stages of one pipeline.
    pub pp: Arc<dyn Collective>,
    /// Stages that hold a tied embedding: the first and the last one. Others are alone.
    pub tied_embedding: Arc<dyn Collective>,
    /// Ranks that hold one copy of the model together.
    pub model_parallel: Arc<dyn Collective>,
    /// Ranks that hold one copy of the model together, if each of `dp_shard` keeps a shard.
    pub model_parallel_shard: Arc<dyn Collective>,
    /// ParallelGroups of the experts' parameters.
    expert: Option<ExpertGroups>,
}

/// ParallelGroups of the experts' parameters.
#[derive(Clone)]
struct ExpertGroups {
    /// Ranks with the same experts: gradients are summed over them.
    edp: Arc<dyn Collective>,
    /// Ranks with other experts each.
    ep: Arc<dyn Collective>,
    /// Ranks that have all experts of all stages once.
    model: Arc<dyn Collective>,
    /// Ranks that have them once if each of `edp` keeps a shard.
    model_shards: Arc<dyn Collective>,
}

impl ParallelGroups {
    /// Makes the groups of `mesh`; `world` is the group of all its ranks.
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

    /// Adds the groups of experts, for a model that has some. All ranks of `world` call it.
    pub fn with_experts(self, mesh: &Mesh, world: &dyn Collective) -> Result<Self> {
        let etp = mesh.degrees().etp;
        if etp > 1 {
            bail!("etp {etp}: the matrices of an expert cannot be split; set expert tensor parallelism to 1")
        }
        let expert = ExpertGroups {
            edp: mesh.group(world, &[Axis::Edp])?,
            ep: mesh.group(world, &[Axis::Ep])?,
            model: mesh.group(world, &[Axis::Pp, Axis::Ep])?,
            model_shards: mesh.group(world, &[Axis::Pp, Axis::Edp, Axis::Ep])?,
        };
        Ok(Self { expert: Some(expert), ..self })
    }

    /// Returns the tensor parallel ranks.
    pub fn tensor_parallel(&self, sequence_parallel: SequenceParallel) -> TensorParallel {
        TensorParallel { ranks: Arc::clone(&self.tp), sequence_parallel }
    }

    /// Returns the process groups of parameters in a ZeRO stage. Without one each rank of `dp` keeps all parameters of its
    /// stage and tensor parallel rank.
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
        let ranks = |shard: &Arc<_>, replicate: &Arc<_>, split: &Arc<_>, distinct: &Arc<_>| {
            let [shard, replicate, split, distinct] = [shard, replicate, split, distinct].map(Arc::clone);
            GroupRanks { shard, replicate, split, distinct }
        };
        let dense = ranks(shard, replicate, &self.tp, distinct);
        let expert = self.expert.as_ref().map(|expert| match zero_stage {
            Some(_) => ranks(&expert.edp, &solo, &expert.ep, &expert.model_shards),
            None => ranks(&solo, &expert.edp, &expert.ep, &expert.model),
        });
        let stages = Stages {
            ranks: Arc::clone(&self.pp),
            layout: Some(layout),
            tied_embedding: Arc::clone(&self.tied_embedding),
        };
        ShardingGroups { zero_stage: zero_stage.unwrap_or(ZeroStage::One), dense, expert, sequence_parallel, stages }
    }
}

/// The first and the last stage of a pipeline, the others alone.
fn first_and_last(stages: &dyn Collective) -> Result<Arc<dyn Collective>> {
    let last = stages.size() - 1;
    let ends = if last == 0 { vec![0] } else { vec![0, last] };
    let lists: Vec<_> = std::iter::once(ends).chain((1..last).map(|stage| vec![stage])).collect();
    Ok(stages.split("ties", &lists)?)
}
