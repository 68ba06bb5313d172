//! Process groups that shard and replicate parameters (ZeRO), a set for each kind of parameter group.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};
use candlewick_comm::{Collective, Solo};
use candlewick_model::{ParamGroupKind, ParamSpec};

use crate::pipeline::PipelineLayout;
use crate::placement::{RankOf, SequenceParallel};

/// Alignment of parameters and shards, in elements: 256 bytes of bf16, for fast GEMMs on GPUs.
pub(crate) const ALIGNMENT: usize = 128;

/// Buffers of which a rank keeps only its shard (ZeRO). Each stage includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// Masters and moments.
    One,
    /// And the reduced gradients: those of a unit are whole during its backward.
    Two,
    /// And the weights: those of a unit are whole while it is computed.
    Three,
}

/// Process groups of all parameters.
#[derive(Clone)]
pub struct ShardingGroups {
    /// Buffers that are sharded.
    pub(crate) zero_stage: ZeroStage,
    /// ParallelGroups of everything but experts; they are split over the tensor parallel ranks.
    pub(crate) dense: GroupRanks,
    /// ParallelGroups of experts, which are split over the expert parallel ranks; `None` on a mesh made without them.
    pub(crate) expert: Option<GroupRanks>,
    /// Tokens that a tensor parallel rank sees outside of branches.
    pub(crate) sequence_parallel: SequenceParallel,
    /// Stages of the pipeline.
    pub(crate) stages: Stages,
}

/// Process groups of one kind of parameter group. Gradients are summed over `shard` and `replicate`.
#[derive(Clone)]
pub(crate) struct GroupRanks {
    /// Ranks that keep one shard each, in shard order.
    pub(crate) shard: Arc<dyn Collective>,
    /// Ranks that keep the same shard.
    pub(crate) replicate: Arc<dyn Collective>,
    /// Ranks that hold a slice each of every matrix: tensor parallel or expert parallel ranks.
    pub(crate) split: Arc<dyn Collective>,
    /// Ranks of all stages that hold no element twice, but for parameters without slices; a norm sums their squares.
    pub(crate) distinct: Arc<dyn Collective>,
}

/// Stages of a pipeline.
#[derive(Clone)]
pub(crate) struct Stages {
    /// The stages.
    pub(crate) ranks: Arc<dyn Collective>,
    /// The stage of each block; `None` for a single stage.
    pub(crate) layout: Option<PipelineLayout>,
    /// Stages that hold the same tied parameter: the first and the last one. Others are alone.
    pub(crate) tied_embedding: Arc<dyn Collective>,
}

impl ShardingGroups {
    /// Returns the groups of a single rank.
    pub fn alone() -> Self {
        let solo = || Arc::new(Solo) as Arc<dyn Collective>;
        let ranks = || GroupRanks { shard: solo(), replicate: solo(), split: solo(), distinct: solo() };
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
    /// Returns the length of a flat run of `n` elements, padded to even shards.
    pub(crate) fn padded(&self, n: usize) -> usize {
        n.next_multiple_of(ALIGNMENT * self.shard.size())
    }

    /// Returns this rank's shard of a padded flat run of `n` elements.
    pub(crate) fn own(&self, n: usize) -> Range<usize> {
        let len = n / self.shard.size();
        self.shard.rank() * len..(self.shard.rank() + 1) * len
    }

    /// Returns this rank's place among those that hold a slice each.
    pub(crate) fn split_rank(&self) -> RankOf {
        RankOf { rank: self.split.rank(), n_ranks: self.split.size() }
    }
}

impl Stages {
    /// Returns the stage that owns a unit.
    pub(crate) fn owner(&self, unit_idx: usize) -> usize {
        self.layout.as_ref().map_or(0, |layout| layout.stage_of(unit_idx))
    }

    /// Returns whether this stage owns a unit.
    pub(crate) fn owns(&self, unit_idx: usize) -> bool {
        self.owner(unit_idx) == self.ranks.rank()
    }
}
