//! Losses and gradients that are not finite: the failing loss, and the samples that it came from.

use std::collections::BTreeMap;

use anyhow::Result;
use candlewick_model::RouterLoss;
use candlewick_parallel::AuxiliaryLoss;

use crate::data::{GlobalBatch, TrainSteps};
use crate::recipe::OnNonfinite;
use crate::step_error::NonFinite;

/// A weighted auxiliary loss explains a gradient that is not finite if it is this many times the loss.
const EXCESSIVE: f64 = 1e6;

/// The part of a step that is not finite.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is not finite{cause}")]
pub(super) struct NonFinitePart {
    /// The loss, the name of an auxiliary loss, or the gradient.
    name: String,
    /// End of the message: the coefficient that is too large, if one is.
    cause: String,
}

impl NonFinitePart {
    /// Finds the part of a step whose update was refused. `losses` are the auxiliary losses, and `means` their values.
    pub(super) fn of(loss: f64, losses: &[AuxiliaryLoss], means: &BTreeMap<String, f64>) -> Self {
        let part = |name: &str, cause| Self { name: name.to_owned(), cause };
        if !loss.is_finite() {
            return part("loss", String::new());
        }
        if let Some((name, _)) = means.iter().find(|(_, mean)| !mean.is_finite()) {
            return part(name, String::new());
        }
        part("gradient", excessive_coefficient(loss, losses, means).unwrap_or_default())
    }
}

/// Describes the coefficient that makes an auxiliary loss far larger than `loss`, if there is one.
fn excessive_coefficient(loss: f64, losses: &[AuxiliaryLoss], means: &BTreeMap<String, f64>) -> Option<String> {
    let weighted = |loss: &AuxiliaryLoss| means.get(&loss.name).map_or(0.0, |mean| (mean * loss.coefficient).abs());
    let largest = losses.iter().max_by(|a, b| weighted(a).total_cmp(&weighted(b)))?;
    let (key, value) = (coefficient_key(&largest.name), weighted(largest));
    let describe = || format!(": {} with {key} is {value:.1e}; lower {key}", largest.name);
    (value > EXCESSIVE * loss.abs().max(1.0)).then(describe)
}

/// Returns the recipe key of the coefficient of an auxiliary loss.
fn coefficient_key(name: &str) -> &'static str {
    match RouterLoss::ALL.into_iter().find(|loss| loss.name() == name) {
        Some(RouterLoss::Z) => "moe.z_loss_coeff",
        Some(_) => "moe.aux_loss_coeff",
        None => "model.mtp_loss_scaling_factor",
    }
}

impl NonFinite {
    /// Fails if `on_nonfinite` is `stop`, else warns.
    pub(super) fn stop_or_warn(self, on_nonfinite: OnNonfinite) -> Result<()> {
        match on_nonfinite {
            OnNonfinite::Stop => Err(self.into()),
            OnNonfinite::Skip => {
                tracing::warn!("skipped step {}: the {}. {}", self.step, self.part, self.rows);
                Ok(())
            }
        }
    }
}

/// Returns the samples of this rank's micro-batches whose loss is not finite. If there are none, returns those of other
/// ranks' micro-batches of the same round.
pub(super) fn nonfinite_rows(
    step: &GlobalBatch,
    own: &[usize],
    data_world: usize,
    [sums, of_all]: [&[f32]; 2],
) -> Vec<usize> {
    let wrong = |sums: &[f32]| (0..own.len()).filter(|round| !sums[*round].is_finite()).collect::<Vec<_>>();
    let mine = wrong(sums).into_iter().map(|round| own[round]);
    let mut micros: Vec<usize> = mine.collect();
    if micros.is_empty() {
        micros = wrong(of_all).into_iter().flat_map(|round| round * data_world..(round + 1) * data_world).collect();
    }
    let batches = micros.into_iter().filter_map(|micro_idx| step.micro_batches.get(micro_idx));
    batches.flat_map(|batch| batch.samples.iter().copied()).collect()
}

/// Names the samples of a step, or those among them with a non-finite loss.
pub(super) fn locate(stream: &TrainSteps, step: &GlobalBatch, nonfinite_rows: &[usize]) -> String {
    const SHOWN: usize = 5;
    let all: Vec<usize> = step.micro_batches.iter().flat_map(|batch| batch.samples.iter().copied()).collect();
    let rows = if nonfinite_rows.is_empty() { &all[..] } else { nonfinite_rows };
    let mut places: Vec<String> = rows.iter().take(SHOWN).map(|&row| stream.locate(row)).collect();
    if rows.len() > SHOWN {
        places.push(format!("and {} more", rows.len() - SHOWN));
    }
    format!("Samples: {}", places.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_failing_loss_is_named() {
        let loss = |name: &str, coefficient| AuxiliaryLoss { name: name.to_owned(), coefficient, normalizer: 1.0 };
        let losses = [loss("z_loss", 1e37), loss("load_balancing_loss", 0.01), loss("mtp_1 loss", 1e30)];
        let part = |main, [z, balance, mtp]: [f64; 3]| {
            let means = [("z_loss", z), ("load_balancing_loss", balance), ("mtp_1 loss", mtp)];
            let means = means.into_iter().map(|(name, mean)| (name.to_owned(), mean)).collect();
            NonFinitePart::of(main, &losses, &means).to_string()
        };
        let (nan, infinite) = (f64::NAN, f64::INFINITY);
        assert_eq!(part(nan, [1.0, 1.0, nan]), "loss is not finite");
        assert_eq!(part(2.0, [1.0, 1.0, nan]), "mtp_1 loss is not finite");
        assert_eq!(part(2.0, [infinite, 1.0, 1.0]), "z_loss is not finite");
        let of_key = |text: &str, key: &str| format!("gradient is not finite: {text}; lower {key}");
        let (z, mtp) = ("moe.z_loss_coeff", "model.mtp_loss_scaling_factor");
        assert_eq!(part(2.0, [3.0, 1.0, 2.0]), of_key("z_loss with moe.z_loss_coeff is 3.0e37", z));
        assert_eq!(part(2.0, [0.0, 1.0, 2.5]), of_key("mtp_1 loss with model.mtp_loss_scaling_factor is 2.5e30", mtp));
        assert_eq!(part(2.0, [0.0, 1.0, 0.0]), "gradient is not finite");
        assert_eq!(coefficient_key("seq_load_balancing_loss"), "moe.aux_loss_coeff");
    }
}
