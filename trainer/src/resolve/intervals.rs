//! Intervals in steps or as a fraction of the run.

use super::resolver::Resolver;
use crate::recipe::{HumanInt, StepInterval};
use crate::step_fraction::FractionalInterval;

/// Returns an interval in steps, 0 if there is none, or the fraction of the run that a number below 1 is.
pub(super) fn steps_or_fraction(
    resolver: &mut Resolver,
    key: &str,
    given: Option<StepInterval>,
) -> (usize, Option<FractionalInterval>) {
    match given.map_or(0.0, |interval| interval.0) {
        fraction if fraction > 0.0 && fraction < 1.0 => (0, Some(FractionalInterval::OfRun(fraction))),
        steps => match HumanInt::from_f64(steps) {
            Some(steps) => (steps.0, None),
            None => {
                let message =
                    format!("{key}: expected a whole number of steps, or a fraction of the run below 1, found {steps}");
                resolver.report(&[key], message);
                (0, None)
            }
        },
    }
}

/// Returns an epoch divided by `n`. `None` is each epoch: epochs of packed rows differ in length.
pub(super) fn of_epoch(n: usize) -> Option<FractionalInterval> {
    (n > 1).then_some(FractionalInterval::PerEpoch(n))
}
