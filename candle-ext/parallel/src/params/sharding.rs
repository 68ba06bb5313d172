//! Process groups that shard and replicate parameters (ZeRO), by parameter group kind.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};
use candlewick_comm::{Collective, Solo};
use candlewick_model::{ParamGroupKind, ParamSpec};

use crate::pipeline::PipelineLayout;
use crate::placement::{RankOf, SequenceParallel, SplitRank};

/// Alignment of parameters and shards, in elements: 256 bytes of bf16, for fast GEMMs on GPUs.
pub(crate) const ALIGNMENT: usize = 128;

/// ZeRO stage: buffers that are sharded over the data parallel ranks. Each stage includes the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// Master weights and optimizer states.
    One,
    /// Also gradients: a unit's are unsharded only during its backward.
    Two,
    /// Also weights (as FSDP): a unit's are unsharded only while it computes.
    Three,
}

/// Process groups of all parameters.
#[derive(Clone)]
pub struct ShardingGroups {
    /// ZeRO stage.
    pub(crate) zero_stage: ZeroStage,
    /// Groups of dense parameters, which tensor parallel ranks split.
    pub(crate) dense: GroupRanks,
    /// Groups of experts, which expert parallel ranks split; `None` without expert parallelism.
    pub(crate) expert: Option<GroupRanks>,
    /// Sequence parallelism of the residual stream.
    pub(crate) sequence_parallel: SequenceParallel,
    /// Pipeline stages.
    pub(crate) stages: Stages,
}

/// Process groups of one parameter group kind. Gradients are reduced over `shard` and `replicate`.
#[derive(Clone)]
pub(crate) struct GroupRanks {
    /// Ranks that shard the parameters, in shard order.
    pub(crate) shard: Arc<dyn Collective>,
    /// Ranks that replicate a shard.
    pub(crate) replicate: Arc<dyn Collective>,
    /// Ranks that split the parameters: tensor parallel ranks, or the expert parallel ranks with their shards of experts.
    pub(crate) split: Arc<dyn Collective>,
    /// Neighbours in `split` that split each matrix: tensor parallel ranks, or expert tensor parallel ranks.
    pub(crate) tensor: Arc<dyn Collective>,
    /// Ranks of all stages that hold distinct elements, over which gradient norms are summed.
    pub(crate) distinct: Arc<dyn Collective>,
}

/// Stages of a pipeline.
#[derive(Clone)]
pub(crate) struct Stages {
    /// Process group of the stages.
    pub(crate) ranks: Arc<dyn Collective>,
    /// Layers of each stage; `None` for a single stage.
    pub(crate) layout: Option<PipelineLayout>,
    /// First and last stage, which hold tied parameters. On other stages a group of one.
    pub(crate) tied_embedding: Arc<dyn Collective>,
}

impl ShardingGroups {
    /// Returns the groups of a single rank.
    pub fn single_rank() -> Self {
        let solo = || Arc::new(Solo) as Arc<dyn Collective>;
        let ranks = || GroupRanks { shard: solo(), replicate: solo(), split: solo(), tensor: solo(), distinct: solo() };
        Self {
            zero_stage: ZeroStage::One,
            dense: ranks(),
            expert: Some(ranks()),
            sequence_parallel: SequenceParallel::Off,
            stages: Stages { ranks: solo(), layout: None, tied_embedding: solo() },
        }
    }

    /// Returns the process groups of a parameter.
    pub(crate) fn ranks_of(&self, spec: &ParamSpec) -> Result<&GroupRanks> {
        match self.ranks(spec.group) {
            Some(ranks) => Ok(ranks),
            None => bail!("{} belongs to an expert, and the mesh was made without expert parallel groups", spec.name),
        }
    }

    /// Returns the process groups of a kind, if there are any.
    pub(crate) fn ranks(&self, kind: ParamGroupKind) -> Option<&GroupRanks> {
        match kind {
            ParamGroupKind::Dense => Some(&self.dense),
            ParamGroupKind::Expert => self.expert.as_ref(),
        }
    }
}

impl GroupRanks {
    /// Returns the length of a flat buffer of `n` elements, padded to equal shards.
    pub(crate) fn padded(&self, n: usize) -> usize {
        n.next_multiple_of(ALIGNMENT * self.shard.size())
    }

    /// Returns this rank's shard of a padded flat buffer of `n` elements.
    pub(crate) fn own(&self, n: usize) -> Range<usize> {
        let len = n / self.shard.size();
        self.shard.rank() * len..(self.shard.rank() + 1) * len
    }

    /// Returns this rank's position among the ranks that split the parameters.
    pub(crate) fn split_rank(&self) -> SplitRank {
        let n_tensor = self.tensor.size();
        let expert = RankOf { rank: self.split.rank() / n_tensor, n_ranks: self.split.size() / n_tensor };
        SplitRank { expert, tensor: RankOf { rank: self.tensor.rank(), n_ranks: n_tensor } }
    }
}

impl Stages {
    /// Returns the stage that owns a unit.
    pub(crate) fn owner(&self, unit_idx: usize) -> usize {
        self.layout.as_ref().map_or(0, |layout| layout.stage_of(unit_idx))
    }

    /// Returns true if this stage owns a unit.
    pub(crate) fn owns(&self, unit_idx: usize) -> bool {
        self.owner(unit_idx) == self.ranks.rank()
    }
}
