use candle_core::{D, DType, Tensor};
use candlewick_ops::{Weight, rms_norm};

use crate::cases::{Case, Place, assert_error, bits, check_each, grad_of, randn, tape, trainable};

const EPS: f64 = 1e-5;

fn case(shape: &[usize], check: impl Fn(&Case<'_>)) {
    let d = *shape.last().unwrap();
    let x = randn(shape, 1);
    // A lone element near zero has a gradient of nothing but rounding.
    let x = if d == 1 { (x.abs().unwrap() + 1.0).unwrap() } else { x };
    check(&Case {
        name: "rms_norm",
        inputs: vec![x],
        weights: vec![randn(d, 2)],
        op: &|x, w| rms_norm(&x[0], &w[0], EPS),
        reference: &|a| {
            let mean = a[0].sqr()?.mean_keepdim(D::Minus1)?;
            a[0].broadcast_div(&(mean + EPS)?.sqrt()?)?.broadcast_mul(&a[1])
        },
    });
}

#[test]
fn it_equals_the_reference() {
    check_each([&[7, 576][..], &[300, 33], &[5, 3, 64], &[1, 1], &[2000, 2], &[4], &[9, 2560], &[70, 128]], |shape| {
        case(shape, |case| case.check_all_formats());
    });
}

/// Rows of a few lanes, of a warp and of a block, with one pack a thread, two and four; and rows that are too long for that.
#[test]
fn rows_of_every_length_equal_the_reference() {
    check_each(
        [&[3000, 8][..], &[41, 3, 24], &[60, 256], &[50, 504], &[13, 1024], &[9, 4096], &[6, 9216], &[5, 16_392]],
        |shape| {
            case(shape, |case| case.check_all_formats());
        },
    );
}

#[test]
fn a_gradient_that_nobody_wants_does_not_change_the_other() {
    for place in Place::all() {
        for d in [33, 128, 576] {
            let (x, w, dy) = (place.put(&randn((70, d), 1)), place.put(&randn(d, 2)), place.put(&randn((70, d), 3)));
            place.run(|| {
                let backward = |tracked: &[Tensor], w: &Weight| {
                    tape(tracked, || rms_norm(&x, w, EPS)).backward(&dy).unwrap().get(&x).cloned()
                };
                let (both, frozen, alone) = (trainable(&w), Weight::frozen(w.clone()), trainable(&w));
                let dx = backward(std::slice::from_ref(&x), &both).unwrap();
                assert_eq!(bits(&backward(std::slice::from_ref(&x), &frozen).unwrap()), bits(&dx), "{d} {place:?}");
                backward(&[], &alone);
                assert_eq!(bits(&grad_of(&alone)), bits(&grad_of(&both)), "{d} {place:?}");
            });
        }
    }
}

#[test]
fn the_gradient_is_the_slope() {
    case(&[6, 20], |case| case.check_finite_difference());
}

#[test]
fn sixteen_bits_round_in_the_order_of_transformers() {
    let x = randn((3, 50), 1).to_dtype(DType::BF16).unwrap();
    let w = randn(50, 2).to_dtype(DType::BF16).unwrap();
    let y = rms_norm(&x, &Weight::frozen(w.clone()), 0.0).unwrap();
    let wide = x.to_dtype(DType::F32).unwrap();
    let r = wide.sqr().unwrap().mean_keepdim(1).unwrap().sqrt().unwrap();
    let normed = wide.broadcast_div(&r).unwrap().to_dtype(DType::BF16).unwrap();
    assert_eq!(bits(&y), bits(&normed.broadcast_mul(&w).unwrap()));
}

#[test]
fn no_rows_give_no_rows() {
    let x = randn((0, 4), 1);
    assert_eq!(rms_norm(&x, &Weight::frozen(randn(4, 2)), EPS).unwrap().dims(), [0, 4]);
}

#[test]
fn wrong_shapes_are_named() {
    let run = |x: &Tensor, w: Tensor| rms_norm(x, &Weight::frozen(w), EPS);
    assert_error(run(&randn((2, 4), 1), randn(3, 2)), "weight has shape [3], want [4]");
    assert_error(run(&randn((2, 0), 1), randn(0, 2)), "want an input [.., d]");
}
