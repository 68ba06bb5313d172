//! All 16 small meshes of data, tensor, pipeline and context parallelism: each degree is 1 or 2.

use candlewick_comm::mesh::Degrees;
use candlewick_parallel::{PipelineScheduleKind, SequenceParallel};

use super::case::{Batching, MODELS};
use super::rank::Strategy;
use super::{ONE, check_all};

/// Checks the meshes with these pipeline and context parallel degrees, with faults in each collective.
#[track_caller]
fn check(pp: usize, cp: usize) {
    for (dp_replicate, tp) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        let strategy = Strategy {
            sequence_parallel: SequenceParallel::On,
            schedule: PipelineScheduleKind::OneForwardOneBackward,
            ..Strategy { degrees: Degrees { pp, cp, dp_replicate, tp, ..ONE }, ..Strategy::ONE_RANK }
        };
        check_all(strategy, &[MODELS[1]], &[Batching::Accumulated(2), Batching::Packed], &[]);
    }
}

#[test]
fn parity_of_small_meshes() {
    check(1, 1);
}

#[test]
fn parity_of_small_meshes_with_rings() {
    check(1, 2);
}

#[test]
fn parity_of_small_meshes_with_pipelines() {
    check(2, 1);
}

#[test]
fn parity_of_small_meshes_with_pipelines_of_rings() {
    check(2, 2);
}
