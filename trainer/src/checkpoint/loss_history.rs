//! The last losses of a run, from which the loss watchdog computes the limit of the next one.

use serde::{Deserialize, Serialize};

/// Ratio of a normal distribution's standard deviation to its median absolute deviation.
const SIGMA_PER_MAD: f64 = 1.4826;

/// The least standard deviation, as a fraction of the median: without noise every small change would be a spike.
const LEAST_SIGMA: f64 = 0.01;

/// The losses of the last steps, and the number of loss spikes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossHistory {
    /// The steps and their losses, oldest first. Losses that are not finite are left out.
    pub losses: Vec<(usize, f64)>,
    /// The number of loss spikes so far.
    pub n_spikes: usize,
}

impl LossHistory {
    /// The number of steps between a step and the last one that determines its limit. A step starts before the loss of the
    /// previous one is known.
    pub const LAG: usize = 2;

    /// Adds the loss of a step, and drops the losses that no later limit needs.
    pub fn add(&mut self, step: usize, loss: f64, rolling_interval_length: usize) {
        if loss.is_finite() {
            self.losses.push((step, loss));
        }
        let n_dropped = self.losses.len().saturating_sub(rolling_interval_length + Self::LAG);
        self.losses.drain(..n_dropped);
    }

    /// Returns the limit of the loss of `step`: `sigma_factor` robust standard deviations above the median of the last
    /// losses. Returns `None` with fewer than two losses.
    ///
    /// It depends on no later step than `step - LAG`, so it is equal on all ranks and after a resume.
    pub fn limit(&self, step: usize, rolling_interval_length: usize, sigma_factor: f64) -> Option<f64> {
        let known = self.losses.iter().rev().filter(|(known, _)| known + Self::LAG <= step);
        let losses: Vec<f64> = known.take(rolling_interval_length).map(|(_, loss)| *loss).collect();
        if losses.len() < 2 {
            return None;
        }
        let middle = median(losses.clone());
        let mad = median(losses.iter().map(|loss| (loss - middle).abs()).collect());
        let sigma = (SIGMA_PER_MAD * mad).max(LEAST_SIGMA * middle.abs());
        Some(middle + sigma_factor * sigma)
    }
}

/// Returns the median of at least one value.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(losses: &[f64], rolling_interval_length: usize) -> LossHistory {
        let mut history = LossHistory::default();
        losses.iter().zip(1..).for_each(|(loss, step)| history.add(step, *loss, rolling_interval_length));
        history
    }

    #[test]
    fn the_limit_is_a_number_of_deviations_above_the_median() {
        let history = history(&[1.0, 2.0, 3.0, 4.0, 100.0], 10);
        // The median of 1, 2, 3, 4 and 100 is 3, their median absolute deviation 1.
        let close = |limit: Option<f64>, want: f64| limit.is_some_and(|limit| (limit - want).abs() < 1e-12);
        assert!(close(history.limit(7, 10, 2.0), 3.0 + 2.0 * 1.4826));
        // The loss of step 5 is not known when step 6 starts: the median of four is 2.5, their deviation 1.
        assert!(close(history.limit(6, 10, 2.0), 2.5 + 2.0 * 1.4826));
        // The last two of the known ones.
        assert!(close(history.limit(6, 2, 2.0), 3.5 + 2.0 * 1.4826 * 0.5));
        assert_eq!(history.limit(3, 10, 2.0), None);
    }

    #[test]
    fn equal_losses_allow_some_noise() {
        assert_eq!(history(&[2.0; 6], 10).limit(8, 10, 5.0), Some(2.0 + 5.0 * 0.02));
    }

    #[test]
    fn old_and_nonfinite_losses_are_dropped() {
        let history = history(&[1.0, f64::NAN, 2.0, 3.0, 4.0, 5.0, f64::INFINITY], 2);
        assert_eq!(history.losses, [(3, 2.0), (4, 3.0), (5, 4.0), (6, 5.0)]);
    }
}
