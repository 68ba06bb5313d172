//! The evaluation results that select the best checkpoint.

use serde::{Deserialize, Serialize};

/// The values of the metric that selects the best checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// The metric; empty if there is none.
    pub metric: String,
    /// True if a greater value is better.
    pub greater_is_better: bool,
    /// The evaluated steps and their values.
    pub values: Vec<(usize, f64)>,
}

impl Scores {
    /// Creates the scores of a metric, without values.
    pub fn of(metric: String, greater_is_better: bool) -> Self {
        Self { metric, greater_is_better, values: Vec::new() }
    }

    /// Returns true if both have the same metric and direction.
    pub fn has_metric_of(&self, other: &Self) -> bool {
        self.metric == other.metric && self.greater_is_better == other.greater_is_better
    }

    /// Records the value after `step`. Ignores a value that is not finite.
    pub fn add(&mut self, step: usize, value: f64) {
        self.values.retain(|(known, _)| *known != step);
        if value.is_finite() {
            self.values.push((step, value));
        }
    }

    /// Returns the step with the best value, and the value; the first of equal ones.
    pub fn best(&self) -> Option<(usize, f64)> {
        self.best_where(|_| true)
    }

    /// Returns the step with the best value among `steps`; the first of equal ones.
    pub fn best_of(&self, steps: &[usize]) -> Option<usize> {
        self.best_where(|step| steps.contains(&step)).map(|(step, _)| step)
    }

    fn best_where(&self, is_wanted: impl Fn(usize) -> bool) -> Option<(usize, f64)> {
        let is_better = |a: f64, b: f64| if self.greater_is_better { a > b } else { a < b };
        let wanted = self.values.iter().copied().filter(|(step, _)| is_wanted(*step));
        wanted.reduce(|best, other| if is_better(other.1, best.1) { other } else { best })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_equal_values_the_first_is_the_best() {
        for (greater_is_better, want) in [(true, 20), (false, 10)] {
            let mut scores = Scores::of("acc".to_owned(), greater_is_better);
            assert_eq!(scores.best(), None);
            for (step, value) in [(10, 0.1), (20, 0.9), (30, 0.9), (40, 0.1), (50, f64::NAN)] {
                scores.add(step, value);
            }
            assert_eq!(scores.best().map(|(step, _)| step), Some(want));
            assert_eq!(scores.best_of(&[30, 40, 50]), Some(if greater_is_better { 30 } else { 40 }));
            assert_eq!(scores.best_of(&[50, 60]), None);
        }
    }

    #[test]
    fn a_step_has_one_value() {
        let mut scores = Scores::of("loss".to_owned(), false);
        scores.add(10, 1.0);
        scores.add(10, 2.0);
        assert_eq!(scores.values, [(10, 2.0)]);
    }
}
