//! Learning rates compared with those of transformers (`tests/reference/schedules.py` writes the fixture).

use serde::Deserialize;
use trainer::schedule::{FEW_STEPS, Floor, PhaseLength, Ramp, Schedule, ScheduleError, Shape};

#[derive(Deserialize)]
struct Case {
    schedule: Schedule,
    total_steps: usize,
    base_lr: f64,
    lr: Vec<f64>,
}

#[test]
fn every_learning_rate_is_that_of_transformers() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("../fixtures/schedules.json")).unwrap();
    assert!(cases.len() > 40);
    for Case { schedule, total_steps, base_lr, lr } in cases {
        for (step, &want) in lr.iter().enumerate() {
            let got = schedule.lr(step, total_steps, base_lr);
            // The second term is for a cosine near 0, which has no correct digits.
            let bound = 1e-12 * want.abs() + 1e-16 * base_lr;
            assert!((got - want).abs() <= bound, "{schedule:?} step {step}: {got:e}, not {want:e}");
        }
        assert_eq!(schedule.check(total_steps, base_lr), Ok(()));
    }
}

#[test]
fn a_ratio_is_rounded_up() {
    for (ratio, total, want) in [(0.1, 20, 2), (0.1, 21, 3), (0.0, 9, 0), (1.0, 9, 9), (1e-9, 9, 1)] {
        assert_eq!(PhaseLength::Ratio(ratio).steps(total), want);
    }
}

#[test]
fn a_warmup_starts_at_zero_and_ends_at_the_base_rate() {
    let schedule = Schedule { warmup: PhaseLength::Steps(4), shape: Shape::Linear };
    assert_eq!(schedule.lr(0, FEW_STEPS, 1e-3), 0.0);
    assert_eq!(schedule.lr(4, FEW_STEPS, 1e-3), 1e-3);
    assert_eq!(schedule.lr(FEW_STEPS, FEW_STEPS, 1e-3), 0.0);
}

#[test]
fn no_step_of_a_short_run_has_a_rate_of_zero() {
    let shapes = [Shape::Constant, Shape::Linear, Shape::Cosine { num_cycles: 0.5 }, wsd(PhaseLength::Ratio(0.1))];
    for (shape, total) in shapes.into_iter().flat_map(|shape| (1..FEW_STEPS).map(move |total| (shape, total))) {
        for warmup in (0..=total).map(PhaseLength::Steps).chain([PhaseLength::Ratio(0.1)]) {
            let schedule = Schedule { warmup, shape };
            let rates: Vec<f64> = (0..total).map(|step| schedule.lr(step, total, 1.0)).collect();
            assert!(rates.iter().all(|rate| *rate > 0.0), "{schedule:?}: {rates:?}");
        }
    }
    let rates = |warmup, total| {
        let schedule = Schedule { warmup: PhaseLength::Steps(warmup), shape: Shape::Constant };
        [0, 1, 2, 3].map(|step| schedule.lr(step, total, 1.0))
    };
    assert_eq!(rates(1, 3), [0.5, 1.0, 1.0, 1.0]);
    assert_eq!(rates(3, FEW_STEPS - 1), [0.25, 0.5, 0.75, 1.0]);
}

/// A longer run keeps transformers' first step at rate 0, and no other.
#[test]
fn a_warmup_makes_at_most_the_first_step_of_a_long_run_zero() {
    let shapes = [
        Shape::Constant,
        Shape::Linear,
        Shape::Cosine { num_cycles: 0.5 },
        Shape::CosineWithRestarts { num_cycles: 2 },
        Shape::CosineWithMinLr { num_cycles: 0.5, floor: Floor::MinLrRate(0.1) },
        Shape::InverseSqrt { timescale: None },
        polynomial(0.0),
        wsd(PhaseLength::Ratio(0.1)),
    ];
    for (shape, total) in shapes.into_iter().flat_map(|shape| (1..2 * FEW_STEPS).map(move |total| (shape, total))) {
        let ratios = [0.01, 0.1, 0.5, 0.9].map(PhaseLength::Ratio);
        for warmup in (0..=total).map(PhaseLength::Steps).chain(ratios).chain([PhaseLength::Tokens(70)]) {
            let schedule = Schedule { warmup, shape }.in_steps(|| (0..total).map(|_| 10));
            let zeros: Vec<usize> = (0..total).filter(|step| schedule.lr(*step, total, 1.0) == 0.0).collect();
            let is_long_with_warmup = total >= FEW_STEPS && schedule.warmup_steps(total) > 0;
            let want: &[usize] = if is_long_with_warmup { &[0] } else { &[] };
            assert_eq!(zeros, want, "{schedule:?} of {total} steps");
        }
    }
}

#[test]
fn runs_of_zero_and_one_steps_have_finite_learning_rates() {
    for shape in [Shape::Linear, Shape::Cosine { num_cycles: 0.5 }, polynomial(0.0), wsd(PhaseLength::Ratio(0.5))] {
        for total in 0..3 {
            for warmup in 0..=total {
                let schedule = Schedule { warmup: PhaseLength::Steps(warmup), shape };
                for step in 0..5 {
                    let lr = schedule.lr(step, total, 1.0);
                    assert!((0.0..=1.0).contains(&lr), "{schedule:?} {step}/{total}: {lr}");
                }
            }
        }
    }
}

#[track_caller]
fn check(warmup: PhaseLength, shape: Shape, want: &str) {
    let error: ScheduleError = Schedule { warmup, shape }.check(10, 1e-3).unwrap_err();
    assert!(error.to_string().starts_with(want), "{error}");
}

fn polynomial(lr_end: f64) -> Shape {
    Shape::Polynomial { lr_end, power: 1.0 }
}

fn wsd(decay: PhaseLength) -> Shape {
    Shape::WarmupStableDecay {
        stable: None,
        decay,
        warmup_type: Ramp::Linear,
        decay_type: Ramp::OneMinusSqrt,
        min_lr_ratio: 0.0,
        num_cycles: 0.5,
    }
}

#[test]
fn a_decay_ratio_takes_the_steps_after_the_warmup() {
    let schedule = Schedule { warmup: PhaseLength::Ratio(0.1), shape: wsd(PhaseLength::Ratio(0.9)) };
    for total_steps in [10, 1124, 1125, 997] {
        schedule.check(total_steps, 1e-3).unwrap();
        let first_of_decay = (total_steps as f64 * 0.1).ceil() as usize;
        assert_eq!(schedule.lr(first_of_decay, total_steps, 1e-3), 1e-3, "{total_steps}");
        assert!(schedule.lr(first_of_decay + 1, total_steps, 1e-3) < 1e-3);
        assert!(schedule.lr(total_steps, total_steps, 1e-3) == 0.0);
    }
    let schedule = Schedule { warmup: PhaseLength::Ratio(0.5), shape: wsd(PhaseLength::Ratio(0.6)) };
    assert!(schedule.check(1000, 1e-3).is_err());
}

#[test]
fn invalid_schedules_are_refused() {
    let none = PhaseLength::Steps(0);
    check(PhaseLength::Steps(11), Shape::Linear, "fit 11 warm-up steps into a run of 10 steps");
    check(PhaseLength::Ratio(1.5), Shape::Linear, "use a warm-up ratio of 1.5: it must be between 0 and 1");
    check(PhaseLength::Ratio(f64::NAN), Shape::Linear, "use a warm-up ratio of NaN: it must be between 0 and 1");
    check(
        PhaseLength::Steps(6),
        wsd(PhaseLength::Steps(5)),
        "fit 11 warm-up, stable and decay steps into a run of 10 steps",
    );
    check(
        none,
        polynomial(0.01),
        "decay from a learning rate of 0.001 to 0.01: the final rate must be between 0 and the base rate",
    );
    let floor = Floor::MinLr(f64::INFINITY);
    let shape = Shape::CosineWithMinLr { num_cycles: 0.5, floor };
    check(
        none,
        shape,
        "decay from a learning rate of 0.001 to inf: the final rate must be between 0 and the base rate",
    );
    let shape = Shape::InverseSqrt { timescale: Some(0) };
    check(none, shape, "use timescale = 0: it must be a finite number above 0");
}
