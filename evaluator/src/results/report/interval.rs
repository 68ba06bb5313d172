//! Positions of a value and its confidence interval on an axis.

use serde::Serialize;

use super::super::Z_95;

/// Positions of a value and its interval's bounds on an axis from 0 to 100. Bounds beyond the axis are clamped.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Interval {
    low: f64,
    at: f64,
    high: f64,
}

/// Range of an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    pub(super) from: f64,
    pub(super) to: f64,
}

impl Scale {
    pub(super) const UNIT: Self = Self { from: 0.0, to: 1.0 };

    /// Returns a scale with round ends that contains all values and 0; 0 to 1 if all values are between.
    pub(super) fn covering(values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = values
            .filter(|value| value.is_finite())
            .fold((0.0_f64, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
        match low >= 0.0 && high <= 1.0 {
            true => Self::UNIT,
            // Avoids an end of -0.
            false => Self { from: 0.0 - round_up(-low), to: round_up(high) },
        }
    }

    /// Returns a scale that is symmetric around 0.
    pub(super) fn symmetric(values: impl Iterator<Item = f64>) -> Self {
        let most = values.filter(|value| value.is_finite()).fold(0.0_f64, |most, value| most.max(value.abs()));
        let most = if most > 0.0 { round_up(most) } else { 1.0 };
        Self { from: -most, to: most }
    }

    pub(super) fn position(self, value: f64) -> f64 {
        (100.0 * (value - self.from) / (self.to - self.from)).clamp(0.0, 100.0)
    }

    /// Returns the positions of a value and of its interval's bounds.
    pub(super) fn interval(self, value: f64, [low, high]: [f64; 2]) -> Interval {
        Interval { low: self.position(low), at: self.position(value), high: self.position(high) }
    }
}

/// Returns the 95 % confidence interval of a value: value ± 1.96 standard errors. Without an error both bounds are
/// the value.
pub(super) fn confidence_interval(value: f64, stderr: Option<f64>) -> [f64; 2] {
    let half = Z_95 * stderr.unwrap_or(0.0);
    [value - half, value + half]
}

/// Rounds up to the next of ..., 0.1, 0.2, 0.5, 1, 2, 5, ...; 0 stays 0.
pub(super) fn round_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 0.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| *step >= value * (1.0 - 1e-9)).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_have_round_ends_and_hold_zero() {
        let covering = |values: &[f64]| Scale::covering(values.iter().copied());
        assert_eq!(covering(&[0.2, 1.0]), Scale::UNIT);
        assert_eq!(covering(&[f64::NAN]), Scale::UNIT);
        assert_eq!(covering(&[12.3, 45.0]), Scale { from: 0.0, to: 50.0 });
        assert_eq!(covering(&[-0.3, 0.5]), Scale { from: -0.5, to: 0.5 });
        assert_eq!(Scale::symmetric([-0.04, 0.01].into_iter()), Scale { from: -0.05, to: 0.05 });
        assert_eq!([0.1, 0.11, 3.0, 1000.0, 0.0].map(round_up), [0.1, 0.2, 5.0, 1000.0, 0.0]);
    }

    #[test]
    fn an_interval_is_cut_at_the_ends_of_its_line() {
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        let Interval { low, at, high } = Scale::UNIT.interval(0.9, confidence_interval(0.9, Some(0.1)));
        assert!(near(low, 100.0 * (0.9 - 0.1 * Z_95)) && near(at, 90.0) && near(high, 100.0), "{low} {at} {high}");
        assert_eq!(confidence_interval(0.5, None), [0.5, 0.5]);
    }
}
