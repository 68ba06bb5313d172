use candle_core::{DType, Device, Tensor};
use candlewick_ops::{ScoreFunction, balance_factors, expert_score_sums, load_balancing_loss, router_z_loss};

use super::{devices, statistics};
use crate::cases::{assert_close, assert_error, check_each, randn, tape, values};

/// Compares a loss and its gradient, for an upstream gradient other than 1, with a function in f64.
fn check(t: usize, e: usize, loss: &dyn Fn(&Tensor) -> candle_core::Result<Tensor>, naive: &dyn Fn(&[f64]) -> f64) {
    let logits = (randn((t, e), 1) * 3.0).unwrap();
    let of_logits = values(&logits);
    let want = Tensor::new(of_logits.chunks(e).map(naive).sum::<f64>(), &Device::Cpu).unwrap();
    let (upstream, h) = (0.7f32, 1e-5);
    let slopes = of_logits.chunks(e).flat_map(|row| {
        (0..e).map(|i| {
            let moved = |step: f64| {
                let mut row = row.to_vec();
                row[i] += step;
                naive(&row)
            };
            f64::from(upstream) * (moved(h) - moved(-h)) / (2.0 * h)
        })
    });
    let slopes = Tensor::from_vec(slopes.collect::<Vec<f64>>(), (t, e), &Device::Cpu).unwrap();
    for (test_device, dtype) in devices().iter().flat_map(|d| [DType::F32, DType::F64].map(|t| (d, t))) {
        let logits = test_device.put(&logits.to_dtype(dtype).unwrap());
        test_device.run(|| {
            let tape = tape(std::slice::from_ref(&logits), || loss(&logits));
            assert_close("loss", tape.output(), &want, 1e-6);
            let upstream = test_device.put(&Tensor::new(upstream, &Device::Cpu).unwrap());
            let grad = tape.backward(&upstream).unwrap().remove(&logits).unwrap();
            assert_eq!(grad.dtype(), dtype);
            assert_close("gradient", &grad, &slopes, 3e-6);
        });
    }
}

fn z_loss(logits: &Tensor) -> candle_core::Result<Tensor> {
    router_z_loss(logits, &statistics(logits, ScoreFunction::Softmax)?)
}

const SHAPES: [(usize, usize); 4] = [(5, 8), (200, 16), (1, 1), (3, 130)];

#[test]
fn the_load_balancing_loss_and_its_gradient_equal_the_reference() {
    let scores = [ScoreFunction::Softmax, ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus];
    check_each(SHAPES.into_iter().flat_map(|shape| scores.map(|score| (shape, score))), |((t, e), score)| {
        let counts = (randn(e, 4).abs().unwrap() * 9.0).unwrap();
        let of_counts = values(&counts);
        let naive = |row: &[f64]| {
            let scores: Vec<f64> = match score {
                ScoreFunction::Softmax => row.iter().map(|x| x.exp()).collect(),
                ScoreFunction::Sigmoid => row.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
                ScoreFunction::SqrtSoftplus => row.iter().map(|x| (1.0 + x.exp()).ln().sqrt()).collect(),
            };
            scores.iter().zip(&of_counts).map(|(s, c)| s * c).sum::<f64>() / scores.iter().sum::<f64>()
        };
        let loss = |logits: &Tensor| {
            load_balancing_loss(logits, &statistics(logits, score)?, &counts.to_device(logits.device())?)
        };
        // A single expert's share is constant: its gradient is zero up to rounding.
        if e > 1 {
            check(t, e, &loss, &naive);
        }
    });
}

/// The dot product of the sums and the counts is the loss.
#[test]
fn score_sums_and_their_gradient_are_those_of_the_load_balancing_loss() {
    let scores = [ScoreFunction::Softmax, ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus];
    check_each(SHAPES.into_iter().flat_map(|shape| scores.map(|score| (shape, score))), |((t, e), score)| {
        let logits = (randn((t, e), 1) * 3.0).unwrap();
        let counts = (randn(e, 4).abs().unwrap() * 9.0).unwrap();
        for (test_device, dtype) in devices().iter().flat_map(|d| [DType::F32, DType::F64].map(|t| (d, t))) {
            let logits = test_device.put(&logits.to_dtype(dtype).unwrap());
            let counts = test_device.put(&counts);
            test_device.run(|| {
                let of_sums =
                    tape(std::slice::from_ref(&logits), || expert_score_sums(&logits, &statistics(&logits, score)?));
                let loss = tape(std::slice::from_ref(&logits), || {
                    load_balancing_loss(&logits, &statistics(&logits, score)?, &counts)
                });
                let dot = (of_sums.output() * &counts).unwrap().sum_all().unwrap();
                assert_close("loss", &dot, loss.output(), 1e-6);
                let grad = of_sums.backward(&counts).unwrap().remove(&logits).unwrap();
                let one = test_device.put(&Tensor::new(1f32, &Device::Cpu).unwrap());
                let want = loss.backward(&one).unwrap().remove(&logits).unwrap();
                assert_eq!((grad.dtype(), values(&grad)), (dtype, values(&want)));
            });
        }
    });
}

#[test]
fn the_z_loss_and_its_gradient_equal_the_reference() {
    check_each(SHAPES, |(t, e)| {
        check(t, e, &z_loss, &|row| row.iter().map(|x| x.exp()).sum::<f64>().ln().powi(2));
    });
}

#[test]
fn balanced_experts_give_one() {
    let (t, e, k) = (32, 8, 2);
    let logits = Tensor::zeros((t, e), DType::F32, &Device::Cpu).unwrap();
    let counts = Tensor::full((t * k / e) as f32, e, &Device::Cpu).unwrap();
    for test_device in devices() {
        let (logits, counts) = (test_device.put(&logits), test_device.put(&counts));
        let loss = |score| load_balancing_loss(&logits, &statistics(&logits, score)?, &counts);
        for score in [ScoreFunction::Softmax, ScoreFunction::Sigmoid] {
            let sum = values(&test_device.run(|| loss(score)).unwrap())[0];
            assert_eq!(sum * e as f64 / (k * t * t) as f64, 1.0, "{score:?}");
        }
    }
}

#[test]
fn factors_are_fractions_of_the_selections_times_the_experts() {
    let counts = Tensor::new(&[[1f32, 2.0, 5.0], [0.0, 0.0, 0.0], [7.0, 0.0, 0.0]], &Device::Cpu).unwrap();
    for test_device in devices() {
        let factors = values(&test_device.run(|| balance_factors(&test_device.put(&counts))).unwrap());
        assert_eq!(factors, [0.375, 0.75, 1.875, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0]);
        let wide = Tensor::ones((2, 70), DType::F32, &Device::Cpu).unwrap();
        let wide = values(&test_device.run(|| balance_factors(&test_device.put(&wide))).unwrap());
        assert!(wide.iter().all(|factor| (factor - 1.0).abs() < 1e-6) && wide.len() == 140, "{wide:?}");
    }
    assert_error(balance_factors(&randn(3, 1)), "want f32 counts [s, e], got [3]");
}

#[test]
fn large_logits_do_not_overflow() {
    let logits = Tensor::new(&[[1e4f32, -1e4, 0.0], [300.0, 300.0, 300.0]], &Device::Cpu).unwrap();
    for test_device in devices() {
        let loss = test_device.run(|| z_loss(&test_device.put(&logits))).unwrap();
        let want = 1e8 + (300.0 + 3f64.ln()).powi(2);
        assert_close("z loss", &loss, &Tensor::new(want, &Device::Cpu).unwrap(), 1e-6);
    }
}

#[test]
fn wrong_counts_are_named() {
    let logits = randn((4, 8), 1);
    let of_logits = statistics(&logits, ScoreFunction::Softmax).unwrap();
    let loss = |counts: &Tensor| load_balancing_loss(&logits, &of_logits, counts);
    assert_error(loss(&randn(7, 1)), "want f32 counts [8], got F32 [7]");
    assert_error(router_z_loss(&randn(8, 1), &of_logits), "want f32 or f64 logits [t, e]");
    assert_error(router_z_loss(&randn((4, 7), 1), &of_logits), "the statistics are of 8 experts, the logits of 7");
}
