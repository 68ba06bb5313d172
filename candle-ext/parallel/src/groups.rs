//! The groups of a mesh that training needs.

use std::sync::Arc;

use candle_core::{Result, bail};
use candlewick_comm::mesh::{Axis, Mesh};
use candlewick_comm::{Collective, Solo};

use crate::params::{GroupRanks, ShardingGroups, Stages, ZeroStage};
use crate::pipeline::Layout;
use crate::placement::SequenceParallel;
use crate::tensor::TensorRanks;

/// This rank's groups. All ranks make them together.
#[derive(Clone)]
pub struct Groups {
    /// The ranks that see different tokens.
    pub data: Arc<dyn Collective>,
    /// The same on all stages of a pipeline: losses are summed over them, which only the last stage knows.
    pub losses: Arc<dyn Collective>,
    /// Those of `data` that keep a share each of what all have in common.
    pub shards: Arc<dyn Collective>,
    /// Those of `data` that keep the same share.
    pub replicas: Arc<dyn Collective>,
    /// Those that share the tokens of a micro-batch and exchange heads in attention.
    pub sequence: Arc<dyn Collective>,
    /// Those that share them and send each other keys and values.
    pub context: Arc<dyn Collective>,
    /// The ranks that share every matrix.
    pub tensor: Arc<dyn Collective>,
    /// The stages of one pipeline.
    pub stages: Arc<dyn Collective>,
    /// The stages that have the same parameter, if the first and the last one do.
    pub ties: Arc<dyn Collective>,
    /// The ranks that have one copy of the model together.
    pub model: Arc<dyn Collective>,
    /// The same with those that keep a share each.
    pub model_shards: Arc<dyn Collective>,
    /// Groups of the experts' parameters.
    expert: Option<ExpertGroups>,
}

/// Groups of the experts' parameters.
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

impl Groups {
    /// Makes the groups of `mesh`; `world` is the group of all its ranks.
    pub fn new(mesh: &Mesh, world: &dyn Collective) -> Result<Self> {
        let shards = [Axis::DpShard, Axis::Cp, Axis::Sp];
        let data = [Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Sp];
        let losses = [Axis::Pp, Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Sp];
        let model_shards = [Axis::Pp, Axis::DpShard, Axis::Cp, Axis::Sp, Axis::Tp];
        let stages = mesh.group(world, &[Axis::Pp])?;
        Ok(Self {
            data: mesh.group(world, &data)?,
            losses: mesh.group(world, &losses)?,
            shards: mesh.group(world, &shards)?,
            replicas: mesh.group(world, &[Axis::DpReplicate])?,
            sequence: mesh.group(world, &[Axis::Sp])?,
            context: mesh.group(world, &[Axis::Cp])?,
            tensor: mesh.group(world, &[Axis::Tp])?,
            ties: ties(&*stages)?,
            stages,
            model: mesh.group(world, &[Axis::Pp, Axis::Tp])?,
            model_shards: mesh.group(world, &model_shards)?,
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

    /// Returns the ranks that share every matrix.
    pub fn tensor_ranks(&self, sequence_parallel: SequenceParallel) -> TensorRanks {
        TensorRanks { ranks: Arc::clone(&self.tensor), sequence_parallel }
    }

    /// Returns the process groups of parameters in a ZeRO stage. Without one each rank of `data` keeps all parameters of its
    /// stage and tensor parallel rank.
    pub fn sharding_groups(
        &self,
        zero_stage: Option<ZeroStage>,
        layout: Layout,
        sequence_parallel: SequenceParallel,
    ) -> ShardingGroups {
        let solo: Arc<dyn Collective> = Arc::new(Solo);
        let (shard, replicate, distinct) = match zero_stage {
            Some(_) => (&self.shards, &self.replicas, &self.model_shards),
            None => (&solo, &self.data, &self.model),
        };
        let ranks = |shard: &Arc<_>, replicate: &Arc<_>, split: &Arc<_>, distinct: &Arc<_>| {
            let [shard, replicate, split, distinct] = [shard, replicate, split, distinct].map(Arc::clone);
            GroupRanks { shard, replicate, split, distinct }
        };
        let dense = ranks(shard, replicate, &self.tensor, distinct);
        let expert = self.expert.as_ref().map(|expert| match zero_stage {
            Some(_) => ranks(&expert.edp, &solo, &expert.ep, &expert.model_shards),
            None => ranks(&solo, &expert.edp, &expert.ep, &expert.model),
        });
        let stages = Stages { ranks: Arc::clone(&self.stages), layout: Some(layout), ties: Arc::clone(&self.ties) };
        ShardingGroups { zero_stage: zero_stage.unwrap_or(ZeroStage::One), dense, expert, sequence_parallel, stages }
    }
}

/// The first and the last stage of a pipeline, the others alone.
fn ties(stages: &dyn Collective) -> Result<Arc<dyn Collective>> {
    let last = stages.size() - 1;
    let ends = if last == 0 { vec![0] } else { vec![0, last] };
    let lists: Vec<_> = std::iter::once(ends).chain((1..last).map(|stage| vec![stage])).collect();
    Ok(stages.split("ties", &lists)?)
}
