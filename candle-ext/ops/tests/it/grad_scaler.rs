use candle_core::{Device, Tensor};
use candlewick_ops::{GradPolicy, GradScaler, LossLimit, LossScaling, StepDecision, UpdateOutcome};

use crate::cases::{TestDevice, assert_error};

const DYNAMIC: LossScaling = LossScaling { initial: 8.0, window: 3, hysteresis: 2, min: 2.0 };

/// Decides about a step whose gradients have these sums of squares.
fn judge(test_device: &TestDevice, scaler: &GradScaler, squares: &[f64], losses: &[f32]) -> StepDecision {
    judge_within(LossLimit::NONE, test_device, scaler, (squares, losses))
}

fn judge_within(
    limit: LossLimit,
    test_device: &TestDevice,
    scaler: &GradScaler,
    (squares, losses): (&[f64], &[f32]),
) -> StepDecision {
    let put = |x: Tensor| test_device.put(&x);
    let squares = put(Tensor::new(squares, &Device::Cpu).unwrap());
    let losses = put(Tensor::new(losses, &Device::Cpu).unwrap());
    test_device.run(|| scaler.update_within(limit, &squares, &losses)).unwrap();
    StepDecision::read(&scaler.state().to_vec1::<f32>().unwrap())
}

fn scaler(test_device: &TestDevice, policy: GradPolicy) -> GradScaler {
    GradScaler::new(policy, 0, &test_device.device()).unwrap()
}

#[test]
fn the_norm_is_that_of_all_parts_and_unscaled() {
    for test_device in TestDevice::all() {
        let loss_scaling = LossScaling { initial: 16.0, ..LossScaling::NONE };
        let scaler = scaler(&test_device, GradPolicy { loss_scaling, ..GradPolicy::NO_CLIP_NO_SCALE });
        let squares: Vec<f64> = (0..100).map(f64::from).collect();
        let verdict = judge(&test_device, &scaler, &squares, &[1.0; 70]);
        let want = 4950f64.sqrt() / 16.0;
        assert!((verdict.norm / want - 1.0).abs() < 1e-7, "{verdict:?}");
        assert_eq!(
            (verdict.outcome, verdict.next.n_updates, verdict.next.loss_scale),
            (UpdateOutcome::Applied, 1, 16.0)
        );
        assert_eq!(scaler.loss_scale().unwrap().unwrap().to_scalar::<f32>().unwrap(), 16.0);
    }
}

#[test]
fn a_large_gradient_is_clipped_and_a_small_one_left_alone() {
    for test_device in TestDevice::all() {
        let scaler = scaler(&test_device, GradPolicy { max_norm: Some(1.0), ..GradPolicy::NO_CLIP_NO_SCALE });
        assert!(scaler.loss_scale().unwrap().is_none());
        for (square, want) in [(16.0, 0.25), (0.25, 1.0), (0.0, 1.0)] {
            judge(&test_device, &scaler, &[square], &[1.0]);
            let factor = scaler.state().to_vec1::<f32>().unwrap()[1];
            assert!((factor - want).abs() < 1e-6, "{square}: {factor}");
        }
    }
}

#[test]
fn updates_are_counted_and_not_steps() {
    for test_device in TestDevice::all() {
        let scaler = scaler(&test_device, GradPolicy::NO_CLIP_NO_SCALE);
        for square in [1.0, f64::INFINITY, 1.0, f64::NAN, 1.0] {
            judge(&test_device, &scaler, &[square], &[1.0]);
        }
        let state = scaler.state().to_vec1::<f32>().unwrap();
        assert_eq!(StepDecision::read(&state).next.n_updates, 3);
    }
}

/// Follows DeepSpeed's DynamicLossScaler, worked out by hand.
#[test]
fn the_loss_scale_doubles_after_good_steps_and_is_halved_by_the_second_overflow() {
    for test_device in TestDevice::all() {
        let scaler = scaler(&test_device, GradPolicy { loss_scaling: DYNAMIC, ..GradPolicy::NO_CLIP_NO_SCALE });
        let (good, bad) = (1.0, f64::INFINITY);
        let steps = [good, good, good, bad, good, bad, bad, bad, good, good, good, bad, good];
        let scales = [8.0, 8.0, 16.0, 16.0, 16.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0];
        for (i, (square, scale)) in steps.into_iter().zip(scales).enumerate() {
            let verdict = judge(&test_device, &scaler, &[square], &[1.0]);
            let outcome = if square == good { UpdateOutcome::Applied } else { UpdateOutcome::Overflowed };
            assert_eq!((verdict.outcome, verdict.next.loss_scale), (outcome, scale), "step {i} {test_device:?}");
        }
        // 13 steps, 5 of them overflows.
        assert_eq!(judge(&test_device, &scaler, &[good], &[1.0]).next.n_updates, 9);
    }
}

#[test]
fn a_non_finite_loss_is_not_an_overflow() {
    for test_device in TestDevice::all() {
        let policy =
            GradPolicy { loss_scaling: LossScaling { initial: 2.0, ..DYNAMIC }, ..GradPolicy::NO_CLIP_NO_SCALE };
        let at_least = judge(&test_device, &scaler(&test_device, policy), &[f64::INFINITY], &[1.0]);
        assert_eq!(at_least.outcome, UpdateOutcome::NonFinite);
        let policy = GradPolicy { loss_scaling: DYNAMIC, ..policy };
        let of_loss = judge(&test_device, &scaler(&test_device, policy), &[1.0], &[1.0, f32::NAN, 1.0]);
        assert_eq!((of_loss.outcome, of_loss.next.n_updates), (UpdateOutcome::NonFinite, 0));
    }
}

#[test]
fn a_stopped_run_applies_no_further_update() {
    for test_device in TestDevice::all() {
        for (stop_on_nonfinite, later) in [(true, UpdateOutcome::Halted), (false, UpdateOutcome::Applied)] {
            let scaler = scaler(&test_device, GradPolicy { stop_on_nonfinite, ..GradPolicy::NO_CLIP_NO_SCALE });
            assert_eq!(judge(&test_device, &scaler, &[1.0], &[1.0]).outcome, UpdateOutcome::Applied);
            assert_eq!(judge(&test_device, &scaler, &[f64::NAN], &[1.0]).outcome, UpdateOutcome::NonFinite);
            for _ in 0..2 {
                assert_eq!(judge(&test_device, &scaler, &[1.0], &[1.0]).outcome, later);
            }
        }
    }
}

#[test]
fn a_scaler_resumes_from_a_saved_step_decision() {
    for test_device in TestDevice::all() {
        let policy = GradPolicy { loss_scaling: DYNAMIC, ..GradPolicy::NO_CLIP_NO_SCALE };
        let whole = scaler(&test_device, policy);
        let steps = [1.0, f64::INFINITY, 1.0, 1.0, 1.0, f64::INFINITY, f64::INFINITY, 1.0];
        let mut last = None;
        for (i, square) in steps.into_iter().enumerate() {
            let verdict = judge(&test_device, &whole, &[square], &[1.0]);
            let Some(before) = last.replace(verdict) else { continue };
            let resumed = GradScaler::from_state(policy, &before.next, &test_device.device()).unwrap();
            assert_eq!(judge(&test_device, &resumed, &[square], &[1.0]), verdict, "step {i}");
        }
    }
}

#[test]
fn wrong_arguments_are_named() {
    let scaler = scaler(&TestDevice::Cpu, GradPolicy::NO_CLIP_NO_SCALE);
    let losses = Tensor::new(&[1f32], &Device::Cpu).unwrap();
    assert_error(scaler.update(&losses, &losses), "squares are F32");
}

#[test]
fn a_loss_above_its_limit_skips_the_step_and_changes_no_state() {
    for test_device in TestDevice::all() {
        let policy = GradPolicy { loss_scaling: DYNAMIC, stop_on_nonfinite: true, ..GradPolicy::NO_CLIP_NO_SCALE };
        let scaler = scaler(&test_device, policy);
        let first = judge(&test_device, &scaler, &[1.0], &[9.0]);
        let limit = |n_losses, max_sum| LossLimit { n_losses, max_sum };
        // More losses than threads of the kernel: 40 of 0.5, and one that does not count.
        let losses = [&[0.5f32; 40][..], &[100.0]].concat();
        for (limit, outcome) in [
            (limit(40, 19.5), UpdateOutcome::LossSpike),
            (limit(40, 20.0), UpdateOutcome::Applied),
            (limit(41, 119.5), UpdateOutcome::LossSpike),
            (limit(2, 0.5), UpdateOutcome::LossSpike),
        ] {
            let before = scaler.state().to_vec1::<f32>().unwrap();
            let decision = judge_within(limit, &test_device, &scaler, (&[1.0], &losses));
            assert_eq!(decision.outcome, outcome, "{limit:?}");
            let after = scaler.state().to_vec1::<f32>().unwrap();
            let is_skipped = outcome == UpdateOutcome::LossSpike;
            assert_eq!(before[3..] == after[3..], is_skipped, "{before:?} {after:?}");
            assert_eq!(scaler.applied().unwrap().to_vec0::<f32>().unwrap(), if is_skipped { 0.0 } else { 1.0 });
        }
        assert_eq!(first.outcome, UpdateOutcome::Applied);
        // A spike is not fatal, and a gradient that is not finite is no spike.
        let overflow = judge_within(limit(1, 0.0), &test_device, &scaler, (&[f64::INFINITY], &[1.0]));
        assert_eq!(overflow.outcome, UpdateOutcome::Overflowed);
        assert_eq!(judge(&test_device, &scaler, &[1.0], &[1.0]).outcome, UpdateOutcome::Applied);
    }
}

#[test]
fn a_limit_of_more_losses_than_there_are_is_an_error() {
    let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu).unwrap();
    let (squares, losses) = (Tensor::new(&[1f64], &Device::Cpu).unwrap(), Tensor::new(&[1f32], &Device::Cpu).unwrap());
    let limit = LossLimit { n_losses: 2, max_sum: 1.0 };
    assert_error(scaler.update_within(limit, &squares, &losses), "2 losses of 1");
}
