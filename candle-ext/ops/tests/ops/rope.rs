use candle_core::{DType, Tensor};
use candlewick_ops::rope;

use crate::cases::{Case, assert_error, check_each, randn};

fn tables(t: usize, half: usize) -> (Tensor, Tensor) {
    let angle = randn((t, half), 7);
    (angle.cos().unwrap(), angle.sin().unwrap())
}

fn case((t, h, k): (usize, usize, usize), check: impl Fn(&Case<'_>)) {
    let (cos, sin) = tables(t, k / 2);
    check(&Case {
        name: "rope",
        inputs: vec![randn((t, h, k), 1)],
        weights: vec![],
        op: &|x, _| rope(&x[0], &cos.to_device(x[0].device())?, &sin.to_device(x[0].device())?),
        reference: &|a| {
            let wide = |table: &Tensor| table.to_dtype(DType::F64)?.unsqueeze(1);
            let (cos, sin) = (wide(&cos)?, wide(&sin)?);
            let (x, y) = (a[0].narrow(2, 0, k / 2)?, a[0].narrow(2, k / 2, k / 2)?);
            let left = (x.broadcast_mul(&cos)? - y.broadcast_mul(&sin)?)?;
            let right = (y.broadcast_mul(&cos)? + x.broadcast_mul(&sin)?)?;
            Tensor::cat(&[left, right], 2)
        },
    });
}

#[test]
fn it_equals_the_reference() {
    check_each([(300, 3, 64), (1, 1, 2), (17, 9, 10), (5, 32, 128)], |shape| {
        case(shape, |case| case.check_all_formats());
    });
}

#[test]
fn the_gradient_is_the_slope() {
    case((5, 2, 6), |case| case.check_finite_difference());
}

#[test]
fn no_tokens_give_no_tokens() {
    let (cos, sin) = tables(0, 2);
    assert_eq!(rope(&randn((0, 3, 4), 1), &cos, &sin).unwrap().dims(), [0, 3, 4]);
}

#[test]
fn wrong_shapes_are_named() {
    let (cos, sin) = tables(5, 2);
    assert_error(rope(&randn((5, 1, 3), 1), &cos, &sin), "even k");
    assert_error(rope(&randn((4, 1, 4), 1), &cos, &sin), "cos is F32 [5, 2], want f32 [4, 2]");
    let half = sin.to_dtype(DType::BF16).unwrap();
    assert_error(rope(&randn((5, 1, 4), 1), &cos, &half), "sin is BF16");
}
