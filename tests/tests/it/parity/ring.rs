//! Ring attention: alone, with Ulysses, and with ZeRO, tensor and pipeline parallelism.

use std::time::Duration;

use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, threads};
use candlewick_model::TiledMlp;
use candlewick_parallel::{Micro, PipelineScheduleKind, SequenceParallel, ZeroStage};

use super::case::{ADAPTER, BATCHINGS, Batching, MODELS, ModelCase, SCALED, WINDOW, micros};
use super::rank::{STEPS, Strategy, compare, data_rank, engine, one_rank, run};
use super::{DP_ALL_REDUCE, ONE, PP_OP, TIED_OP, TP_OPS, ULYSSES_OP, ZERO_OPS, check_all};

/// Models with biases, QK norm, a sliding window, tied and untied embeddings.
const RING_MODELS: [ModelCase; 4] = [MODELS[0], WINDOW, MODELS[2], MODELS[3]];

/// Batchings. In long sequences a rank also attends to distant chunks.
const RING_BATCHINGS: [Batching; 4] = [Batching::Long, BATCHINGS[0], BATCHINGS[1], BATCHINGS[2]];

const RING_OP: &str = "cp send_recv";

pub(crate) fn ring(cp: usize) -> Strategy {
    Strategy { degrees: Degrees { cp, ..ONE }, ..Strategy::ONE_RANK }
}

fn with_ulysses(cp: usize, sp: usize) -> Strategy {
    Strategy { degrees: Degrees { cp, sp, ..ONE }, ..Strategy::ONE_RANK }
}

fn with_shards(cp: usize, dp_shard: usize, zero_stage: ZeroStage) -> Strategy {
    Strategy { degrees: Degrees { cp, dp_shard, ..ONE }, zero_stage: Some(zero_stage), ..Strategy::ONE_RANK }
}

#[test]
fn parity_of_a_ring_of_two() {
    check_all(ring(2), &RING_MODELS, &RING_BATCHINGS, &[RING_OP, DP_ALL_REDUCE]);
}

#[test]
fn parity_of_a_ring_of_three() {
    check_all(ring(3), &RING_MODELS, &RING_BATCHINGS, &[RING_OP, DP_ALL_REDUCE]);
}

#[test]
fn parity_of_a_ring_of_four() {
    check_all(ring(4), &RING_MODELS, &RING_BATCHINGS, &[RING_OP, DP_ALL_REDUCE]);
}

#[test]
fn parity_of_a_ring_with_ulysses() {
    check_all(with_ulysses(2, 2), &RING_MODELS, &RING_BATCHINGS, &[RING_OP, ULYSSES_OP, DP_ALL_REDUCE]);
}

/// Ranks have parts of sequences, whose whole length decides on the frequencies of LongRoPE and dynamic scaling.
#[test]
fn parity_of_sequences_longer_than_the_original_context() {
    let batchings = [BATCHINGS[0], Batching::Long];
    check_all(ring(2), &SCALED, &batchings, &[RING_OP, DP_ALL_REDUCE]);
    check_all(with_ulysses(2, 2), &SCALED, &batchings, &[RING_OP, ULYSSES_OP]);
}

/// Some ranks have tokens of one chunk, others of both; two ranks share each KV head.
#[test]
fn parity_of_a_ring_of_two_with_ulysses_over_eight() {
    check_all(with_ulysses(2, 8), &[MODELS[2], WINDOW], &[Batching::Long], &[RING_OP, ULYSSES_OP]);
}

#[test]
fn parity_of_a_ring_with_a_sharded_optimizer() {
    check_all(with_shards(2, 1, ZeroStage::One), &RING_MODELS, &RING_BATCHINGS, &[RING_OP, ZERO_OPS[0], ZERO_OPS[1]]);
}

#[test]
fn parity_of_a_ring_with_sharded_gradients() {
    check_all(with_shards(2, 2, ZeroStage::Two), &RING_MODELS, &RING_BATCHINGS, &[RING_OP, ZERO_OPS[0], ZERO_OPS[1]]);
}

#[test]
fn parity_of_a_ring_with_sharded_weights() {
    check_all(with_shards(2, 2, ZeroStage::Three), &RING_MODELS, &RING_BATCHINGS, &[RING_OP, ZERO_OPS[0], ZERO_OPS[1]]);
    let degrees = Degrees { cp: 2, sp: 2, dp_shard: 2, ..ONE };
    let strategy = Strategy { degrees, zero_stage: Some(ZeroStage::Three), ..Strategy::ONE_RANK };
    check_all(strategy, &[MODELS[0]], &[Batching::Long], &[RING_OP, ZERO_OPS[0], ZERO_OPS[1]]);
}

/// Context parallelism combined with tensor parallelism.
#[test]
fn parity_of_a_ring_with_tensor_parallelism() {
    for (sequence_parallel, known) in [(SequenceParallel::On, TP_OPS[0]), (SequenceParallel::Off, "tp all_reduce")] {
        let strategy = Strategy { sequence_parallel, ..ring(2) };
        let strategy = Strategy { degrees: Degrees { tp: 2, ..strategy.degrees }, ..strategy };
        check_all(strategy, &[MODELS[1], WINDOW], &[Batching::Long, BATCHINGS[1]], &[RING_OP, known]);
    }
}

#[test]
fn parity_of_a_ring_in_each_stage_of_a_pipeline() {
    for (schedule, zero_stage) in
        [(PipelineScheduleKind::OneForwardOneBackward, Some(ZeroStage::One)), (PipelineScheduleKind::GPipe, None)]
    {
        let degrees = Degrees { pp: 2, cp: 2, ..ONE };
        let strategy = Strategy { degrees, schedule, zero_stage, chunk_layers: Some(&[3, 1]), ..Strategy::ONE_RANK };
        let batchings = [Batching::Accumulated(3), Batching::Long];
        check_all(strategy, &[MODELS[1], MODELS[3]], &batchings, &[RING_OP, PP_OP, TIED_OP]);
    }
}

#[test]
fn parity_of_replicated_sequence_parallel_groups() {
    for (cp, sp, known) in [(2, 1, RING_OP), (1, 2, ULYSSES_OP)] {
        let strategy = Strategy { degrees: Degrees { cp, sp, dp_replicate: 2, ..ONE }, ..Strategy::ONE_RANK };
        check_all(strategy, &[MODELS[1], WINDOW], &[BATCHINGS[2], Batching::Long], &[known, DP_ALL_REDUCE]);
        let degrees = Degrees { cp, sp, dp_replicate: 2, dp_shard: 2, ..ONE };
        let strategy = Strategy { degrees, zero_stage: Some(ZeroStage::Three), ..Strategy::ONE_RANK };
        check_all(strategy, &[MODELS[1]], &[BATCHINGS[2]], &[known, ZERO_OPS[0], "dp_replicate all_reduce"]);
    }
}

/// A rank's tokens are two ranges, and a tile may end inside one. The dropout mask is that of one rank.
#[test]
fn parity_of_a_ring_with_dropout_and_tiles() {
    for strategy in [ring(2), ring(3), with_ulysses(2, 2), with_ulysses(2, 4)] {
        for tiled_mlp in [TiledMlp::Off, TiledMlp::On] {
            for batching in RING_BATCHINGS {
                let one_rank = one_rank(ADAPTER, batching, STEPS);
                compare(&run(Strategy { tiled_mlp, ..strategy }, ADAPTER, batching), &one_rank).unwrap();
            }
        }
    }
}

#[test]
fn parity_of_a_ring_with_tiled_mlps() {
    for case in RING_MODELS {
        let one_rank = one_rank(case, Batching::Long, STEPS);
        let tiled = Strategy { tiled_mlp: TiledMlp::On, ..ring(2) };
        compare(&run(tiled, case, Batching::Long), &one_rank).unwrap();
    }
}

/// Returns the token losses of some micro-batches on each rank, and the loss sums that it computes.
fn token_losses(strategy: Strategy, case: ModelCase, batching: Batching) -> Vec<(Vec<Vec<f32>>, f64)> {
    let options = Options { timeout: Duration::from_secs(120), record: false };
    let run_rank = |world: &World| -> candle_core::Result<_> {
        let engine = engine(world, strategy, case, None)?;
        let (rank, n_ranks) = data_rank(world, strategy);
        let (micros, _) = micros(batching, 7, rank, n_ranks);
        let losses =
            micros.iter().map(|micro: &Micro| engine.token_losses(micro)).collect::<candle_core::Result<_>>()?;
        let sums = micros.iter().map(|micro| engine.loss(micro)).sum::<candle_core::Result<f64>>()?;
        Ok((losses, sums))
    };
    threads::run(strategy.degrees.n_ranks(), options, run_rank).unwrap()
}

#[test]
fn parity_of_the_losses_of_all_tokens() {
    for strategy in [ring(2), ring(3), with_ulysses(1, 4), with_ulysses(2, 2), with_ulysses(3, 2)] {
        for case in RING_MODELS {
            for batching in RING_BATCHINGS {
                let (want, want_sum) = token_losses(Strategy::ONE_RANK, case, batching).remove(0);
                let ranks = token_losses(strategy, case, batching);
                let sum: f64 = ranks.iter().map(|(_, sum)| sum).sum();
                assert!((sum - want_sum).abs() <= 1e-5 * want_sum, "{strategy:?}: {sum}, one rank has {want_sum}");
                for (losses, _) in &ranks {
                    for (ours, want) in losses.iter().zip(&want) {
                        assert_eq!(ours.len(), want.len(), "{strategy:?}");
                        let close = ours.iter().zip(want).all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1.0));
                        assert!(close, "{strategy:?}, {case:?}, {batching:?}: {ours:?}, one rank has {want:?}");
                    }
                }
            }
        }
    }
}
