//! Main gradients in bf16: what an op adds is summed in f32 and rounded once.

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    CrossEntropy, GradSink, Precision, Reduction, Upstream, Weight, embedding, linear, linear_cross_entropy, rms_norm,
};

use crate::cases::{Place, assert_close, bound, check_each, grad_of, randn, tape};

/// A weight whose main gradient has this format and begins at ones.
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
        let tape = tape(&[], || linear(&bf16(place, (150, 40), 1), &w[0], Some(&w[1]), Precision::Compute));
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
        // In one chunk: each would be rounded by itself.
        let spec = CrossEntropy { reduction: Reduction::Sum, ignore_index: -100, chunk: 50 };
        let x = bf16(place, (50, 40), 1);
        linear_cross_entropy(&x, &w[0], &targets, &spec, Upstream::Scalar(1.0)).unwrap();
    });
}
