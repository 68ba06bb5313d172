//! Every way to share the work among ranks gives what one rank gives: losses, every gradient, and the weights after some
//! steps. Each way is also seen to fail when one of its collectives lies.
//!
//! All in f32; ranks are threads of this process. Sums over ranks round in another order than those of one rank do: a relative
//! 1e-5 of a gradient's norm is what some hundred such roundings come to at most.

#![allow(clippy::unwrap_used, missing_docs)]

mod case;
mod rank;
mod ring;
mod sabotage;

use candlewick_comm::mesh::Degrees;
use candlewick_parallel::Sharded;

use case::{ADAPTER, BATCHINGS, Batching, Kind, MODELS};
use rank::{Outcome, Way, compare, run};
use sabotage::Lie;

const ONE: Degrees = Way::ONE_RANK.degrees;

fn dp(n_ranks: usize) -> Way {
    Way { degrees: Degrees { dp_replicate: n_ranks, ..ONE }, ..Way::ONE_RANK }
}

fn zero(n_ranks: usize, sharded: Sharded) -> Way {
    Way { degrees: Degrees { dp_shard: n_ranks, ..ONE }, sharded: Some(sharded), ..Way::ONE_RANK }
}

fn hybrid(dp_replicate: usize, dp_shard: usize, sharded: Sharded) -> Way {
    Way { degrees: Degrees { dp_replicate, dp_shard, ..ONE }, sharded: Some(sharded), ..Way::ONE_RANK }
}

/// All models in all batchings; and with each of these collectives lying, a difference.
#[track_caller]
fn check(way: Way, collectives: &[Lie]) {
    check_all(way, &MODELS, &BATCHINGS, collectives);
}

#[track_caller]
fn check_all(way: Way, models: &[Kind], batchings: &[Batching], collectives: &[Lie]) {
    for &model in models {
        for &batching in batchings {
            let one_rank = run(Way::ONE_RANK, model, batching, None);
            if let Err(difference) = compare(&run(way, model, batching, None), &one_rank) {
                panic!("{way:?}, {model:?}, {batching:?}: {difference}");
            }
        }
    }
    let (model, batching) = (models[0], batchings[0]);
    let one_rank = run(Way::ONE_RANK, model, batching, None);
    for lie in collectives {
        let lied = run(way, model, batching, Some(*lie));
        assert!(compare(&lied, &one_rank).is_err(), "{way:?}: nobody sees that {lie:?}");
    }
}

#[test]
fn parity_of_replicas() {
    check(dp(2), &[Lie::AllReduce]);
}

#[test]
fn parity_of_three_replicas() {
    check(dp(3), &[Lie::AllReduce]);
}

#[test]
fn parity_of_a_sharded_optimizer() {
    check(zero(2, Sharded::Optimizer), &[Lie::AllReduce, Lie::ReduceScatter, Lie::AllGather]);
}

#[test]
fn parity_of_sharded_gradients() {
    check(zero(3, Sharded::Gradients), &[Lie::AllReduce, Lie::ReduceScatter, Lie::AllGather]);
}

#[test]
fn parity_of_sharded_weights() {
    check(zero(2, Sharded::Weights), &[Lie::AllReduce, Lie::ReduceScatter, Lie::AllGather]);
}

#[test]
fn parity_of_weights_sharded_over_eight() {
    check(zero(8, Sharded::Weights), &[]);
}

#[test]
fn parity_of_replicated_shards() {
    check(hybrid(2, 2, Sharded::Optimizer), &[Lie::AllReduce, Lie::ReduceScatter, Lie::AllGather]);
    check(hybrid(2, 2, Sharded::Gradients), &[]);
    check(hybrid(2, 3, Sharded::Weights), &[Lie::AllReduce, Lie::ReduceScatter, Lie::AllGather]);
}

fn ulysses(dp_shard: usize, sp: usize, sharded: Option<Sharded>) -> Way {
    Way { degrees: Degrees { dp_shard, sp, ..ONE }, sharded, ..Way::ONE_RANK }
}

#[test]
fn parity_of_sequences_in_two_parts() {
    check(ulysses(1, 2, Some(Sharded::Optimizer)), &[Lie::AllToAll, Lie::ReduceScatter, Lie::AllGather]);
}

#[test]
fn parity_of_as_many_parts_as_key_heads() {
    check(ulysses(1, 4, None), &[Lie::AllToAll]);
}

/// Two ranks share each key head.
#[test]
fn parity_of_more_parts_than_key_heads() {
    check(ulysses(1, 8, None), &[Lie::AllToAll]);
}

/// The parts drop what one rank drops.
#[test]
fn parity_of_parts_with_dropout() {
    for batching in BATCHINGS {
        let one_rank = run(Way::ONE_RANK, ADAPTER, batching, None);
        compare(&run(ulysses(1, 4, None), ADAPTER, batching, None), &one_rank).unwrap();
    }
}

#[test]
fn parity_of_parts_and_shards() {
    check(ulysses(2, 2, Some(Sharded::Gradients)), &[Lie::AllToAll, Lie::ReduceScatter, Lie::AllGather]);
    check(ulysses(2, 4, Some(Sharded::Weights)), &[Lie::AllToAll, Lie::ReduceScatter, Lie::AllGather]);
}

/// Without dropout nothing is left to chance: bits do not depend on which rank comes first.
#[test]
fn parity_of_two_runs_is_to_the_bit() {
    for way in [dp(3), zero(4, Sharded::Weights)] {
        let run = || run(way, MODELS[0], BATCHINGS[2], None);
        let bits = |outcome: Outcome| (outcome.losses, outcome.grads, outcome.weights);
        assert!(bits(run()) == bits(run()), "{way:?}");
    }
}
