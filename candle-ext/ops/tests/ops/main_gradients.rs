//! Main gradients: a bf16 gradient is summed in f32 and rounded once per op. After a reset the first op overwrites it.

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    CrossEntropy, GradSink, LossGrad, OutputDtype, Reduction, Weight, embedding, linear, linear_cross_entropy, rms_norm,
};

use crate::cases::{Place, assert_close, bound, check_each, grad_of, randn, tape, values};
use crate::laws::{self, Op};

/// Returns a weight whose main gradient has this dtype and starts at ones.
fn weight(place: &Place, value: &Tensor, grad: DType) -> Weight {
    let value = place.put(&value.to_dtype(DType::BF16).unwrap());
    let grad = place.put(&Tensor::ones(value.shape(), grad, &Device::Cpu).unwrap());
    Weight::trainable(value, GradSink::new(grad).unwrap())
}

fn check(name: &str, values: &[Tensor], run: impl Fn(&Place, &[Weight])) {
    check_each(Place::all(), |place| {
        let grads = |dtype| {
            let weights: Vec<Weight> = values.iter().map(|value| weight(&place, value, dtype)).collect();
            place.run(|| run(&place, &weights));
            weights.iter().map(grad_of).collect::<Vec<_>>()
        };
        for (rounded, whole) in grads(DType::BF16).iter().zip(grads(DType::F32)) {
            assert_eq!(rounded.dtype(), DType::BF16);
            assert_close(&format!("{name} {place:?}"), rounded, &whole, bound(DType::BF16) / 2.0);
        }
    });
}

fn bf16(place: &Place, shape: (usize, usize), seed: u64) -> Tensor {
    place.put(&randn(shape, seed).to_dtype(DType::BF16).unwrap())
}

#[test]
fn of_a_linear_layer_and_its_bias() {
    check("linear", &[randn((70, 40), 2), randn(70, 3)], |place, w| {
        let tape = tape(&[], || linear(&bf16(place, (150, 40), 1), &w[0], Some(&w[1]), OutputDtype::SameAsInput));
        tape.backward(&bf16(place, (150, 70), 9)).unwrap();
    });
}

#[test]
fn of_an_embedding() {
    check("embedding", &[randn((50, 24), 2)], |place, w| {
        let ids: Vec<u32> = (0..150).map(|i| i * 7 % 50).collect();
        let tape = tape(&[], || embedding(&place.put(&Tensor::new(ids, &Device::Cpu).unwrap()), &w[0], None));
        tape.backward(&bf16(place, (150, 24), 9)).unwrap();
    });
}

#[test]
fn of_a_norm() {
    check("rms_norm", &[randn(48, 2)], |place, w| {
        let tape = tape(&[], || rms_norm(&bf16(place, (70, 48), 1), &w[0], 1e-6));
        tape.backward(&bf16(place, (70, 48), 9)).unwrap();
    });
}

#[test]
fn of_the_head() {
    check("linear_cross_entropy", &[randn((64, 40), 2)], |place, w| {
        let targets = Tensor::new((0..50i64).map(|i| i * 13 % 64).collect::<Vec<_>>(), &Device::Cpu).unwrap();
        // One chunk: several would be rounded one by one.
        let spec = CrossEntropy { reduction: Reduction::Sum, ignore_index: -100, chunk: 50 };
        let x = bf16(place, (50, 40), 1);
        linear_cross_entropy(&x, &w[0], &targets, &spec, LossGrad::Scalar(1.0)).unwrap();
    });
}

/// Returns a weight whose main gradient is reset and NaN.
fn stale(place: &Place, value: &Tensor, grad: DType) -> Weight {
    let nan = Tensor::full(f32::NAN, value.shape(), &Device::Cpu).unwrap().to_dtype(grad).unwrap();
    let sink = GradSink::new(place.put(&nan)).unwrap();
    sink.reset();
    Weight::trainable(place.put(value), sink)
}

fn zeroed(place: &Place, value: &Tensor, grad: DType) -> Weight {
    let zeros = Tensor::zeros(value.shape(), grad, &Device::Cpu).unwrap();
    Weight::trainable(place.put(value), GradSink::new(place.put(&zeros)).unwrap())
}

/// Compares two backwards after a reset with two backwards added to zeros.
#[track_caller]
fn check_reset(name: &str, weights: &[Tensor], backward: impl Fn(&Place, &[Weight])) {
    for place in Place::all() {
        for dtype in [DType::F32, DType::BF16] {
            let grads = |of: fn(&Place, &Tensor, DType) -> Weight| {
                let weights: Vec<Weight> = weights.iter().map(|value| of(&place, value, dtype)).collect();
                place.run(|| (0..2).for_each(|_| backward(&place, &weights)));
                place.run(|| weights.iter().map(|weight| values(&grad_of(weight))).collect::<Vec<_>>())
            };
            assert!(grads(stale) == grads(zeroed), "{name} {dtype:?} {place:?}");
        }
    }
}

#[test]
fn after_a_reset_are_what_is_added_to_zeros() {
    for Op { name, inputs, weights, run } in laws::ops() {
        check_reset(name, &weights, |place, weights| {
            let inputs: Vec<Tensor> = inputs.iter().map(|x| place.put(x)).collect();
            let tape = tape(&inputs, || run(&inputs, weights));
            let dy = place.put(&randn(tape.output().shape(), 9));
            tape.backward(&dy).unwrap();
        });
    }
    for n_targets in [0, 50] {
        check_reset("linear_cross_entropy", &[randn((64, 40), 2)], |place, w| {
            let targets = (0..50i64).map(|i| if i < n_targets { i * 13 % 64 } else { -100 });
            let targets = Tensor::new(targets.collect::<Vec<_>>(), &Device::Cpu).unwrap();
            let spec = CrossEntropy { reduction: Reduction::Sum, ignore_index: -100, chunk: 17 };
            let x = place.put(&randn((50, 40), 1));
            linear_cross_entropy(&x, &w[0], &targets, &spec, LossGrad::Scalar(1.0)).unwrap();
        });
    }
}

#[test]
fn of_no_tokens_are_zeros_after_a_reset() {
    check_reset("linear", &[randn((70, 40), 2), randn(70, 3)], |place, w| {
        let none = |n| place.put(&Tensor::zeros((0, n), DType::F32, &Device::Cpu).unwrap());
        let tape = tape(&[], || linear(&none(40), &w[0], Some(&w[1]), OutputDtype::SameAsInput));
        tape.backward(&none(70)).unwrap();
    });
}
