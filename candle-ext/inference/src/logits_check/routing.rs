//! Selections of a file's routers compared with those of the source.

use std::fmt;
use std::iter::Sum;

use serde::Serialize;

/// Difference of the experts that a file's routers select from those of the source, over all tokens and layers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RoutingDifference {
    /// Number of selections.
    pub n_selections: usize,
    /// Number of selections with other experts.
    pub n_other: usize,
    /// Norm of the least change of the file's router logits after which it selects the source's experts, over the norm of these
    /// logits, each selection's mean subtracted.
    pub relative: f64,
}

impl fmt::Display for RoutingDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n_selections, n_other, relative } = self;
        write!(f, "other experts in {n_other} of {n_selections} selections, by {relative:.2e} of the router logits")
    }
}

/// Sums over selections.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoutingSums {
    n: usize,
    n_other: usize,
    /// Sum of squares of the least changes.
    change: f64,
    /// Sum of squares of the logits.
    total: f64,
}

impl RoutingSums {
    /// Compares a router's logits with the experts that the source selects.
    pub(super) fn of(logits: &[f32], selected: &[u32]) -> Self {
        let is_selected = |expert: usize| selected.contains(&(expert as u32));
        let logit = |expert: &usize| f64::from(logits[*expert]);
        let least = selected.iter().map(|expert| logit(&(*expert as usize))).fold(f64::INFINITY, f64::min);
        let others = (0..logits.len()).filter(|expert| !is_selected(*expert));
        let missed: Vec<f64> = others.map(|expert| logit(&expert) - least).filter(|missed| *missed > 0.0).collect();
        // Two logits become equal if each changes by half of their distance.
        let change = missed.iter().fold(0.0, |largest: f64, missed| largest.max(missed * missed / 2.0));
        let mean = logits.iter().map(|x| f64::from(*x)).sum::<f64>() / logits.len() as f64;
        let total = logits.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum();
        Self { n: 1, n_other: usize::from(!missed.is_empty()), change, total }
    }

    /// Returns the difference; `None` without selections.
    pub(super) fn difference(self) -> Option<RoutingDifference> {
        let Self { n, n_other, change, total } = self;
        let relative = if change > 0.0 { (change / total).sqrt() } else { 0.0 };
        (n > 0).then_some(RoutingDifference { n_selections: n, n_other, relative })
    }
}

impl Sum for RoutingSums {
    fn sum<I: Iterator<Item = Self>>(sums: I) -> Self {
        sums.fold(Self::default(), |a, b| Self {
            n: a.n + b.n,
            n_other: a.n_other + b.n_other,
            change: a.change + b.change,
            total: a.total + b.total,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(logits: &[f32], selected: &[u32], n_other: usize, relative: f64) {
        let found = RoutingSums::of(logits, selected).difference().map(|it| (it.n_selections, it.n_other, it.relative));
        assert_eq!(found, Some((1, n_other, relative)));
    }

    #[test]
    fn a_selection_differs_by_the_change_that_restores_it() {
        check(&[3.0, 1.0, 2.0], &[0, 2], 0, 0.0);
        check(&[3.0, 1.0, 2.0], &[2, 0], 0, 0.0);
        check(&[3.0, 1.0, 2.0], &[0, 1], 1, 0.5);
        check(&[1.0, -1.0], &[1], 1, 1.0);
        // A tie may have either expert.
        check(&[1.0, 1.0, 0.0], &[1], 0, 0.0);
        assert_eq!(RoutingSums::default().difference(), None);
    }
}
