//! Expert parallelism gives the results of one rank, on every axis of the mesh.

use std::time::Duration;

use candle_core::Result;
use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, threads};
use candlewick_model::{ForcedExpertLoad, RouterSettings};
use candlewick_parallel::{LossScale, PipelineScheduleKind, SequenceParallel, TokenDispatcher, ZeroStage};

use super::case::{Batching, DOTS1, GLM4_MOE, QWEN3_MOE, WEIGHTED_INPUTS, micros};
use super::rank::{Strategy, TOLERANCE, data_rank, engine_with_routers, run, shards, unsharded};
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
fn the_gradient_norm_is_that_of_dense_parameters_and_experts() {
    for strategy in [Strategy::ONE_RANK, strategy(Degrees { dp_shard: 2, ep: 2, ..ONE }, Some(ZeroStage::Two))] {
        let run = run(strategy, QWEN3_MOE, Batching::Packed);
        let squares = |is_counted: fn(&str) -> bool| -> f64 {
            let grads = run.grads.iter().filter(|(name, _)| is_counted(name)).flat_map(|(_, grad)| grad);
            grads.map(|x| f64::from(*x).powi(2)).sum()
        };
        let norm = squares(|_| true).sqrt();
        assert!((run.norms[0] - norm).abs() <= TOLERANCE * norm, "{strategy:?}: {} {norm}", run.norms[0]);
        assert!(squares(|name| name.contains(".experts.")) > 1e-3 * norm * norm, "experts hardly count");
    }
}

/// All tokens select the same two experts.
#[test]
fn zero_gradients_of_experts_without_tokens_are_counted() {
    let router =
        || RouterSettings { forced_load: ForcedExpertLoad::Biased { std: 100.0 }, ..RouterSettings::default() };
    for strategy in [Strategy::ONE_RANK, strategy(Degrees { dp_shard: 2, ep: 2, ..ONE }, Some(ZeroStage::Two))] {
        let rank = |world: &World| -> Result<_> {
            let engine = engine_with_routers(world, strategy, QWEN3_MOE, router(), None)?;
            let (rank, n_ranks) = data_rank(world, strategy);
            engine.store().zero_grads()?;
            let (micros, _) = micros(Batching::Packed, 0, rank, n_ranks);
            engine.forward_backward(&micros, &LossScale::mean_over(1.0), |_| 5)?;
            Ok((engine.store().grad_zeros()?.to_scalar::<f64>()?, shards(&engine, |state| &state.grad)?))
        };
        let options = Options { timeout: Duration::from_secs(120), record: false };
        let ranks = threads::run(strategy.degrees.n_ranks(), options, rank).unwrap();
        let grads = unsharded(ranks.iter().flat_map(|(_, shards)| shards));
        let of_experts = grads.iter().filter(|(name, _)| name.contains(".experts."));
        let zeros = of_experts.flat_map(|(_, grad)| grad).filter(|grad| **grad == 0.0).count();
        assert!(zeros > 0, "{strategy:?}");
        let all = grads.values().flatten().filter(|grad| **grad == 0.0).count() as f64;
        assert!(ranks.iter().all(|(n_zeros, _)| *n_zeros == all), "{strategy:?}: {} {all}", ranks[0].0);
    }
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
