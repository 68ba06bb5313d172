//! How the ranks share the work.

use candlewick_comm::mesh::Degrees;
use candlewick_parallel::Sharded;
use serde::Serialize;

use super::deepspeed;
use super::resolver::Resolver;

/// The ranks of a run and what each of them has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RanksPlan {
    /// Copies of what falls into shards.
    pub dp_replicate: usize,
    /// Shares of it.
    pub dp_shard: usize,
    /// The ZeRO stage: nothing is sharded (0), the optimizer's state (1), gradients too (2), weights too (3).
    pub zero_stage: usize,
}

impl RanksPlan {
    /// The plan of a single rank.
    pub fn alone() -> Self {
        Self { dp_replicate: 1, dp_shard: 1, zero_stage: 0 }
    }

    /// Ranks that compute different micro-batches.
    pub fn n_data(&self) -> usize {
        self.dp_replicate * self.dp_shard
    }

    /// The degrees of the mesh.
    pub fn degrees(&self) -> Degrees {
        Degrees { dp_replicate: self.dp_replicate, dp_shard: self.dp_shard, ..Degrees::default() }
    }

    /// What falls into shares.
    pub fn sharded(&self) -> Sharded {
        match self.zero_stage {
            3 => Sharded::Weights,
            2 => Sharded::Gradients,
            _ => Sharded::Optimizer,
        }
    }
}

pub(super) fn resolve(resolver: &mut Resolver) -> RanksPlan {
    let n_ranks = resolver.known.seat.n_ranks;
    let zero_stage = deepspeed::zero_stage(resolver);
    let asked = deepspeed::shard_size(resolver);
    let dp_shard = match (zero_stage, asked) {
        (0, _) => 1,
        (_, None) => n_ranks,
        (_, Some(size)) if n_ranks.is_multiple_of(size) => size,
        (_, Some(size)) => {
            let divisors: Vec<String> =
                (1..=n_ranks).filter(|n| n_ranks.is_multiple_of(*n)).map(|n| n.to_string()).collect();
            let message = format!("{}: groups of {size} ranks cannot be made of {n_ranks}", deepspeed::SHARD_SIZE);
            resolver.wrong_because(&[deepspeed::SHARD_SIZE], message, format!("use one of {}", divisors.join(", ")));
            1
        }
    };
    // Of one share nothing is away.
    let zero_stage = if dp_shard == 1 { 0 } else { zero_stage };
    RanksPlan { dp_replicate: n_ranks / dp_shard, dp_shard, zero_stage }
}
