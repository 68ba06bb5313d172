//! Learning-rate schedules as functions of the step, with the values of transformers' `get_scheduler`.
//!
//! A schedule has no state, so a resumed run needs only its step number.

use std::f64::consts::PI;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A run with fewer steps is short: the program warns about it, and its warm-up has no step at rate 0.
pub const FEW_STEPS: usize = 20;

/// A learning-rate schedule: a warm-up and a shape.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// The length of the warm-up. `PhaseLength::Steps(0)` disables it: transformers' `constant` ignores a warm-up, its
    /// `constant_with_warmup` does not.
    pub warmup: PhaseLength,
    /// The shape after the warm-up.
    pub shape: Shape,
}

/// The length of a phase of the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PhaseLength {
    /// A number of optimizer steps.
    Steps(usize),
    /// A fraction of all optimizer steps, between 0 and 1, rounded up to a full step.
    Ratio(f64),
    /// A number of training tokens. [`Schedule::in_steps`] replaces it by the steps that have them.
    Tokens(usize),
}

/// The shape of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "name")]
pub enum Shape {
    /// Stays at the base rate.
    Constant,
    /// Decays linearly to 0 at the last step.
    Linear,
    /// Follows a cosine; half a cycle ends at 0.
    Cosine {
        /// Number of cycles in the run; 0.5 decays once.
        num_cycles: f64,
    },
    /// Follows a cosine from the base rate to 0, several times.
    CosineWithRestarts {
        /// Number of cycles.
        num_cycles: usize,
    },
    /// Follows a cosine that ends above 0.
    CosineWithMinLr {
        /// Number of cycles in the run; 0.5 decays once.
        num_cycles: f64,
        /// The final rate.
        floor: Floor,
    },
    /// Warm-up, stable phase, decay (WSD). The warm-up starts at `min_lr_ratio` instead of 0.
    WarmupStableDecay {
        /// The length of the stable phase; `None` is all steps between warm-up and decay.
        stable: Option<PhaseLength>,
        /// The length of the decay.
        decay: PhaseLength,
        /// The form of the warm-up.
        warmup_type: Ramp,
        /// The form of the decay.
        decay_type: Ramp,
        /// The final rate as a fraction of the base rate.
        min_lr_ratio: f64,
        /// Number of cycles of a cosine decay; 0.5 decays once.
        num_cycles: f64,
    },
    /// Decays as 1 / sqrt(step).
    InverseSqrt {
        /// Steps until the rate has decayed to 1/sqrt(2); `None` is the warm-up, or 10,000 without one.
        timescale: Option<usize>,
    },
    /// Decays to `lr_end` as (remaining fraction)^power.
    Polynomial {
        /// The final rate.
        lr_end: f64,
        /// The exponent; 1 is linear.
        power: f64,
    },
}

/// The final rate of a cosine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Floor {
    /// A learning rate.
    MinLr(f64),
    /// A fraction of the base rate.
    MinLrRate(f64),
}

/// The form of a WSD warm-up or decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Ramp {
    /// Linear.
    #[serde(rename = "linear")]
    Linear,
    /// Cosine.
    #[serde(rename = "cosine")]
    Cosine,
    /// One minus a square root.
    #[serde(rename = "1-sqrt")]
    OneMinusSqrt,
}

/// The reason why a schedule is invalid for a run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// A ratio outside 0..=1.
    #[error("use a {what} ratio of {ratio}: it must be between 0 and 1")]
    Ratio {
        /// The phase.
        what: &'static str,
        /// The ratio.
        ratio: f64,
    },
    /// A phase that is longer than the run, or several that are together.
    #[error(
        "fit {n_steps} {what} steps into a run of {total_steps} steps; shorten them in `scheduler`, or train longer"
    )]
    TooLong {
        /// The phase.
        what: &'static str,
        /// Its steps.
        n_steps: usize,
        /// The run's steps.
        total_steps: usize,
    },
    /// A final rate above the base rate, or below 0.
    #[error("decay from a learning rate of {base_lr} to {end}: the final rate must be between 0 and the base rate")]
    EndAboveStart {
        /// The base rate.
        base_lr: f64,
        /// The final rate.
        end: f64,
    },
    /// A number that must be positive.
    #[error("use {what} = {value}: it must be a finite number above 0")]
    NotPositive {
        /// The recipe key.
        what: &'static str,
        /// The value.
        value: f64,
    },
}

impl Schedule {
    /// The constant schedule at the base rate.
    pub const CONSTANT: Self = Self { warmup: PhaseLength::Steps(0), shape: Shape::Constant };

    /// Returns the learning rate after `step` finished steps. As in transformers, the first step of a run uses `lr(0,
    /// ..)`, which is 0 with a warm-up. A run of fewer than [`FEW_STEPS`] steps cannot spare that step.
    pub fn lr(&self, step: usize, total_steps: usize, base_lr: f64) -> f64 {
        base_lr * self.factor(step, total_steps, base_lr)
    }

    /// Returns true if a phase has a length in tokens.
    pub fn has_tokens(&self) -> bool {
        let decay = if let Shape::WarmupStableDecay { decay, .. } = self.shape { Some(decay) } else { None };
        [Some(self.warmup), decay].into_iter().flatten().any(|length| matches!(length, PhaseLength::Tokens(_)))
    }

    /// Returns the schedule with steps instead of tokens. `tokens` yields the tokens of each step of the run.
    ///
    /// The warm-up are the first steps that have its tokens, the decay the last steps that have its tokens.
    #[must_use]
    pub fn in_steps<I: Iterator<Item = u64>>(mut self, tokens: impl FnOnce() -> I) -> Self {
        if !self.has_tokens() {
            return self;
        }
        let tokens: Vec<u64> = tokens().collect();
        if let PhaseLength::Tokens(wanted) = self.warmup {
            self.warmup = PhaseLength::Steps(steps_with(tokens.iter(), wanted));
        }
        if let Shape::WarmupStableDecay { decay, .. } = &mut self.shape
            && let PhaseLength::Tokens(wanted) = *decay
        {
            *decay = PhaseLength::Steps(steps_with(tokens.iter().rev(), wanted));
        }
        self
    }

    /// Returns the number of warm-up steps of a run.
    pub fn warmup_steps(&self, total_steps: usize) -> usize {
        self.warmup.steps(total_steps)
    }

    /// Fails if the schedule does not fit a run of `total_steps`.
    pub fn check(&self, total_steps: usize, base_lr: f64) -> Result<(), ScheduleError> {
        positive("learning_rate", base_lr)?;
        self.warmup.check("warm-up", total_steps)?;
        match self.shape {
            Shape::Constant | Shape::Linear => Ok(()),
            Shape::Cosine { num_cycles } => positive("num_cycles", num_cycles),
            Shape::CosineWithRestarts { num_cycles } => positive("num_cycles", num_cycles as f64),
            Shape::CosineWithMinLr { num_cycles, floor } => {
                positive("num_cycles", num_cycles)?;
                check_end(floor.rate(base_lr) * base_lr, base_lr)
            }
            Shape::WarmupStableDecay { num_cycles, min_lr_ratio, .. } => {
                positive("num_cycles", num_cycles)?;
                check_end(min_lr_ratio * base_lr, base_lr)?;
                self.check_phases(total_steps)
            }
            Shape::InverseSqrt { timescale } => timescale.map_or(Ok(()), |t| positive("timescale", t as f64)),
            Shape::Polynomial { lr_end, power } => {
                positive("power", power)?;
                check_end(lr_end, base_lr)
            }
        }
    }

    fn check_phases(&self, total_steps: usize) -> Result<(), ScheduleError> {
        let Shape::WarmupStableDecay { stable, decay, .. } = self.shape else { return Ok(()) };
        decay.check("decay", total_steps)?;
        stable.map_or(Ok(()), |phase| phase.check("stable", total_steps))?;
        let phases = || [Some(self.warmup), stable, Some(decay)].into_iter().flatten();
        let n_steps = phases().fold(0usize, |sum, phase| sum.saturating_add(phase.steps(total_steps)));
        // Each ratio is rounded up to a full step. A decay given as a ratio absorbs the rounding of the other phases.
        let n_ratios = phases().filter(|phase| matches!(phase, PhaseLength::Ratio(_))).count();
        let rounding_slack = if matches!(decay, PhaseLength::Ratio(_)) { n_ratios - 1 } else { 0 };
        let what = "warm-up, stable and decay";
        (n_steps <= total_steps + rounding_slack).then_some(()).ok_or(ScheduleError::TooLong {
            what,
            n_steps,
            total_steps,
        })
    }

    fn factor(&self, step: usize, total_steps: usize, base_lr: f64) -> f64 {
        let warmup = self.warmup_steps(total_steps);
        if let Shape::WarmupStableDecay { .. } = self.shape {
            return self.wsd_factor(step, total_steps);
        }
        if step < warmup {
            return warmup_progress(step, warmup, total_steps);
        }
        let after_warmup = total_steps.saturating_sub(warmup);
        let progress = (step - warmup) as f64 / after_warmup.max(1) as f64;
        match self.shape {
            Shape::Constant | Shape::WarmupStableDecay { .. } => 1.0,
            Shape::Linear => total_steps.saturating_sub(step) as f64 / after_warmup.max(1) as f64,
            Shape::Cosine { num_cycles } => cosine(num_cycles, progress).max(0.0),
            Shape::CosineWithRestarts { .. } if progress >= 1.0 => 0.0,
            Shape::CosineWithRestarts { num_cycles } => {
                let within = (num_cycles as f64 * progress) % 1.0;
                (0.5 * (1.0 + (PI * within).cos())).max(0.0)
            }
            Shape::CosineWithMinLr { num_cycles, floor } => {
                rescale(cosine(num_cycles, progress), floor.rate(base_lr)).max(0.0)
            }
            Shape::InverseSqrt { timescale } => {
                let timescale = timescale.unwrap_or(if warmup > 0 { warmup } else { 10_000 });
                let shifted = (step - warmup + timescale) as f64;
                1.0 / (shifted / timescale as f64).sqrt()
            }
            Shape::Polynomial { lr_end, .. } if step > total_steps => lr_end / base_lr,
            Shape::Polynomial { lr_end, power } => {
                ((base_lr - lr_end) * (1.0 - progress).powf(power) + lr_end) / base_lr
            }
        }
    }

    fn wsd_factor(&self, step: usize, total_steps: usize) -> f64 {
        let Shape::WarmupStableDecay { stable, decay, warmup_type, decay_type, min_lr_ratio, num_cycles } = self.shape
        else {
            return 1.0;
        };
        let warmup = self.warmup_steps(total_steps);
        let after_plateau = total_steps.saturating_sub(warmup + stable.map_or(0, |phase| phase.steps(total_steps)));
        let decay = match decay {
            PhaseLength::Steps(steps) => steps,
            ratio => ratio.steps(total_steps).min(after_plateau),
        };
        let remaining = total_steps.saturating_sub(warmup + decay);
        let decay_start = warmup + stable.map_or(remaining, |phase| phase.steps(total_steps));
        if step < warmup {
            let progress = warmup_progress(step, warmup, total_steps);
            return rescale(warmup_type.rise(progress), min_lr_ratio).max(0.0);
        }
        if step < decay_start {
            return 1.0;
        }
        if step < decay_start + decay {
            let progress = (step - decay_start) as f64 / decay as f64;
            return rescale(decay_type.fall(progress, num_cycles), min_lr_ratio).max(0.0);
        }
        min_lr_ratio
    }
}

impl PhaseLength {
    /// Returns the length in a run of `total_steps`.
    pub fn steps(self, total_steps: usize) -> usize {
        match self {
            PhaseLength::Steps(n) => n,
            PhaseLength::Ratio(ratio) => (total_steps as f64 * ratio).ceil() as usize,
            PhaseLength::Tokens(_) => unreachable!("Schedule::in_steps has replaced tokens by steps"),
        }
    }

    fn check(self, what: &'static str, total_steps: usize) -> Result<(), ScheduleError> {
        match self {
            PhaseLength::Ratio(ratio) if !(0.0..=1.0).contains(&ratio) => Err(ScheduleError::Ratio { what, ratio }),
            PhaseLength::Steps(n_steps) if n_steps > total_steps => {
                Err(ScheduleError::TooLong { what, n_steps, total_steps })
            }
            _ => Ok(()),
        }
    }
}

/// Returns the share of the warm-up that is done: transformers' `step / warmup`, or in a short run `(step + 1) / (warmup +
/// 1)`, the warm-up of nanoGPT.
fn warmup_progress(step: usize, warmup: usize, total_steps: usize) -> f64 {
    let first = usize::from(total_steps < FEW_STEPS);
    (step + first) as f64 / (warmup + first) as f64
}

/// Returns the number of first steps that have `wanted` tokens; one more than all steps if they have fewer.
fn steps_with<'a>(tokens: impl Iterator<Item = &'a u64>, wanted: usize) -> usize {
    let sums = tokens.scan(0, |sum, of_step| {
        *sum += of_step;
        Some(*sum)
    });
    let n_before = sums.take_while(|sum| *sum < wanted as u64).count();
    if wanted == 0 { 0 } else { n_before + 1 }
}

impl Floor {
    fn rate(self, base_lr: f64) -> f64 {
        match self {
            Floor::MinLr(min_lr) => min_lr / base_lr,
            Floor::MinLrRate(rate) => rate,
        }
    }
}

impl Ramp {
    fn rise(self, progress: f64) -> f64 {
        match self {
            Ramp::Linear => progress,
            Ramp::Cosine => 0.5 * (1.0 - (PI * progress).cos()),
            Ramp::OneMinusSqrt => 1.0 - (1.0 - progress).sqrt(),
        }
    }

    fn fall(self, progress: f64, num_cycles: f64) -> f64 {
        match self {
            Ramp::Linear => 1.0 - progress,
            Ramp::Cosine => cosine(num_cycles, progress),
            Ramp::OneMinusSqrt => 1.0 - progress.sqrt(),
        }
    }
}

/// Returns a cosine that is 1 at progress 0, and 0 half a cycle later.
fn cosine(num_cycles: f64, progress: f64) -> f64 {
    0.5 * (1.0 + (PI * num_cycles * 2.0 * progress).cos())
}

/// Maps 0..1 to floor..1.
fn rescale(factor: f64, floor: f64) -> f64 {
    factor * (1.0 - floor) + floor
}

fn positive(what: &'static str, value: f64) -> Result<(), ScheduleError> {
    (value.is_finite() && value > 0.0).then_some(()).ok_or(ScheduleError::NotPositive { what, value })
}

fn check_end(end: f64, base_lr: f64) -> Result<(), ScheduleError> {
    ((0.0..=base_lr).contains(&end)).then_some(()).ok_or(ScheduleError::EndAboveStart { base_lr, end })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the warm-up and decay steps of a run whose steps have these tokens.
    fn steps(warmup: PhaseLength, decay: PhaseLength, tokens: &[u64]) -> (PhaseLength, PhaseLength) {
        let shape = Shape::WarmupStableDecay {
            stable: None,
            decay,
            warmup_type: Ramp::Linear,
            decay_type: Ramp::Linear,
            min_lr_ratio: 0.0,
            num_cycles: 0.5,
        };
        let schedule = Schedule { warmup, shape }.in_steps(|| tokens.iter().copied());
        let Shape::WarmupStableDecay { decay, .. } = schedule.shape else { unreachable!() };
        (schedule.warmup, decay)
    }

    #[test]
    fn tokens_become_the_first_and_the_last_steps_that_have_them() {
        use PhaseLength::{Ratio, Steps, Tokens};
        let run = [10, 20, 30, 40, 50];
        for (warmup, decay, want) in [
            (Tokens(10), Tokens(50), (1, 1)),
            (Tokens(11), Tokens(51), (2, 2)),
            (Tokens(60), Tokens(90), (3, 2)),
            (Tokens(1), Tokens(150), (1, 5)),
            (Tokens(0), Tokens(0), (0, 0)),
            // Longer than the run, which the check refuses.
            (Tokens(151), Tokens(151), (6, 6)),
        ] {
            assert_eq!(steps(warmup, decay, &run), (Steps(want.0), Steps(want.1)), "{warmup:?} {decay:?}");
        }
        assert_eq!(steps(Ratio(0.5), Tokens(90), &run), (Ratio(0.5), Steps(2)));
        assert_eq!(steps(Steps(7), Ratio(0.1), &[]), (Steps(7), Ratio(0.1)));
    }
}
