//! Intervals in steps or as a fraction of the run.

use super::resolver::Resolver;
use crate::recipe::HumanFloat;
use crate::step_fraction::StepFraction;

/// Returns an interval in steps, 0 if there is none, or the fraction of the run that a number below 1 is.
pub(super) fn steps_or_fraction(
    resolver: &mut Resolver,
    key: &str,
    given: Option<HumanFloat>,
) -> (usize, Option<StepFraction>) {
    match given.map_or(0.0, |interval| interval.0) {
        fraction if fraction > 0.0 && fraction < 1.0 => (0, Some(StepFraction::OfRun(fraction))),
        steps if steps >= 0.0 && steps.fract() == 0.0 => (steps as usize, None),
        other => {
            let message =
                format!("{key}: expected a whole number of steps, or a fraction of the run below 1, found {other}");
            resolver.report(&[key], message);
            (0, None)
        }
    }
}
