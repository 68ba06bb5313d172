//! The ranks of a run, as a plan has them: the degrees of the mesh and what is sharded.

use candlewick_comm::mesh::Degrees;
use candlewick_parallel::{SequenceParallel, ZeroStage};
use serde::Serialize;

use crate::recipe::DdpBackend;

/// The ranks of a run and what each of them has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RanksPlan {
    /// Copies of what falls into shards.
    pub dp_replicate: usize,
    /// Shares of it, among ranks that compute different micro-batches.
    pub dp_shard: usize,
    /// Parts that the tokens of a micro-batch fall into, between which keys and values go around (a ring).
    pub context: usize,
    /// Parts that those fall into, whose ranks exchange heads (Ulysses); with `dp_shard` and `context` the number of shares.
    pub sequence: usize,
    /// Ranks that share every matrix.
    pub tensor: usize,
    /// Whether these have a part of the tokens each outside of branches.
    pub sequence_parallel: bool,
    /// Stages of a pipeline.
    pub stages: usize,
    /// Seconds for which ranks wait for one that is silent.
    pub timeout: usize,
    /// What connects them.
    pub backend: DdpBackend,
    /// The ZeRO stage: nothing is sharded (0), the optimizer's state (1), gradients too (2), weights too (3).
    pub zero_stage: usize,
}

impl RanksPlan {
    /// The plan of a single rank.
    pub fn alone() -> Self {
        Self {
            dp_replicate: 1,
            dp_shard: 1,
            context: 1,
            sequence: 1,
            tensor: 1,
            sequence_parallel: true,
            stages: 1,
            timeout: 1800,
            backend: DdpBackend::Auto,
            zero_stage: 0,
        }
    }

    /// Ranks that compute different micro-batches.
    pub fn n_data(&self) -> usize {
        self.dp_replicate * self.dp_shard
    }

    /// Ranks that share the tokens of a micro-batch.
    pub fn n_of_micro_batch(&self) -> usize {
        self.context * self.sequence
    }

    /// The degrees of the mesh.
    pub fn degrees(&self) -> Degrees {
        let Self { dp_replicate, dp_shard, context: cp, sequence: sp, tensor: tp, stages: pp, .. } = *self;
        Degrees { pp, dp_replicate, dp_shard, cp, sp, tp, ..Degrees::default() }
    }

    /// Ranks that have one copy of the model together: each has a part of it.
    pub fn n_of_model(&self) -> usize {
        self.tensor * self.stages
    }

    /// All ranks.
    pub fn n_ranks(&self) -> usize {
        self.n_data() * self.n_of_micro_batch() * self.n_of_model()
    }

    /// What ranks that share matrices have outside of branches.
    pub fn sequence_parallel(&self) -> SequenceParallel {
        if self.sequence_parallel { SequenceParallel::On } else { SequenceParallel::Off }
    }

    /// Shares that something falls into.
    pub fn n_shards(&self) -> usize {
        self.dp_shard * self.n_of_micro_batch()
    }

    /// What falls into shares, if anything does.
    pub fn zero_stage(&self) -> Option<ZeroStage> {
        match self.zero_stage {
            3 => Some(ZeroStage::Three),
            2 => Some(ZeroStage::Two),
            1 => Some(ZeroStage::One),
            _ => None,
        }
    }
}
