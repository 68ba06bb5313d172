//! The last losses of a run, from which the loss watchdog computes the limit of the next one.

use serde::{Deserialize, Serialize};

/// Ratio of a normal distribution's standard deviation to its median absolute deviation.
const SIGMA_PER_MAD: f64 = 1.4826;

/// The fraction of a normal distribution more than two standard deviations above its median.
const ABOVE_TWO_SIGMA: f64 = 0.0228;

/// The least standard deviation, in nats: without noise every small change would be a spike.
const LEAST_SIGMA: f64 = 0.05;

/// The losses of the last steps, and the number of loss spikes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossHistory {
    /// The steps and their losses, oldest first. Losses that are not finite are left out.
    pub losses: Vec<(usize, f64)>,
    /// The number of loss spikes so far.
    pub n_spikes: usize,
    /// The steps of `losses` that were loss spikes. Old checkpoints have none.
    #[serde(default)]
    pub spike_steps: Vec<usize>,
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
        let oldest = self.losses.first().map_or(step, |(step, _)| *step);
        self.spike_steps.retain(|spike| *spike >= oldest);
    }

    /// Records that the loss of `step`, which was added before, is a spike.
    pub fn add_spike(&mut self, step: usize) {
        self.n_spikes += 1;
        self.spike_steps.push(step);
    }

    /// Replaces the losses by those of an earlier step. The number of spikes stays.
    pub fn rewind_to(&mut self, earlier: &Self) {
        self.losses.clone_from(&earlier.losses);
        self.spike_steps.clone_from(&earlier.spike_steps);
    }

    /// Returns the limit of the loss of `step`: `sigma_factor` robust standard deviations above the median of the last
    /// losses. Returns `None` with fewer than two losses.
    ///
    /// It depends on no later step than `step - LAG`, so it is equal on all ranks and after a resume.
    pub fn limit(&self, step: usize, rolling_interval_length: usize, sigma_factor: f64) -> Option<f64> {
        let known = self.losses.iter().rev().filter(|(known, _)| known + Self::LAG <= step);
        let known: Vec<&(usize, f64)> = known.take(rolling_interval_length).collect();
        let losses: Vec<f64> = known.iter().map(|(_, loss)| *loss).collect();
        if losses.len() < 2 {
            return None;
        }
        let middle = median(losses.clone());
        let mad = median(losses.iter().map(|loss| (loss - middle).abs()).collect());
        let normal = known.iter().filter(|(step, _)| !self.spike_steps.contains(step)).map(|(_, loss)| *loss);
        let sigma = (SIGMA_PER_MAD * mad).max(sigma_above_median(normal.collect(), middle)).max(LEAST_SIGMA);
        Some(middle + sigma_factor * sigma)
    }
}

/// Estimates the standard deviation from the largest losses: half the distance from the median to the loss that is two
/// deviations above it in a normal distribution. The loss of a mixture of data has such a tail, which a median absolute
/// deviation does not see.
///
/// `losses` are those that were no spikes: else a third spike in 128 steps would raise the limit above it. It reads the third
/// largest of 128 losses. Returns 0 if it would read the largest loss, with fewer than 44.
fn sigma_above_median(mut losses: Vec<f64>, middle: f64) -> f64 {
    let n_above = (ABOVE_TWO_SIGMA * losses.len() as f64) as usize;
    losses.sort_by(|a, b| b.total_cmp(a));
    if n_above == 0 { 0.0 } else { (losses[n_above] - middle) / 2.0 }
}

/// Returns the median of at least one value.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
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
        assert_eq!(history(&[2.0; 6], 10).limit(8, 10, 5.0), Some(2.0 + 5.0 * 0.05));
    }

    #[test]
    fn two_spikes_in_a_window_of_128_do_not_raise_the_limit() {
        let losses: Vec<f64> = (0..128).map(|i| 2.0 + 0.1 * (f64::from(i) * 0.7).sin()).collect();
        let quiet = history(&losses, 128).limit(130, 128, 6.0).unwrap();
        for spikes in [&[40][..], &[40, 100]] {
            let mut losses = losses.clone();
            spikes.iter().for_each(|&at: &usize| losses[at] = 9.0);
            let limit = history(&losses, 128).limit(130, 128, 6.0).unwrap();
            assert!((limit - quiet).abs() < 0.02 && quiet < 2.7, "{quiet} {limit}");
        }
    }

    #[test]
    fn every_one_of_several_equal_spikes_in_a_window_is_found() {
        let mut seen = LossHistory::default();
        let mut found = Vec::new();
        for step in 1..=400 {
            let is_raised = step > 130 && step % 20 == 0;
            let loss = if is_raised { 9.0 } else { 2.0 + 0.1 * (step as f64 * 0.7).sin() };
            let limit = seen.limit(step, 128, 6.0).filter(|_| step > 64);
            seen.add(step, loss, 128);
            if limit.is_some_and(|limit| loss > limit) {
                seen.add_spike(step);
                found.push(step);
            }
        }
        assert_eq!(found, (140..=400).step_by(20).collect::<Vec<_>>());
        assert_eq!((seen.n_spikes, &seen.spike_steps[..]), (14, &[280, 300, 320, 340, 360, 380, 400][..]));
    }

    #[test]
    fn a_history_without_steps_of_spikes_is_read() {
        let old: LossHistory = serde_json::from_str(r#"{"losses": [[1, 2.5]], "n_spikes": 3}"#).unwrap();
        assert_eq!(old, LossHistory { losses: vec![(1, 2.5)], n_spikes: 3, spike_steps: Vec::new() });
    }

    /// The losses are of a run of the quickstart over 3,000 steps: tests/reference/quickstart_losses.py wrote them. Some rows
    /// are of a rare kind with a much higher loss. Most losses would be spikes if they were two nats higher.
    #[test]
    fn the_quickstart_has_no_loss_spike() {
        let text = include_str!("tests/quickstart_losses.txt");
        let losses: Vec<f64> = text.split_whitespace().map(|loss| loss.parse().unwrap()).collect();
        let (mut seen, mut n_found) = (LossHistory::default(), 0);
        for (&loss, step) in losses.iter().zip(1..) {
            if let Some(limit) = seen.limit(step, 128, 6.0).filter(|_| step > 64) {
                assert!(loss <= limit, "step {step}: {loss} is above {limit}");
                n_found += usize::from(loss + 2.0 > limit);
            }
            seen.add(step, loss, 128);
        }
        assert!(n_found * 2 > losses.len(), "{n_found} of {} raised losses are spikes", losses.len());
    }

    #[test]
    fn old_and_nonfinite_losses_are_dropped() {
        let history = history(&[1.0, f64::NAN, 2.0, 3.0, 4.0, 5.0, f64::INFINITY], 2);
        assert_eq!(history.losses, [(3, 2.0), (4, 3.0), (5, 4.0), (6, 5.0)]);
    }
}
