//! Every way to share the work among ranks gives what one rank gives: losses, every gradient, and the weights after some
//! steps. Each way is also seen to fail when one of its collectives lies.
//!
//! All in f32; ranks are threads of this process. Sums over ranks round in another order than those of one rank do: a relative
//! 1e-5 of a gradient's norm is what some hundred such roundings come to at most.

mod case;
mod objective;
mod quantized;
mod rank;
mod ring;
mod sabotage;
mod tiles;

use std::collections::BTreeSet;

use candlewick_comm::mesh::Degrees;
use candlewick_parallel::{PipelineScheduleKind, SequenceParallel, ZeroStage};

use case::{ADAPTER, BATCHINGS, Batching, Kind, MODELS};
use rank::{FEW, Outcome, STEPS, Way, compare, one_rank, run, run_with};
use sabotage::Lie;

const ONE: Degrees = Way::ONE_RANK.degrees;

/// What groups are asked for, by the axes that they run along.
const SUM: &str = "dp_replicate-dp_shard-cp-sp all_reduce";
const SHARES: [&str; 2] = ["dp_shard-cp-sp reduce_scatter", "dp_shard-cp-sp all_gather"];
const HEADS: &str = "sp all_to_all";
const IN_PARTS: [&str; 2] = ["tp all_gather", "tp reduce_scatter"];
const STAGES: &str = "pipeline activations send_recv";
const TIE: &str = "ties all_reduce";

fn dp(n_ranks: usize) -> Way {
    Way { degrees: Degrees { dp_replicate: n_ranks, ..ONE }, ..Way::ONE_RANK }
}

fn zero(n_ranks: usize, zero_stage: ZeroStage) -> Way {
    Way { degrees: Degrees { dp_shard: n_ranks, ..ONE }, zero_stage: Some(zero_stage), ..Way::ONE_RANK }
}

fn hybrid(dp_replicate: usize, dp_shard: usize, zero_stage: ZeroStage) -> Way {
    Way { degrees: Degrees { dp_replicate, dp_shard, ..ONE }, zero_stage: Some(zero_stage), ..Way::ONE_RANK }
}

/// All models in all batchings; and with any of the operations that this asks groups for lying, a difference. `known` are some
/// of them, as `group operation`.
#[track_caller]
fn check(way: Way, known: &[&str]) {
    // A pipeline of one micro-batch would be none.
    let n_micros = if way.degrees.pp > 1 { 5 } else { 2 };
    // A tied model with biases is lied to.
    let models = [MODELS[1], MODELS[0], MODELS[2], MODELS[3]];
    let batchings = [Batching::Accumulated(n_micros), Batching::Packed, Batching::Padded];
    check_all(way, &models, &batchings, known);
}

#[track_caller]
fn check_all(way: Way, models: &[Kind], batchings: &[Batching], known: &[&str]) {
    let mut asked = BTreeSet::new();
    for &model in models {
        for &batching in batchings {
            let ours = run(way, model, batching);
            if let Err(difference) = compare(&ours, &one_rank(model, batching, STEPS)) {
                panic!("{way:?}, {model:?}, {batching:?}: {difference}");
            }
            if asked.is_empty() {
                asked = ours.asked;
            }
        }
    }
    let names: Vec<String> = asked.iter().map(Lie::to_string).collect();
    assert!(known.iter().all(|known| names.iter().any(|name| name == known)), "{way:?}: asked were {names:?}");
    let (model, batching) = (models[0], batchings[0]);
    let one_rank = one_rank(model, batching, FEW);
    for lie in asked {
        let lied = run_with(way, model, batching, FEW, Some(&lie));
        assert!(lied.is_err() || compare(&lied.unwrap(), &one_rank).is_err(), "{way:?}: nobody sees that {lie} lies");
    }
}

#[test]
fn parity_of_replicas() {
    check(dp(2), &[SUM]);
}

#[test]
fn parity_of_three_replicas() {
    check(dp(3), &[SUM]);
}

#[test]
fn parity_of_a_sharded_optimizer() {
    check(zero(2, ZeroStage::One), &SHARES);
}

#[test]
fn parity_of_sharded_gradients() {
    check(zero(3, ZeroStage::Two), &SHARES);
}

#[test]
fn parity_of_sharded_weights() {
    check(zero(2, ZeroStage::Three), &SHARES);
}

#[test]
fn parity_of_weights_sharded_over_eight() {
    check(zero(8, ZeroStage::Three), &SHARES);
}

#[test]
fn parity_of_replicated_shards() {
    check(hybrid(2, 2, ZeroStage::One), &[SHARES[0], SHARES[1], "dp_replicate all_reduce"]);
    check(hybrid(2, 2, ZeroStage::Two), &SHARES);
    check(hybrid(2, 3, ZeroStage::Three), &SHARES);
}

fn ulysses(dp_shard: usize, sp: usize, zero_stage: Option<ZeroStage>) -> Way {
    Way { degrees: Degrees { dp_shard, sp, ..ONE }, zero_stage, ..Way::ONE_RANK }
}

#[test]
fn parity_of_sequences_in_two_parts() {
    check(ulysses(1, 2, Some(ZeroStage::One)), &[HEADS, SHARES[0], SHARES[1]]);
}

#[test]
fn parity_of_as_many_parts_as_key_heads() {
    check(ulysses(1, 4, None), &[HEADS, SUM]);
}

/// Two ranks share each key head.
#[test]
fn parity_of_more_parts_than_key_heads() {
    check(ulysses(1, 8, None), &[HEADS, SUM]);
}

/// The parts drop what one rank drops.
#[test]
fn parity_of_parts_with_dropout() {
    for batching in BATCHINGS {
        let one_rank = one_rank(ADAPTER, batching, STEPS);
        compare(&run(ulysses(1, 4, None), ADAPTER, batching), &one_rank).unwrap();
    }
}

#[test]
fn parity_of_parts_and_shards() {
    check(ulysses(2, 2, Some(ZeroStage::Two)), &[HEADS, SHARES[0], SHARES[1]]);
    check(ulysses(2, 4, Some(ZeroStage::Three)), &[HEADS, SHARES[0], SHARES[1]]);
}

fn tensor(degrees: Degrees, sequence_parallel: SequenceParallel) -> Way {
    Way { degrees, sequence_parallel, ..Way::ONE_RANK }
}

#[test]
fn parity_of_matrices_in_two_parts() {
    check(tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::Off), &["tp all_reduce"]);
    check(tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On), &IN_PARTS);
}

/// A vocabulary that does not fall into even parts.
#[test]
fn parity_of_matrices_in_four_parts() {
    check(tensor(Degrees { tp: 4, ..ONE }, SequenceParallel::Off), &["tp all_reduce"]);
    check(tensor(Degrees { tp: 4, ..ONE }, SequenceParallel::On), &IN_PARTS);
}

/// Every factor of an adapter is in parts, or has a gradient in parts. The parts drop what one rank drops.
#[test]
fn parity_of_adapters_in_parts() {
    for sequence_parallel in [SequenceParallel::Off, SequenceParallel::On] {
        for batching in BATCHINGS {
            let one_rank = one_rank(ADAPTER, batching, STEPS);
            compare(&run(tensor(Degrees { tp: 2, ..ONE }, sequence_parallel), ADAPTER, batching), &one_rank).unwrap();
        }
    }
}

#[test]
fn parity_of_matrices_in_parts_and_shards() {
    let way = |degrees, zero_stage| Way { zero_stage: Some(zero_stage), ..tensor(degrees, SequenceParallel::On) };
    check(way(Degrees { tp: 2, dp_shard: 2, ..ONE }, ZeroStage::One), &IN_PARTS);
    check(way(Degrees { tp: 2, dp_shard: 3, ..ONE }, ZeroStage::Two), &IN_PARTS);
    check(way(Degrees { tp: 2, dp_shard: 2, dp_replicate: 2, ..ONE }, ZeroStage::Three), &SHARES);
}

#[test]
fn parity_of_matrices_and_sequences_in_parts() {
    check(tensor(Degrees { tp: 2, sp: 2, ..ONE }, SequenceParallel::Off), &[HEADS, "tp all_reduce"]);
    let way = tensor(Degrees { tp: 2, sp: 2, dp_shard: 2, ..ONE }, SequenceParallel::On);
    check(Way { zero_stage: Some(ZeroStage::Three), ..way }, &[HEADS, IN_PARTS[0], SHARES[0]]);
}

fn pipeline(degrees: Degrees, schedule: PipelineScheduleKind, runs: &'static [usize]) -> Way {
    Way { degrees, schedule, runs: Some(runs), ..Way::ONE_RANK }
}

#[test]
fn parity_of_all_forward_all_backward() {
    check(pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::GPipe, &[2, 2]), &[STAGES, TIE]);
    check(pipeline(Degrees { pp: 3, ..ONE }, PipelineScheduleKind::GPipe, &[2, 1, 1]), &[STAGES, TIE]);
}

#[test]
fn parity_of_one_forward_one_backward() {
    check(pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[1, 3]), &[STAGES, TIE]);
    check(
        pipeline(Degrees { pp: 4, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[1, 1, 1, 1]),
        &[STAGES, TIE],
    );
    check(pipeline(Degrees { pp: 3, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[2, 2, 0]), &[STAGES, TIE]);
}

#[test]
fn parity_of_interleaved_runs() {
    check(
        pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[1, 1, 1, 1]),
        &[STAGES, TIE],
    );
    check(pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::GPipe, &[1, 0, 2, 1]), &[STAGES, TIE]);
    check(
        pipeline(Degrees { pp: 3, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[1, 1, 1, 1, 0, 0]),
        &[STAGES, TIE],
    );
}

#[test]
fn parity_of_a_pipeline_of_replicas_and_shards() {
    let way = |degrees, zero_stage| Way {
        zero_stage,
        ..pipeline(degrees, PipelineScheduleKind::OneForwardOneBackward, &[2, 2])
    };
    check(way(Degrees { pp: 2, dp_replicate: 2, ..ONE }, None), &[STAGES, TIE, SUM]);
    check(way(Degrees { pp: 2, dp_shard: 2, ..ONE }, Some(ZeroStage::One)), &[STAGES, TIE, SHARES[0]]);
    check(way(Degrees { pp: 2, dp_shard: 2, ..ONE }, Some(ZeroStage::Two)), &[STAGES, TIE, SHARES[0]]);
    check(way(Degrees { pp: 2, dp_shard: 3, ..ONE }, Some(ZeroStage::Three)), &[STAGES, TIE, SHARES[0]]);
}

#[test]
fn parity_of_a_pipeline_of_parts() {
    let way = |degrees, sequence_parallel, zero_stage, runs| {
        let schedule = PipelineScheduleKind::OneForwardOneBackward;
        Way { sequence_parallel, zero_stage, ..pipeline(degrees, schedule, runs) }
    };
    check(way(Degrees { pp: 2, tp: 2, ..ONE }, SequenceParallel::On, None, &[2, 2]), &[STAGES, TIE, IN_PARTS[0]]);
    check(
        way(Degrees { pp: 2, tp: 2, ..ONE }, SequenceParallel::Off, None, &[1, 1, 1, 1]),
        &[STAGES, TIE, "tp all_reduce"],
    );
    check(
        way(Degrees { pp: 2, sp: 2, ..ONE }, SequenceParallel::Off, Some(ZeroStage::Three), &[2, 2]),
        &[STAGES, TIE, HEADS],
    );
    let eight = Degrees { pp: 2, tp: 2, dp_shard: 2, ..ONE };
    check(way(eight, SequenceParallel::On, Some(ZeroStage::Three), &[2, 2]), &[STAGES, TIE, IN_PARTS[0]]);
    check(
        way(Degrees { pp: 2, tp: 2, sp: 2, ..ONE }, SequenceParallel::On, None, &[3, 1]),
        &[STAGES, TIE, HEADS, IN_PARTS[0]],
    );
}

/// Without dropout nothing is left to chance: bits do not depend on which rank comes first.
#[test]
fn parity_of_two_runs_is_to_the_bit() {
    let all = Way { runs: Some(&[2, 2]), ..tensor(Degrees { pp: 2, tp: 2, ..ONE }, SequenceParallel::On) };
    let afab = pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::GPipe, &[2, 2]);
    let ring = Way { degrees: Degrees { cp: 3, ..ONE }, ..Way::ONE_RANK };
    for way in [dp(3), zero(4, ZeroStage::Three), all, ulysses(1, 4, None), ring, afab] {
        let run = || run(way, MODELS[0], BATCHINGS[2]);
        let bits = |outcome: Outcome| (outcome.losses, outcome.grads, outcome.weights);
        assert!(bits(run()) == bits(run()), "{way:?}");
    }
}
