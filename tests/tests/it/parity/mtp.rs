//! Layers for multi-token prediction train as on one rank, on every mesh.

use candlewick_comm::mesh::Degrees;
use candlewick_parallel::{SequenceParallel, ZeroStage};

use super::case::{Batching, MOE_MTP, MTP, TIED_MTP};
use super::rank::Strategy;
use super::{DP_ALL_REDUCE, ONE, PP_OP, TIED_OP, TP_OPS, ULYSSES_OP, ZERO_OPS, check_all, tensor, ulysses, zero};

/// Checks models with an output layer of their own, and with the embedding as output layer.
#[track_caller]
fn check(strategy: Strategy, known: &[&str]) {
    let n_micros = if strategy.degrees.pp > 1 { 5 } else { 2 };
    check_all(strategy, &[MTP, TIED_MTP], &[Batching::Accumulated(n_micros), Batching::Padded], known);
}

#[test]
fn parity_of_mtp_with_sharded_gradients_and_weights() {
    check(zero(2, ZeroStage::Two), &ZERO_OPS);
    check(zero(3, ZeroStage::Three), &ZERO_OPS);
}

#[test]
fn parity_of_mtp_with_ulysses_and_ring_attention() {
    check(ulysses(1, 4, None), &[ULYSSES_OP, DP_ALL_REDUCE]);
    check(Strategy { degrees: Degrees { cp: 2, dp_shard: 2, ..ONE }, ..zero(2, ZeroStage::One) }, &ZERO_OPS);
}

#[test]
fn parity_of_mtp_with_tensor_parallelism() {
    check(tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::Off), &["tp all_reduce"]);
    check(tensor(Degrees { tp: 4, ..ONE }, SequenceParallel::On), &TP_OPS);
}

/// The last stage embeds tokens, so the embedding is tied to the first stage in both models.
#[test]
fn parity_of_mtp_with_pipelines() {
    let pipeline = |pp| Strategy { degrees: Degrees { pp, ..ONE }, ..Strategy::ONE_RANK };
    check(pipeline(2), &[PP_OP, TIED_OP]);
    let interleaved = Strategy { chunk_layers: Some(&[1, 1, 1, 1]), ..pipeline(2) };
    check(interleaved, &[PP_OP, TIED_OP]);
    let degrees = Degrees { pp: 2, dp_shard: 2, tp: 2, ..ONE };
    let sequence_parallel = SequenceParallel::On;
    let strategy = Strategy { degrees, sequence_parallel, ..zero(2, ZeroStage::Three) };
    // A micro-batch without targets of an MTP layer would need fewer collectives.
    check_all(strategy, &[MTP, TIED_MTP], &[Batching::Accumulated(2)], &[PP_OP, TIED_OP, TP_OPS[0]]);
}

#[test]
fn parity_of_mtp_with_experts() {
    for degrees in [Degrees { dp_shard: 2, ep: 2, ..ONE }, Degrees { pp: 2, dp_shard: 2, ep: 2, ..ONE }] {
        let strategy = Strategy { degrees, ..zero(2, ZeroStage::Two) };
        check_all(strategy, &[MOE_MTP], &[Batching::Accumulated(3)], &[]);
    }
}
