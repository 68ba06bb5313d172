//! The times of a step's phases, as DeepSpeed's `wall_clock_breakdown` logs them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The milliseconds of a step's phases, over all of its micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WallClockTimes {
    /// Forward, with the output layer's gradient.
    pub fwd: f64,
    /// Backward, without the rest of the gradient reduction.
    pub bwd: f64,
    /// The wait for the rest of the gradient reduction: what backward did not overlap.
    pub bwd_allreduce: f64,
    /// Gradient norm, clipping and optimizer.
    pub step: f64,
}

impl fmt::Display for WallClockTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fwd, bwd: bwd_inner, bwd_allreduce, step } = self;
        let bwd = bwd_inner + bwd_allreduce;
        write!(
            f,
            "time (ms) | fwd: {fwd:.2} | bwd: {bwd:.2} | bwd_inner: {bwd_inner:.2} | bwd_allreduce: {bwd_allreduce:.2} | \
             step: {step:.2}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_with_deepspeeds_names() {
        let shown = WallClockTimes { fwd: 1.0, bwd: 2.0, bwd_allreduce: 0.5, step: 0.25 }.to_string();
        assert_eq!(shown, "time (ms) | fwd: 1.00 | bwd: 2.50 | bwd_inner: 2.00 | bwd_allreduce: 0.50 | step: 0.25");
    }
}
