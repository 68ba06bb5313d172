//! Adapters of experts, of routers and of shared experts' gates train as on one rank, on every axis of the mesh.

use candlewick_comm::mesh::Degrees;
use candlewick_model::TiledMlp;
use candlewick_parallel::{PipelineScheduleKind, SequenceParallel, TokenDispatcher, ZeroStage};

use super::case::{Batching, DROPPED_EXPERT_MODULES, EXPERT_MODULES, PARAMETERS, SHARED_EXPERT_GATE};
use super::rank::{STEPS, Strategy, compare, one_rank, run};
use super::{ONE, check_all};

/// Collectives of expert parallelism.
const DISPATCH: &str = "ep-etp all_to_all";

const BATCHINGS: [Batching; 2] = [Batching::Accumulated(2), Batching::Packed];

#[track_caller]
fn check(strategy: Strategy, batchings: &[Batching], known: &[&str]) {
    let strategy = Strategy { sequence_parallel: SequenceParallel::On, ..strategy };
    check_all(strategy, &[PARAMETERS, EXPERT_MODULES], batchings, known);
}

#[test]
fn parity_of_adapters_of_experts_over_replicas() {
    check(
        Strategy { degrees: Degrees { dp_replicate: 3, ..ONE }, ..Strategy::ONE_RANK },
        &BATCHINGS,
        &["edp all_reduce"],
    );
}

#[test]
fn parity_of_adapters_of_experts_with_expert_parallelism() {
    for (degrees, zero_stage) in [
        (Degrees { dp_replicate: 4, ep: 2, ..ONE }, None),
        (Degrees { dp_shard: 4, ep: 2, ..ONE }, Some(ZeroStage::Three)),
        (Degrees { dp_shard: 4, ep: 4, ..ONE }, Some(ZeroStage::Two)),
    ] {
        check(Strategy { degrees, zero_stage, ..Strategy::ONE_RANK }, &BATCHINGS, &[DISPATCH]);
    }
}

#[test]
fn parity_of_adapters_of_experts_with_tensor_and_context_parallelism() {
    for degrees in [Degrees { tp: 2, dp_shard: 2, ep: 4, ..ONE }, Degrees { cp: 2, ep: 2, ..ONE }] {
        let zero_stage = Some(ZeroStage::One);
        check(Strategy { degrees, zero_stage, ..Strategy::ONE_RANK }, &BATCHINGS, &[DISPATCH]);
    }
}

#[test]
fn parity_of_adapters_of_experts_with_expert_tensor_parallelism() {
    for (degrees, zero_stage) in [
        (Degrees { dp_replicate: 4, ep: 2, etp: 2, ..ONE }, None),
        (Degrees { dp_shard: 4, tp: 2, ep: 2, etp: 2, ..ONE }, Some(ZeroStage::Three)),
    ] {
        check(Strategy { degrees, zero_stage, ..Strategy::ONE_RANK }, &BATCHINGS, &[DISPATCH]);
    }
}

#[test]
fn parity_of_adapters_of_experts_with_the_all_gather_dispatcher() {
    let degrees = Degrees { dp_shard: 4, ep: 2, etp: 2, ..ONE };
    let strategy = Strategy { degrees, zero_stage: Some(ZeroStage::One), ..Strategy::ONE_RANK };
    let strategy = Strategy { token_dispatcher: TokenDispatcher::AllGather, ..strategy };
    check(strategy, &BATCHINGS[..1], &["ep-etp all_gather"]);
}

#[test]
fn parity_of_adapters_of_experts_with_a_pipeline() {
    let pipeline = Strategy {
        degrees: Degrees { pp: 2, dp_shard: 2, ep: 2, ..ONE },
        zero_stage: Some(ZeroStage::One),
        schedule: PipelineScheduleKind::OneForwardOneBackward,
        chunk_layers: Some(&[2, 2]),
        ..Strategy::ONE_RANK
    };
    check(pipeline, &[Batching::Accumulated(3)], &[DISPATCH]);
}

/// The gate reads the residual stream, so each rank masks its own tokens. These ranks share micro-batches.
#[test]
fn parity_of_adapters_of_shared_experts_gates_with_dropout() {
    for (degrees, zero_stage) in [
        (Degrees { tp: 2, ep: 2, ..ONE }, None),
        (Degrees { tp: 4, ep: 4, ..ONE }, None),
        (Degrees { cp: 2, ep: 2, ..ONE }, None),
        (Degrees { sp: 2, ep: 2, ..ONE }, Some(ZeroStage::One)),
        (Degrees { tp: 2, cp: 2, ep: 4, ..ONE }, Some(ZeroStage::Three)),
        (Degrees { pp: 2, tp: 2, ep: 2, ..ONE }, None),
    ] {
        let strategy = Strategy { degrees, zero_stage, sequence_parallel: SequenceParallel::On, ..Strategy::ONE_RANK };
        for batching in BATCHINGS {
            let one_rank = one_rank(SHARED_EXPERT_GATE, batching, STEPS);
            compare(&run(strategy, SHARED_EXPERT_GATE, batching), &one_rank).unwrap();
        }
    }
}

/// A mask depends on a token's position in its micro-batch. So it is that of one rank where ranks split micro-batches, and that
/// of replicas elsewhere.
#[test]
fn dropout_of_adapters_of_experts_has_the_masks_of_one_rank() {
    let strategy = |degrees: Degrees, token_dispatcher| {
        let zero_stage = (degrees.dp_shard > 1).then_some(ZeroStage::Three);
        let sequence_parallel = SequenceParallel::On;
        Strategy { degrees, zero_stage, token_dispatcher, sequence_parallel, ..Strategy::ONE_RANK }
    };
    let case = DROPPED_EXPERT_MODULES;
    for (degrees, dispatcher) in [
        (Degrees { tp: 2, ep: 2, ..ONE }, TokenDispatcher::AllToAll),
        (Degrees { tp: 2, etp: 2, ..ONE }, TokenDispatcher::AllToAll),
        (Degrees { cp: 2, ep: 2, ..ONE }, TokenDispatcher::AllGather),
        (Degrees { tp: 2, cp: 2, ep: 2, etp: 2, ..ONE }, TokenDispatcher::AllToAll),
        (Degrees { tp: 2, cp: 2, ep: 2, etp: 2, ..ONE }, TokenDispatcher::AllGather),
    ] {
        for batching in BATCHINGS {
            let one_rank = one_rank(case, batching, STEPS);
            let ours = run(strategy(degrees, dispatcher), case, batching);
            compare(&ours, &one_rank).unwrap_or_else(|difference| panic!("{degrees} {batching:?}: {difference}"));
            let tiled = Strategy { tiled_mlp: TiledMlp::On, ..strategy(degrees, dispatcher) };
            compare(&run(tiled, case, batching), &one_rank).unwrap_or_else(|difference| panic!("tiled: {difference}"));
            compare(&run(tiled, EXPERT_MODULES, batching), &one_rank).expect_err("dropout changes the losses");
        }
    }
    let replicas = run(strategy(Degrees { dp_shard: 2, ..ONE }, TokenDispatcher::AllToAll), case, Batching::Packed);
    for dispatcher in [TokenDispatcher::AllToAll, TokenDispatcher::AllGather] {
        let ours = run(strategy(Degrees { dp_shard: 2, ep: 2, ..ONE }, dispatcher), case, Batching::Packed);
        compare(&ours, &replicas).unwrap_or_else(|difference| panic!("{dispatcher:?}: {difference}"));
    }
}
