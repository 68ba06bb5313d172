//! Expert parallelism gives the results of one rank, on every axis of the mesh.

use candlewick_comm::mesh::Degrees;
use candlewick_parallel::{PipelineScheduleKind, SequenceParallel, TokenDispatcher, ZeroStage};

use super::case::{Batching, DOTS1, GLM4_MOE, QWEN3_MOE, WEIGHTED_INPUTS};
use super::rank::{Strategy, run};
use super::{ONE, check_all};

/// Collectives of expert parallelism.
const DISPATCH: &str = "ep-etp all_to_all";
const COUNTS: &str = "ep-etp all_gather";
/// Sum of the all-gather dispatcher.
const SUMS: &str = "ep-etp reduce_scatter";

const BATCHINGS: [Batching; 2] = [Batching::Accumulated(2), Batching::Packed];

fn strategy(degrees: Degrees, zero_stage: Option<ZeroStage>) -> Strategy {
    Strategy { degrees, zero_stage, sequence_parallel: SequenceParallel::On, ..Strategy::ONE_RANK }
}

/// Compares both models in all batchings, and injects a fault into each collective.
#[track_caller]
fn check(strategy: Strategy) {
    check_all(strategy, &[DOTS1, QWEN3_MOE], &BATCHINGS, &[DISPATCH, COUNTS]);
}

#[test]
fn parity_of_replicated_experts() {
    let replicas = strategy(Degrees { dp_replicate: 3, ..ONE }, None);
    check_all(replicas, &[DOTS1, QWEN3_MOE], &BATCHINGS, &["edp all_reduce"]);
}

#[test]
fn parity_of_expert_parallel() {
    check(strategy(Degrees { dp_replicate: 2, ep: 2, ..ONE }, None));
    check(strategy(Degrees { dp_replicate: 4, ep: 2, ..ONE }, None));
    check(strategy(Degrees { dp_replicate: 4, ep: 4, ..ONE }, None));
}

#[test]
fn parity_of_expert_parallel_and_zero() {
    check(strategy(Degrees { dp_shard: 4, ep: 2, ..ONE }, Some(ZeroStage::One)));
    check(strategy(Degrees { dp_shard: 4, ep: 2, ..ONE }, Some(ZeroStage::Two)));
    check(strategy(Degrees { dp_shard: 4, ep: 2, ..ONE }, Some(ZeroStage::Three)));
    check(strategy(Degrees { dp_shard: 4, ep: 4, ..ONE }, Some(ZeroStage::Three)));
}

#[test]
fn parity_of_expert_and_tensor_parallel() {
    check(strategy(Degrees { tp: 2, ep: 2, ..ONE }, None));
    check(strategy(Degrees { tp: 2, dp_shard: 2, ep: 4, ..ONE }, Some(ZeroStage::One)));
}

#[test]
fn parity_of_expert_and_context_parallel() {
    check(strategy(Degrees { cp: 2, ep: 2, ..ONE }, None));
    check(strategy(Degrees { sp: 2, dp_shard: 2, ep: 2, ..ONE }, Some(ZeroStage::Three)));
}

#[test]
fn parity_of_expert_tensor_parallel() {
    check(strategy(Degrees { dp_replicate: 2, etp: 2, ..ONE }, None));
    check(strategy(Degrees { dp_replicate: 4, ep: 2, etp: 2, ..ONE }, None));
    check(strategy(Degrees { tp: 2, dp_replicate: 2, ep: 2, etp: 2, ..ONE }, None));
}

/// Eight ranks: two expert data parallel groups.
#[test]
fn parity_of_expert_tensor_parallel_and_zero() {
    for zero_stage in [ZeroStage::One, ZeroStage::Three] {
        check(strategy(Degrees { dp_shard: 4, tp: 2, ep: 2, etp: 2, ..ONE }, Some(zero_stage)));
    }
}

#[test]
fn parity_of_expert_tensor_and_pipeline_parallel() {
    let degrees = Degrees { pp: 2, dp_shard: 4, ep: 2, etp: 2, ..ONE };
    let pipeline = Strategy { chunk_layers: Some(&[2, 2]), ..strategy(degrees, Some(ZeroStage::One)) };
    check_all(pipeline, &[DOTS1, QWEN3_MOE], &[Batching::Accumulated(3)], &[DISPATCH, COUNTS]);
}

#[test]
fn parity_of_the_all_gather_dispatcher() {
    for (degrees, zero_stage) in [
        (Degrees { dp_replicate: 4, ep: 4, ..ONE }, None),
        (Degrees { tp: 2, ep: 2, ..ONE }, None),
        (Degrees { dp_shard: 4, ep: 2, etp: 2, ..ONE }, Some(ZeroStage::Three)),
    ] {
        let strategy = Strategy { token_dispatcher: TokenDispatcher::AllGather, ..strategy(degrees, zero_stage) };
        check_all(strategy, &[DOTS1, QWEN3_MOE], &BATCHINGS, &[COUNTS, SUMS]);
    }
}

#[test]
fn parity_of_weights_on_the_inputs_of_experts() {
    for (degrees, zero_stage, token_dispatcher) in [
        (Degrees { dp_replicate: 4, ep: 4, ..ONE }, None, TokenDispatcher::AllToAll),
        (Degrees { tp: 2, dp_replicate: 2, ep: 2, etp: 2, ..ONE }, None, TokenDispatcher::AllToAll),
        (Degrees { dp_shard: 4, ep: 2, etp: 2, ..ONE }, Some(ZeroStage::Three), TokenDispatcher::AllGather),
    ] {
        let strategy = Strategy { token_dispatcher, ..strategy(degrees, zero_stage) };
        check_all(strategy, &[WEIGHTED_INPUTS], &BATCHINGS, &[COUNTS]);
    }
}

#[test]
fn parity_of_half_rotated_heads() {
    for degrees in [Degrees { tp: 2, ep: 2, ..ONE }, Degrees { cp: 2, ..ONE }, Degrees { sp: 2, ep: 2, ..ONE }] {
        check_all(strategy(degrees, None), &[GLM4_MOE], &BATCHINGS, &[]);
    }
}

#[test]
fn parity_of_expert_and_pipeline_parallel() {
    let pipeline = Strategy {
        schedule: PipelineScheduleKind::OneForwardOneBackward,
        chunk_layers: Some(&[2, 2]),
        ..strategy(Degrees { pp: 2, dp_shard: 2, ep: 2, ..ONE }, Some(ZeroStage::One))
    };
    let batchings = [Batching::Accumulated(3)];
    check_all(pipeline, &[DOTS1, QWEN3_MOE], &batchings, &[DISPATCH, COUNTS]);
}

/// Layers 1 and 3 of the first model have experts, and all but layer 0 of the second. Norms and numbers of zeros are compared on
/// all ranks.
#[test]
fn parity_of_stages_without_experts() {
    let degrees = Degrees { pp: 4, dp_shard: 2, ep: 2, ..ONE };
    let strategy = Strategy { chunk_layers: Some(&[1, 1, 1, 1]), ..strategy(degrees, Some(ZeroStage::Two)) };
    check_all(strategy, &[QWEN3_MOE, DOTS1], &[Batching::Accumulated(3)], &[DISPATCH, COUNTS]);
}

#[test]
fn parity_of_four_axes_with_experts() {
    let degrees = Degrees { pp: 2, tp: 2, dp_shard: 2, ep: 4, ..ONE };
    let strategy = Strategy { chunk_layers: Some(&[2, 2]), ..strategy(degrees, Some(ZeroStage::Three)) };
    check_all(strategy, &[DOTS1, QWEN3_MOE], &[Batching::Accumulated(3)], &[DISPATCH, COUNTS]);
}

/// Tensor parallel ranks gather the shared expert's tokens between the start of the dispatch and the combine.
#[test]
fn the_shared_expert_computes_while_tokens_travel() {
    for (token_dispatcher, dispatch) in [
        (TokenDispatcher::AllToAll, ["ep-etp all_gather", "ep-etp all_to_all", "ep-etp all_to_all"].as_slice()),
        (TokenDispatcher::AllGather, ["ep-etp all_gather"; 4].as_slice()),
    ] {
        let strategy = Strategy { token_dispatcher, ..strategy(Degrees { tp: 2, ep: 2, ..ONE }, None) };
        let calls = run(strategy, DOTS1, Batching::Packed).calls;
        let first = calls.iter().position(|call| call.starts_with("ep-etp")).unwrap();
        let next = calls[first..].iter().map(|call| call.rsplit_once(' ').unwrap().0).take(dispatch.len() + 1);
        assert_eq!(next.collect::<Vec<_>>(), [dispatch, &["tp all_gather"]].concat());
    }
}
