//! What evaluations of a run came to: which of its saves is the best.

use serde::{Deserialize, Serialize};

/// The values of the one metric that decides.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// The metric; empty if nothing decides.
    pub metric: String,
    /// Whether more of it is better.
    pub greater_is_better: bool,
    /// The steps that were evaluated, each with its value.
    pub values: Vec<(usize, f64)>,
}

impl Scores {
    /// No values of a metric yet.
    pub fn of(metric: String, greater_is_better: bool) -> Self {
        Self { metric, greater_is_better, values: Vec::new() }
    }

    /// Tells whether both are about the same.
    pub fn is_about(&self, other: &Self) -> bool {
        self.metric == other.metric && self.greater_is_better == other.greater_is_better
    }

    /// Remembers the value after `step`. One that is not finite is no step's best.
    pub fn add(&mut self, step: usize, value: f64) {
        self.values.retain(|(known, _)| *known != step);
        if value.is_finite() {
            self.values.push((step, value));
        }
    }

    /// Returns the step with the best value and that value; of equal ones the first.
    pub fn best(&self) -> Option<(usize, f64)> {
        self.best_where(|_| true)
    }

    /// Returns the best of some steps; of equal ones the first.
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
    fn the_first_of_the_best_is_the_best() {
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
