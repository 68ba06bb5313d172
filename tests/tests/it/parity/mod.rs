//! Every parallel strategy gives the results of one rank: losses, all gradients, and the weights after some steps. With
//! fault injection into one of its collectives, each strategy fails the comparison.
//!
//! Everything is f32, and ranks are threads of this process. Sums over ranks round in another order than those of one rank:
//! about a hundred such roundings amount to at most 1e-5 of a gradient's norm.

mod case;
mod expert_adapters;
mod experts;
mod f32_residual;
mod faulty_group;
mod fp8;
mod fp8_gather;
mod label_smoothing;
mod master_rounding;
mod mtp;
mod objective;
mod orthogonal_momentum;
mod preference;
mod quantized;
mod rank;
mod ring;
mod router_evaluation;
mod router_step;
mod routers;
mod routing_replay;
mod small_meshes;
mod tiles;
mod whole_matrices;

use std::collections::BTreeSet;

use candlewick_comm::mesh::Degrees;
use candlewick_parallel::{PipelineScheduleKind, SequenceParallel, ZeroStage};

use case::{ADAPTER, BATCHINGS, Batching, MODELS, ModelCase};
use faulty_group::GroupOp;
use rank::{FEW_STEPS, RunResult, STEPS, Strategy, compare, one_rank, run, run_with};

const ONE: Degrees = Strategy::ONE_RANK.degrees;

// Collectives as `group operation`; a group is named by its mesh axes.
const DP_ALL_REDUCE: &str = "dp_replicate-dp_shard-cp-sp all_reduce";
const ZERO_OPS: [&str; 2] = ["dp_shard-cp-sp reduce_scatter", "dp_shard-cp-sp all_gather"];
const ULYSSES_OP: &str = "sp all_to_all";
const TP_OPS: [&str; 2] = ["tp all_gather", "tp reduce_scatter"];
const PP_OP: &str = "pipeline activations send_recv";
const TIED_OP: &str = "ties all_reduce";

fn dp(n_ranks: usize) -> Strategy {
    Strategy { degrees: Degrees { dp_replicate: n_ranks, ..ONE }, ..Strategy::ONE_RANK }
}

fn zero(n_ranks: usize, zero_stage: ZeroStage) -> Strategy {
    Strategy { degrees: Degrees { dp_shard: n_ranks, ..ONE }, zero_stage: Some(zero_stage), ..Strategy::ONE_RANK }
}

fn hybrid(dp_replicate: usize, dp_shard: usize, zero_stage: ZeroStage) -> Strategy {
    Strategy { degrees: Degrees { dp_replicate, dp_shard, ..ONE }, zero_stage: Some(zero_stage), ..Strategy::ONE_RANK }
}

/// Checks all models in all batchings, and checks that a fault in any collective of the strategy is detected. `known` lists
/// some of these collectives as `group operation`.
#[track_caller]
fn check(strategy: Strategy, known: &[&str]) {
    // A pipeline needs several micro-batches.
    let n_micros = if strategy.degrees.pp > 1 { 5 } else { 2 };
    // Faults are injected into the first model: tied, with biases.
    let models = [MODELS[1], MODELS[0], MODELS[2], MODELS[3]];
    let batchings = [Batching::Accumulated(n_micros), Batching::Packed, Batching::Padded];
    check_all(strategy, &models, &batchings, known);
}

#[track_caller]
fn check_all(strategy: Strategy, models: &[ModelCase], batchings: &[Batching], known: &[&str]) {
    let mut used = BTreeSet::new();
    for &model in models {
        for &batching in batchings {
            let ours = run(strategy, model, batching);
            if let Err(difference) = compare(&ours, &one_rank(model, batching, STEPS)) {
                panic!("{strategy:?}, {model:?}, {batching:?}: {difference}");
            }
            if used.is_empty() {
                used = ours.used;
            }
        }
    }
    let names: Vec<String> = used.iter().map(GroupOp::to_string).collect();
    assert!(known.iter().all(|known| names.iter().any(|name| name == known)), "{strategy:?} uses {names:?}");
    let (model, batching) = (models[0], batchings[0]);
    let one_rank = one_rank(model, batching, FEW_STEPS);
    for fault in used {
        let faulty = run_with(strategy, model, batching, FEW_STEPS, Some(&fault));
        assert!(
            faulty.is_err() || compare(&faulty.unwrap(), &one_rank).is_err(),
            "{strategy:?}: a corrupted {fault} is not detected"
        );
    }
}

#[test]
fn parity_of_data_parallelism_over_two_ranks() {
    check(dp(2), &[DP_ALL_REDUCE]);
}

#[test]
fn parity_of_data_parallelism_over_three_ranks() {
    check(dp(3), &[DP_ALL_REDUCE]);
}

#[test]
fn parity_of_a_sharded_optimizer() {
    check(zero(2, ZeroStage::One), &ZERO_OPS);
}

#[test]
fn parity_of_sharded_gradients() {
    check(zero(3, ZeroStage::Two), &ZERO_OPS);
}

#[test]
fn parity_of_sharded_weights() {
    check(zero(2, ZeroStage::Three), &ZERO_OPS);
}

#[test]
fn parity_of_weights_sharded_over_eight() {
    check(zero(8, ZeroStage::Three), &ZERO_OPS);
}

#[test]
fn parity_of_hybrid_sharding() {
    check(hybrid(2, 2, ZeroStage::One), &[ZERO_OPS[0], ZERO_OPS[1], "dp_replicate all_reduce"]);
    check(hybrid(2, 2, ZeroStage::Two), &ZERO_OPS);
    check(hybrid(2, 3, ZeroStage::Three), &ZERO_OPS);
}

fn ulysses(dp_shard: usize, sp: usize, zero_stage: Option<ZeroStage>) -> Strategy {
    Strategy { degrees: Degrees { dp_shard, sp, ..ONE }, zero_stage, ..Strategy::ONE_RANK }
}

#[test]
fn parity_of_ulysses_over_two_ranks() {
    check(ulysses(1, 2, Some(ZeroStage::One)), &[ULYSSES_OP, ZERO_OPS[0], ZERO_OPS[1]]);
}

#[test]
fn parity_of_ulysses_over_as_many_ranks_as_kv_heads() {
    check(ulysses(1, 4, None), &[ULYSSES_OP, DP_ALL_REDUCE]);
}

/// Two ranks share each KV head.
#[test]
fn parity_of_ulysses_over_more_ranks_than_kv_heads() {
    check(ulysses(1, 8, None), &[ULYSSES_OP, DP_ALL_REDUCE]);
}

/// Ulysses ranks have the dropout mask of one rank.
#[test]
fn parity_of_ulysses_with_dropout() {
    for batching in BATCHINGS {
        let one_rank = one_rank(ADAPTER, batching, STEPS);
        compare(&run(ulysses(1, 4, None), ADAPTER, batching), &one_rank).unwrap();
    }
}

#[test]
fn parity_of_ulysses_and_zero() {
    check(ulysses(2, 2, Some(ZeroStage::Two)), &[ULYSSES_OP, ZERO_OPS[0], ZERO_OPS[1]]);
    check(ulysses(2, 4, Some(ZeroStage::Three)), &[ULYSSES_OP, ZERO_OPS[0], ZERO_OPS[1]]);
}

fn tensor(degrees: Degrees, sequence_parallel: SequenceParallel) -> Strategy {
    Strategy { degrees, sequence_parallel, ..Strategy::ONE_RANK }
}

#[test]
fn parity_of_tensor_parallelism_over_two_ranks() {
    check(tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::Off), &["tp all_reduce"]);
    check(tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On), &TP_OPS);
}

/// The vocabulary cannot be divided evenly.
#[test]
fn parity_of_tensor_parallelism_over_four_ranks() {
    check(tensor(Degrees { tp: 4, ..ONE }, SequenceParallel::Off), &["tp all_reduce"]);
    check(tensor(Degrees { tp: 4, ..ONE }, SequenceParallel::On), &TP_OPS);
}

/// Every factor of an adapter is sharded or has a partial gradient. The dropout mask is that of one rank.
#[test]
fn parity_of_tensor_parallel_adapters() {
    for sequence_parallel in [SequenceParallel::Off, SequenceParallel::On] {
        for batching in BATCHINGS {
            let one_rank = one_rank(ADAPTER, batching, STEPS);
            compare(&run(tensor(Degrees { tp: 2, ..ONE }, sequence_parallel), ADAPTER, batching), &one_rank).unwrap();
        }
    }
}

#[test]
fn parity_of_tensor_parallelism_and_zero() {
    let strategy =
        |degrees, zero_stage| Strategy { zero_stage: Some(zero_stage), ..tensor(degrees, SequenceParallel::On) };
    check(strategy(Degrees { tp: 2, dp_shard: 2, ..ONE }, ZeroStage::One), &TP_OPS);
    check(strategy(Degrees { tp: 2, dp_shard: 3, ..ONE }, ZeroStage::Two), &TP_OPS);
    check(strategy(Degrees { tp: 2, dp_shard: 2, dp_replicate: 2, ..ONE }, ZeroStage::Three), &ZERO_OPS);
}

#[test]
fn parity_of_tensor_parallelism_and_ulysses() {
    check(tensor(Degrees { tp: 2, sp: 2, ..ONE }, SequenceParallel::Off), &[ULYSSES_OP, "tp all_reduce"]);
    let strategy = tensor(Degrees { tp: 2, sp: 2, dp_shard: 2, ..ONE }, SequenceParallel::On);
    check(Strategy { zero_stage: Some(ZeroStage::Three), ..strategy }, &[ULYSSES_OP, TP_OPS[0], ZERO_OPS[0]]);
}

fn pipeline(degrees: Degrees, schedule: PipelineScheduleKind, chunk_layers: &'static [usize]) -> Strategy {
    Strategy { degrees, schedule, chunk_layers: Some(chunk_layers), ..Strategy::ONE_RANK }
}

#[test]
fn parity_of_all_forward_all_backward() {
    check(pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::GPipe, &[2, 2]), &[PP_OP, TIED_OP]);
    check(pipeline(Degrees { pp: 3, ..ONE }, PipelineScheduleKind::GPipe, &[2, 1, 1]), &[PP_OP, TIED_OP]);
}

#[test]
fn parity_of_one_forward_one_backward() {
    check(pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[1, 3]), &[PP_OP, TIED_OP]);
    check(
        pipeline(Degrees { pp: 4, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[1, 1, 1, 1]),
        &[PP_OP, TIED_OP],
    );
    check(
        pipeline(Degrees { pp: 3, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[2, 2, 0]),
        &[PP_OP, TIED_OP],
    );
}

#[test]
fn parity_of_interleaved_stages() {
    check(
        pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[1, 1, 1, 1]),
        &[PP_OP, TIED_OP],
    );
    check(pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::GPipe, &[1, 0, 2, 1]), &[PP_OP, TIED_OP]);
    check(
        pipeline(Degrees { pp: 3, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[1, 1, 1, 1, 0, 0]),
        &[PP_OP, TIED_OP],
    );
}

#[test]
fn parity_of_a_pipeline_with_data_parallelism_and_zero() {
    let strategy = |degrees, zero_stage| Strategy {
        zero_stage,
        ..pipeline(degrees, PipelineScheduleKind::OneForwardOneBackward, &[2, 2])
    };
    check(strategy(Degrees { pp: 2, dp_replicate: 2, ..ONE }, None), &[PP_OP, TIED_OP, DP_ALL_REDUCE]);
    check(strategy(Degrees { pp: 2, dp_shard: 2, ..ONE }, Some(ZeroStage::One)), &[PP_OP, TIED_OP, ZERO_OPS[0]]);
    check(strategy(Degrees { pp: 2, dp_shard: 2, ..ONE }, Some(ZeroStage::Two)), &[PP_OP, TIED_OP, ZERO_OPS[0]]);
    check(strategy(Degrees { pp: 2, dp_shard: 3, ..ONE }, Some(ZeroStage::Three)), &[PP_OP, TIED_OP, ZERO_OPS[0]]);
}

#[test]
fn parity_of_a_pipeline_with_tensor_parallelism_and_ulysses() {
    let strategy = |degrees, sequence_parallel, zero_stage, chunk_layers| {
        let schedule = PipelineScheduleKind::OneForwardOneBackward;
        Strategy { sequence_parallel, zero_stage, ..pipeline(degrees, schedule, chunk_layers) }
    };
    check(strategy(Degrees { pp: 2, tp: 2, ..ONE }, SequenceParallel::On, None, &[2, 2]), &[PP_OP, TIED_OP, TP_OPS[0]]);
    check(
        strategy(Degrees { pp: 2, tp: 2, ..ONE }, SequenceParallel::Off, None, &[1, 1, 1, 1]),
        &[PP_OP, TIED_OP, "tp all_reduce"],
    );
    check(
        strategy(Degrees { pp: 2, sp: 2, ..ONE }, SequenceParallel::Off, Some(ZeroStage::Three), &[2, 2]),
        &[PP_OP, TIED_OP, ULYSSES_OP],
    );
    let eight = Degrees { pp: 2, tp: 2, dp_shard: 2, ..ONE };
    check(strategy(eight, SequenceParallel::On, Some(ZeroStage::Three), &[2, 2]), &[PP_OP, TIED_OP, TP_OPS[0]]);
    check(
        strategy(Degrees { pp: 2, tp: 2, sp: 2, ..ONE }, SequenceParallel::On, None, &[3, 1]),
        &[PP_OP, TIED_OP, ULYSSES_OP, TP_OPS[0]],
    );
}

/// Results do not depend on the order in which ranks arrive.
#[test]
fn parity_of_two_runs_is_bitwise() {
    let all = Strategy { chunk_layers: Some(&[2, 2]), ..tensor(Degrees { pp: 2, tp: 2, ..ONE }, SequenceParallel::On) };
    let afab = pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::GPipe, &[2, 2]);
    let ring = Strategy { degrees: Degrees { cp: 3, ..ONE }, ..Strategy::ONE_RANK };
    for strategy in [dp(3), zero(4, ZeroStage::Three), all, ulysses(1, 4, None), ring, afab] {
        let run = || run(strategy, MODELS[0], BATCHINGS[2]);
        let bits = |result: RunResult| (result.losses, result.grads, result.weights);
        assert!(bits(run()) == bits(run()), "{strategy:?}");
    }
}
