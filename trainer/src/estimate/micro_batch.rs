//! `micro_batch_size: auto`: the rows of a micro-batch, by the memory estimate.
//!
//! The rows of a step do not change: more rows in a micro-batch are fewer micro-batches.

use candlewick_ops::DeviceKind;

use super::{Capacity, Setup, estimate};

/// Tokens of a micro-batch on one rank at which the matmuls of a GPU have full speed.
const GPU_TOKENS: u64 = 8192;
/// Tokens of a micro-batch on one rank at which the CPU packs weights seldom enough. More need memory and gain nothing.
const CPU_TOKENS: u64 = 1024;
/// Micro-batches that each pipeline stage keeps: then the bubble is less than a fifth.
const MICROS_PER_STAGE: usize = 4;

/// Rows of a micro-batch with the memory that a run needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatchCandidate {
    /// The rows.
    pub rows: usize,
    /// The peak in bytes.
    pub peak_bytes: u64,
}

/// Returns the most rows of a micro-batch that fit `capacity`, up to the tokens that the device needs for full speed. One row
/// is the least, even if it does not fit.
///
/// `setup` has micro-batches of one row. The result divides their number.
pub fn choose_micro_batch(setup: &Setup, capacity: &Capacity) -> MicroBatchCandidate {
    let with_rows = |rows: usize| Setup { rows: rows as u64, n_micros: setup.n_micros / rows, ..setup.clone() };
    let candidates = (2..=setup.n_micros).rev().filter(|rows| setup.n_micros.is_multiple_of(*rows));
    let useful = candidates.filter(|rows| is_useful(&with_rows(*rows)));
    let estimates = useful.map(|rows| (rows, estimate(&with_rows(rows))));
    let found = estimates.into_iter().find(|(_, estimate)| estimate.shortages(capacity).is_empty());
    let (rows, estimate) = found.unwrap_or_else(|| (1, estimate(setup)));
    MicroBatchCandidate { rows, peak_bytes: estimate.peak_bytes() }
}

/// Returns true if micro-batches are within the device's number of tokens, and there are enough for the pipeline.
fn is_useful(setup: &Setup) -> bool {
    let most = match setup.compute_device {
        DeviceKind::Gpu => GPU_TOKENS,
        DeviceKind::Cpu => CPU_TOKENS,
    };
    let n_stages = setup.ranks.stages;
    setup.n_micro_batch_tokens() <= most && (n_stages == 1 || setup.n_micros >= MICROS_PER_STAGE * n_stages)
}
