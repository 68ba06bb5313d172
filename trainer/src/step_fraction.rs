//! Intervals as a fraction of the run or of an epoch, which become steps when the data are counted.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An interval between evaluations or checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FractionalInterval {
    /// This fraction of all steps, above 0 and below 1: `eval_steps` of transformers.
    OfRun(f64),
    /// An epoch divided by this number, above 1: `evals_per_epoch` of axolotl.
    PerEpoch(usize),
}

/// The length of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunLength {
    /// All steps.
    pub total_steps: usize,
    /// The steps of the first epoch. 0 if rows are streamed.
    pub epoch_steps: usize,
}

impl FractionalInterval {
    /// Returns the steps of the interval, rounded up as in transformers; at least 1.
    pub fn steps(self, run: RunLength) -> usize {
        match self {
            Self::OfRun(fraction) => rounded_up(fraction * run.total_steps as f64).max(1),
            Self::PerEpoch(n) => run.epoch_steps.div_ceil(n).max(1),
        }
    }
}

impl fmt::Display for FractionalInterval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OfRun(fraction) => write!(f, "{fraction} of the run"),
            Self::PerEpoch(n) => write!(f, "{n} times an epoch"),
        }
    }
}

/// Rounds up a fraction of steps. An excess of less than a millionth is an error of rounding: 1.1 - 1 times 10 exceeds 1.
pub(crate) fn rounded_up(steps: f64) -> usize {
    (steps - 1e-6).ceil() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fraction_is_rounded_up_to_a_full_step() {
        let run = RunLength { total_steps: 30, epoch_steps: 10 };
        for (fraction, want) in [
            (FractionalInterval::OfRun(0.25), 8),
            (FractionalInterval::OfRun(0.1), 3),
            (FractionalInterval::OfRun(1e-9), 1),
            (FractionalInterval::PerEpoch(1), 10),
            (FractionalInterval::PerEpoch(4), 3),
            (FractionalInterval::PerEpoch(99), 1),
        ] {
            assert_eq!(fraction.steps(run), want, "{fraction}");
        }
        assert_eq!([1.1f64.fract() * 10.0, 2.5, 3.0].map(rounded_up), [1, 3, 3]);
    }
}
