//! The state of early stopping: the best evaluation, and the number of evaluations since then.

use serde::{Deserialize, Serialize};

/// The evaluations of the metric of early stopping.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EarlyStoppingState {
    /// The metric; empty if there is none.
    pub metric: String,
    /// True if a greater value is better.
    pub greater_is_better: bool,
    /// The step and the value of the last improvement.
    pub best: Option<(usize, f64)>,
    /// The number of evaluations since then.
    pub n_without_improvement: usize,
    /// The last evaluated step.
    pub last_step: Option<usize>,
}

impl EarlyStoppingState {
    /// Creates the state before the first evaluation.
    pub fn of(metric: String, greater_is_better: bool) -> Self {
        Self { metric, greater_is_better, ..Self::default() }
    }

    /// Returns true if both have the same metric and direction.
    pub fn has_metric_of(&self, other: &Self) -> bool {
        self.metric == other.metric && self.greater_is_better == other.greater_is_better
    }

    /// Records the value after `step`. An improvement is a change of more than `min_delta`; NaN is none. A step counts once,
    /// also if a resumed run evaluates it again.
    pub fn add(&mut self, step: usize, value: f64, min_delta: f64) {
        if self.last_step.replace(step) == Some(step) {
            return;
        }
        if self.is_improved_by(value, min_delta) {
            self.best = Some((step, value));
            self.n_without_improvement = 0;
        } else {
            self.n_without_improvement += 1;
        }
    }

    fn is_improved_by(&self, value: f64, min_delta: f64) -> bool {
        let Some((_, best)) = self.best else { return value.is_finite() };
        let change = if self.greater_is_better { value - best } else { best - value };
        value.is_finite() && change > min_delta
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of evaluations without an improvement after each value.
    fn counts(greater_is_better: bool, min_delta: f64, values: &[f64]) -> Vec<usize> {
        let mut state = EarlyStoppingState::of("m".to_owned(), greater_is_better);
        let count = |(step, value): (usize, &f64)| {
            state.add(step, *value, min_delta);
            state.n_without_improvement
        };
        values.iter().enumerate().map(count).collect()
    }

    #[test]
    fn evaluations_count_until_an_improvement() {
        assert_eq!(counts(false, 0.0, &[3.0, 2.0, 2.0, 2.5, 1.0, 4.0]), [0, 0, 1, 2, 0, 1]);
        assert_eq!(counts(true, 0.0, &[1.0, 2.0, 2.0, 1.5, 3.0]), [0, 0, 1, 2, 0]);
    }

    #[test]
    fn small_changes_are_no_improvement_even_if_they_add_up() {
        assert_eq!(counts(false, 0.5, &[3.0, 2.5, 2.4, 1.8]), [0, 1, 0, 0]);
        assert_eq!(counts(true, 0.5, &[1.0, 1.5, 1.75, 2.25]), [0, 1, 0, 1]);
    }

    #[test]
    fn a_value_that_is_not_finite_is_no_improvement() {
        assert_eq!(counts(false, 0.0, &[f64::NAN, 2.0, f64::NAN, f64::NEG_INFINITY]), [1, 0, 1, 2]);
    }

    #[test]
    fn a_step_that_is_evaluated_again_counts_once() {
        let mut state = EarlyStoppingState::of("m".to_owned(), false);
        [(2, 1.0), (4, 2.0), (4, 2.0)].iter().for_each(|(step, value)| state.add(*step, *value, 0.0));
        assert_eq!((state.best, state.n_without_improvement), (Some((2, 1.0)), 1));
    }
}
