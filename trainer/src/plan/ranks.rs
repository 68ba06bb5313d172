//! How the ranks share the work.

use candlewick_comm::mesh::Degrees;
use candlewick_model::Config;
use candlewick_ops::AttentionHeads;
use candlewick_parallel::Sharded;
use serde::Serialize;

use super::resolver::Resolver;
use super::{backend, deepspeed};
use crate::recipe::DdpBackend;

/// The ranks of a run and what each of them has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RanksPlan {
    /// Copies of what falls into shards.
    pub dp_replicate: usize,
    /// Shares of it, among ranks that compute different micro-batches.
    pub dp_shard: usize,
    /// Parts that the tokens of a micro-batch fall into (Ulysses); with `dp_shard` the number of shares.
    pub sequence: usize,
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
        let backend = DdpBackend::Auto;
        Self { dp_replicate: 1, dp_shard: 1, sequence: 1, timeout: 1800, backend, zero_stage: 0 }
    }

    /// Ranks that compute different micro-batches.
    pub fn n_data(&self) -> usize {
        self.dp_replicate * self.dp_shard
    }

    /// The degrees of the mesh.
    pub fn degrees(&self) -> Degrees {
        let Self { dp_replicate, dp_shard, sequence: sp, .. } = *self;
        Degrees { dp_replicate, dp_shard, sp, ..Degrees::default() }
    }

    /// Shares that something falls into.
    pub fn n_shards(&self) -> usize {
        self.dp_shard * self.sequence
    }

    /// What falls into shares, if anything does.
    pub fn sharded(&self) -> Option<Sharded> {
        match self.zero_stage {
            3 => Some(Sharded::Weights),
            2 => Some(Sharded::Gradients),
            1 => Some(Sharded::Optimizer),
            _ => None,
        }
    }
}

pub(super) fn resolve(resolver: &mut Resolver, config: Option<&Config>) -> RanksPlan {
    let n_ranks = resolver.known.seat.n_ranks;
    let sequence = sequence(resolver, config);
    let zero_stage = deepspeed::zero_stage(resolver);
    let n_shards = match (zero_stage, deepspeed::shard_size(resolver)) {
        (0, asked) => {
            if asked.is_some() {
                resolver.note(format!("{} has no effect: nothing is sharded in stage 0", deepspeed::SHARD_SIZE));
            }
            sequence
        }
        (_, None) => n_ranks,
        (_, Some(size)) if n_ranks.is_multiple_of(size) && size.is_multiple_of(sequence) => size,
        (_, Some(size)) => {
            let fits = |n: &usize| n_ranks.is_multiple_of(*n) && n.is_multiple_of(sequence);
            let mut message = format!("{}: groups of {size} cannot be made of {n_ranks} ranks", deepspeed::SHARD_SIZE);
            if sequence > 1 {
                message += &format!(" of which {sequence} share a sequence");
            }
            resolver.wrong_because(&[deepspeed::SHARD_SIZE], message, one_of((1..=n_ranks).filter(fits)));
            sequence
        }
    };
    // Of one share nothing is away.
    let zero_stage = if n_shards == 1 { 0 } else { zero_stage };
    let timeout = resolver.positive("ddp_timeout", resolver.recipe().ddp_timeout, 1800);
    let backend = backend::resolve(resolver);
    let (dp_replicate, dp_shard) = (n_ranks / n_shards, n_shards / sequence);
    RanksPlan { dp_replicate, dp_shard, sequence, timeout, backend, zero_stage }
}

/// The parts that sequences fall into. Each rank must get as many attention heads, and know which key heads are theirs.
fn sequence(resolver: &mut Resolver, config: Option<&Config>) -> usize {
    const KEY: &str = "sequence_parallel_size";
    let n_ranks = resolver.known.seat.n_ranks;
    let given = resolver.recipe().sequence_parallel_size;
    let size = resolver.positive(KEY, given, 1).max(1);
    if !n_ranks.is_multiple_of(size) {
        let message = format!("{KEY}: {n_ranks} ranks do not fall into groups of {size}");
        resolver.wrong_because(&[KEY], message, one_of((1..=n_ranks).filter(|n| n_ranks.is_multiple_of(*n))));
        return 1;
    }
    let Some(AttentionHeads { n_query, n_kv, .. }) = config.map(Config::attention_heads) else { return size };
    let fits = |n: &usize| n_query.is_multiple_of(*n) && (n_kv.is_multiple_of(*n) || n.is_multiple_of(n_kv));
    if !fits(&size) {
        let message =
            format!("{KEY}: {n_query} attention heads with {n_kv} key heads cannot be shared by {size} ranks");
        let possible = (1..=n_ranks).filter(|n| n_ranks.is_multiple_of(*n)).filter(fits);
        resolver.wrong_because(&[KEY], message, one_of(possible));
    }
    size
}

fn one_of(numbers: impl Iterator<Item = usize>) -> String {
    let numbers: Vec<String> = numbers.map(|n| n.to_string()).collect();
    format!("use {}", numbers.join(" or "))
}
