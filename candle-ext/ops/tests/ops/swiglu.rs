use candle_core::{DType, Device, Tensor};
use candlewick_ops::swiglu;

use crate::cases::{Case, Place, assert_error, check_each, randn, values};

fn case(shape: &[usize], check: impl Fn(&Case<'_>)) {
    check(&Case {
        name: "swiglu",
        inputs: vec![randn(shape, 1), randn(shape, 2)],
        weights: vec![],
        op: &|x, _| swiglu(&x[0], &x[1]),
        reference: &|a| a[0].silu()?.mul(&a[1]),
    });
}

#[test]
fn it_equals_the_reference() {
    check_each([&[33, 1536][..], &[1], &[3, 5, 7], &[5, 9728]], |shape| {
        case(shape, |case| case.check_all_formats());
    });
}

#[test]
fn the_gradient_is_the_slope() {
    case(&[6, 20], |case| case.check_finite_difference());
}

#[test]
fn large_gates_neither_overflow_nor_turn_into_nan() {
    let gate = Tensor::new(&[-1e4f32, -100.0, -20.0, 0.0, 100.0, 1e4], &Device::Cpu).unwrap();
    for place in Place::all() {
        let gate = place.put(&gate);
        let y = values(&place.run(|| swiglu(&gate, &gate.ones_like().unwrap())).unwrap());
        assert!(y[0].abs() < 1e-30 && y[1].abs() < 1e-30, "{y:?}");
        assert!((y[2] - -20.0 / (1.0 + 20f64.exp())).abs() < 1e-13, "{y:?}");
        assert_eq!(y[3..], [0.0, 100.0, 1e4]);
    }
}

#[test]
fn nothing_gives_nothing() {
    let none = randn((0, 3), 1);
    assert_eq!(swiglu(&none, &none).unwrap().dims(), [0, 3]);
}

#[test]
fn wrong_shapes_and_formats_are_named() {
    let (a, b) = (randn((2, 3), 1), randn((3, 2), 1));
    assert_error(swiglu(&a, &b), "gate is F32 [2, 3] but up is F32 [3, 2]");
    assert_error(swiglu(&a, &a.to_dtype(DType::BF16).unwrap()), "up is BF16");
}
