//! Rows of ring attention: alone, with Ulysses within it, and with what falls into shares.

use std::time::Duration;

use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, threads};
use candlewick_model::TiledMlp;
use candlewick_parallel::{Micro, PipelineScheduleKind, SequenceParallel, ZeroStage};

use super::case::{ADAPTER, BATCHINGS, Batching, Kind, MODELS, WINDOW, micros};
use super::rank::{STEPS, Way, compare, engine, one_rank, run, seat};
use super::{HEADS, IN_PARTS, ONE, SHARES, STAGES, SUM, TIE, check_all};

/// Biases, norms of queries and keys, a window; an output layer that is the embedding, and one that is not.
const IN_RINGS: [Kind; 4] = [MODELS[0], WINDOW, MODELS[2], MODELS[3]];

/// In long sequences a rank also sees chunks that are far from its own.
const AND_LONG: [Batching; 4] = [Batching::Long, BATCHINGS[0], BATCHINGS[1], BATCHINGS[2]];

const AROUND: &str = "cp send_recv";

pub(crate) fn ring(cp: usize) -> Way {
    Way { degrees: Degrees { cp, ..ONE }, ..Way::ONE_RANK }
}

fn with_ulysses(cp: usize, sp: usize) -> Way {
    Way { degrees: Degrees { cp, sp, ..ONE }, ..Way::ONE_RANK }
}

fn with_shards(cp: usize, dp_shard: usize, zero_stage: ZeroStage) -> Way {
    Way { degrees: Degrees { cp, dp_shard, ..ONE }, zero_stage: Some(zero_stage), ..Way::ONE_RANK }
}

#[test]
fn parity_of_a_ring_of_two() {
    check_all(ring(2), &IN_RINGS, &AND_LONG, &[AROUND, SUM]);
}

#[test]
fn parity_of_a_ring_of_three() {
    check_all(ring(3), &IN_RINGS, &AND_LONG, &[AROUND, SUM]);
}

#[test]
fn parity_of_a_ring_of_four() {
    check_all(ring(4), &IN_RINGS, &AND_LONG, &[AROUND, SUM]);
}

#[test]
fn parity_of_a_ring_of_ranks_that_exchange_heads() {
    check_all(with_ulysses(2, 2), &IN_RINGS, &AND_LONG, &[AROUND, HEADS, SUM]);
}

/// Ranks with tokens of one chunk and with tokens of both; two ranks with the same key head.
#[test]
fn parity_of_a_ring_of_two_times_eight() {
    check_all(with_ulysses(2, 8), &[MODELS[2], WINDOW], &[Batching::Long], &[AROUND, HEADS]);
}

#[test]
fn parity_of_a_ring_with_a_sharded_optimizer() {
    check_all(with_shards(2, 1, ZeroStage::One), &IN_RINGS, &AND_LONG, &[AROUND, SHARES[0], SHARES[1]]);
}

#[test]
fn parity_of_a_ring_with_sharded_gradients() {
    check_all(with_shards(2, 2, ZeroStage::Two), &IN_RINGS, &AND_LONG, &[AROUND, SHARES[0], SHARES[1]]);
}

#[test]
fn parity_of_a_ring_with_sharded_weights() {
    check_all(with_shards(2, 2, ZeroStage::Three), &IN_RINGS, &AND_LONG, &[AROUND, SHARES[0], SHARES[1]]);
    let degrees = Degrees { cp: 2, sp: 2, dp_shard: 2, ..ONE };
    let way = Way { degrees, zero_stage: Some(ZeroStage::Three), ..Way::ONE_RANK };
    check_all(way, &[MODELS[0]], &[Batching::Long], &[AROUND, SHARES[0], SHARES[1]]);
}

/// Where sequences in parts meet all else that work is shared by.
#[test]
fn parity_of_a_ring_and_parts_of_matrices() {
    for (sequence_parallel, known) in [(SequenceParallel::On, IN_PARTS[0]), (SequenceParallel::Off, "tp all_reduce")] {
        let way = Way { sequence_parallel, ..ring(2) };
        let way = Way { degrees: Degrees { tp: 2, ..way.degrees }, ..way };
        check_all(way, &[MODELS[1], WINDOW], &[Batching::Long, BATCHINGS[1]], &[AROUND, known]);
    }
}

#[test]
fn parity_of_a_ring_in_each_stage_of_a_pipeline() {
    for (schedule, zero_stage) in
        [(PipelineScheduleKind::OneForwardOneBackward, Some(ZeroStage::One)), (PipelineScheduleKind::GPipe, None)]
    {
        let degrees = Degrees { pp: 2, cp: 2, ..ONE };
        let way = Way { degrees, schedule, zero_stage, runs: Some(&[3, 1]), ..Way::ONE_RANK };
        let batchings = [Batching::Accumulated(3), Batching::Long];
        check_all(way, &[MODELS[1], MODELS[3]], &batchings, &[AROUND, STAGES, TIE]);
    }
}

#[test]
fn parity_of_replicas_of_sequences_in_parts() {
    for (cp, sp, known) in [(2, 1, AROUND), (1, 2, HEADS)] {
        let way = Way { degrees: Degrees { cp, sp, dp_replicate: 2, ..ONE }, ..Way::ONE_RANK };
        check_all(way, &[MODELS[1], WINDOW], &[BATCHINGS[2], Batching::Long], &[known, SUM]);
        let degrees = Degrees { cp, sp, dp_replicate: 2, dp_shard: 2, ..ONE };
        let way = Way { degrees, zero_stage: Some(ZeroStage::Three), ..Way::ONE_RANK };
        check_all(way, &[MODELS[1]], &[BATCHINGS[2]], &[known, SHARES[0], "dp_replicate all_reduce"]);
    }
}

/// A rank's tokens are two ranges, and tiles end in the middle of one: each drops what one rank drops.
#[test]
fn parity_of_a_ring_with_dropout_and_tiles() {
    for way in [ring(2), ring(3), with_ulysses(2, 2), with_ulysses(2, 4)] {
        for tiled_mlp in [TiledMlp::Off, TiledMlp::On] {
            for batching in AND_LONG {
                let one_rank = one_rank(ADAPTER, batching, STEPS);
                compare(&run(Way { tiled_mlp, ..way }, ADAPTER, batching), &one_rank).unwrap();
            }
        }
    }
}

#[test]
fn parity_of_a_ring_with_tiled_mlps() {
    for kind in IN_RINGS {
        let one_rank = one_rank(kind, Batching::Long, STEPS);
        let tiled = Way { tiled_mlp: TiledMlp::On, ..ring(2) };
        compare(&run(tiled, kind, Batching::Long), &one_rank).unwrap();
    }
}

/// The losses of the tokens of some micro-batches, as each rank has them, and the sums that it computes itself.
fn token_losses(way: Way, kind: Kind, batching: Batching) -> Vec<(Vec<Vec<f32>>, f64)> {
    let options = Options { timeout: Duration::from_secs(120), record: false };
    let of_rank = |world: &World| -> candle_core::Result<_> {
        let engine = engine(world, way, kind, None)?;
        let (rank, n_ranks) = seat(world, way);
        let (micros, _) = micros(batching, 7, rank, n_ranks);
        let losses =
            micros.iter().map(|micro: &Micro| engine.token_losses(micro)).collect::<candle_core::Result<_>>()?;
        let sums = micros.iter().map(|micro| engine.loss(micro)).sum::<candle_core::Result<f64>>()?;
        Ok((losses, sums))
    };
    threads::run(way.degrees.n_ranks(), options, of_rank).unwrap()
}

#[test]
fn parity_of_the_losses_of_all_tokens() {
    for way in [ring(2), ring(3), with_ulysses(1, 4), with_ulysses(2, 2), with_ulysses(3, 2)] {
        for kind in IN_RINGS {
            for batching in AND_LONG {
                let (want, want_sum) = token_losses(Way::ONE_RANK, kind, batching).remove(0);
                let ranks = token_losses(way, kind, batching);
                let sum: f64 = ranks.iter().map(|(_, sum)| sum).sum();
                assert!((sum - want_sum).abs() <= 1e-5 * want_sum, "{way:?}: {sum}, one rank has {want_sum}");
                for (losses, _) in &ranks {
                    for (ours, want) in losses.iter().zip(&want) {
                        assert_eq!(ours.len(), want.len(), "{way:?}");
                        let close = ours.iter().zip(want).all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1.0));
                        assert!(close, "{way:?}, {kind:?}, {batching:?}: {ours:?}, one rank has {want:?}");
                    }
                }
            }
        }
    }
}
