//! Strategies that trade time for memory: tiled MLP, tiled loss, and CPU offload.

use candlewick_comm::mesh::Degrees;
use candlewick_model::TiledMlp;
use candlewick_parallel::{CpuOffload, PipelineScheduleKind, SequenceParallel, TokenDispatcher, ZeroStage};

use super::case::{ADAPTER, BATCHINGS, Batching, DOTS1, EXPERT_MODULES, MODELS, QWEN3_MOE, WEIGHTED_INPUTS};
use super::rank::{STEPS, Strategy, compare, one_rank, run};
use super::{ONE, hybrid, pipeline, tensor, ulysses, zero};

/// Compares with one rank without tiles and offload.
#[track_caller]
fn check(strategy: Strategy) {
    for case in [MODELS[1], MODELS[2], ADAPTER] {
        for batching in [BATCHINGS[0], BATCHINGS[1], Batching::Accumulated(3)] {
            // Data parallel ranks have other micro-batches, and so other dropout masks.
            if case.has_dropout() && strategy.degrees.dp_replicate * strategy.degrees.dp_shard > 1 {
                continue;
            }
            if let Err(difference) = compare(&run(strategy, case, batching), &one_rank(case, batching, STEPS)) {
                panic!("{strategy:?}, {case:?}, {batching:?}: {difference}");
            }
        }
    }
}

/// Tiles the MLP by at most 32 tokens, and the loss by at most 16 rows of half of the vocabulary.
fn tiled(strategy: Strategy) -> Strategy {
    Strategy { tiled_mlp: TiledMlp::On, logits_bytes: Some(1600), ..strategy }
}

#[test]
fn parity_of_tiles_and_tensor_parallelism() {
    for sequence_parallel in [SequenceParallel::On, SequenceParallel::Off] {
        check(tiled(tensor(Degrees { tp: 2, ..ONE }, sequence_parallel)));
    }
    check(tiled(tensor(Degrees { tp: 4, ..ONE }, SequenceParallel::On)));
}

#[test]
fn parity_of_tiles_and_a_pipeline() {
    check(tiled(pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[2, 2])));
    check(tiled(pipeline(Degrees { pp: 2, tp: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[1, 1, 1, 1])));
}

#[test]
fn parity_of_tiles_and_sharded_weights() {
    check(tiled(zero(2, ZeroStage::Three)));
}

#[test]
fn parity_of_tiles_and_ulysses() {
    check(tiled(ulysses(1, 2, None)));
    check(tiled(ulysses(1, 4, Some(ZeroStage::Three))));
}

/// Ranks compute other numbers of tiles, because they receive other numbers of rows. The loss has one tile, because data parallel
/// ranks would have other numbers of its exchanges.
#[test]
fn parity_of_tiles_of_experts() {
    for (degrees, zero_stage, token_dispatcher) in [
        (ONE, None, TokenDispatcher::AllToAll),
        (Degrees { dp_replicate: 4, ep: 4, ..ONE }, None, TokenDispatcher::AllToAll),
        (Degrees { dp_shard: 4, ep: 2, etp: 2, ..ONE }, Some(ZeroStage::Three), TokenDispatcher::AllToAll),
        (Degrees { tp: 2, dp_shard: 2, ep: 2, ..ONE }, Some(ZeroStage::One), TokenDispatcher::AllGather),
        (Degrees { cp: 2, ep: 2, ..ONE }, None, TokenDispatcher::AllGather),
    ] {
        let (tiled_mlp, sequence_parallel) = (TiledMlp::On, SequenceParallel::On);
        let strategy =
            Strategy { degrees, zero_stage, token_dispatcher, sequence_parallel, tiled_mlp, ..Strategy::ONE_RANK };
        for case in [DOTS1, QWEN3_MOE, EXPERT_MODULES, WEIGHTED_INPUTS] {
            for batching in [Batching::Packed, Batching::Accumulated(2)] {
                if let Err(difference) = compare(&run(strategy, case, batching), &one_rank(case, batching, STEPS)) {
                    panic!("{strategy:?}, {case:?}, {batching:?}: {difference}");
                }
            }
        }
    }
}

#[test]
fn parity_of_cpu_offload() {
    let (half, all) = (CpuOffload { optimizer: 0.5, weights: false }, CpuOffload { optimizer: 1.0, weights: false });
    let weights = CpuOffload { optimizer: 1.0, weights: true };
    for (strategy, cpu_offload) in [
        (zero(2, ZeroStage::One), half),
        (zero(3, ZeroStage::One), all),
        (zero(2, ZeroStage::Three), half),
        (zero(3, ZeroStage::Three), weights),
        (hybrid(2, 2, ZeroStage::Three), weights),
        (
            Strategy {
                zero_stage: Some(ZeroStage::Three),
                ..tensor(Degrees { tp: 2, dp_shard: 2, ..ONE }, SequenceParallel::On)
            },
            weights,
        ),
    ] {
        check(Strategy { cpu_offload, ..strategy });
    }
}
