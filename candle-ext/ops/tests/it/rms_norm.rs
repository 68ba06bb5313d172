use candle_core::{D, DType, Tensor};
use candlewick_ops::{Weight, add, add_rms_norm, rms_norm};

use crate::cases::{
    OpCase, TestDevice, assert_close, assert_error, bits, bound, check_each, grad_of, randn, tape, trainable,
};

const EPS: f64 = 1e-5;

fn case(shape: &[usize], check: impl Fn(&OpCase<'_>)) {
    let d = *shape.last().unwrap();
    let x = randn(shape, 1);
    // The gradient of a single element near zero is all rounding.
    let x = if d == 1 { (x.abs().unwrap() + 1.0).unwrap() } else { x };
    check(&OpCase {
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

/// Covers rows of a few lanes, of a warp and of a block, with one, two and four packs per thread, and longer rows.
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
fn an_unneeded_gradient_does_not_change_the_other() {
    for test_device in TestDevice::all() {
        for d in [33, 128, 576] {
            let (x, w, dy) = (
                test_device.put(&randn((70, d), 1)),
                test_device.put(&randn(d, 2)),
                test_device.put(&randn((70, d), 3)),
            );
            test_device.run(|| {
                let backward = |tracked: &[Tensor], w: &Weight| {
                    tape(tracked, || rms_norm(&x, w, EPS)).backward(&dy).unwrap().get(&x).cloned()
                };
                let (both, frozen, alone) = (trainable(&w), Weight::frozen(w.clone()), trainable(&w));
                let dx = backward(std::slice::from_ref(&x), &both).unwrap();
                assert_eq!(
                    bits(&backward(std::slice::from_ref(&x), &frozen).unwrap()),
                    bits(&dx),
                    "{d} {test_device:?}"
                );
                backward(&[], &alone);
                assert_eq!(bits(&grad_of(&alone)), bits(&grad_of(&both)), "{d} {test_device:?}");
            });
        }
    }
}

/// Adds the sum and its norm, so that both outputs of the op have a gradient.
fn residual(x: &[Tensor], w: &[Weight]) -> candle_core::Result<Tensor> {
    let (sum, normed) = add_rms_norm(&x[0], &x[1], &w[0], EPS)?;
    add(&sum, &normed)
}

fn residual_case(shape: &[usize], check: impl Fn(&OpCase<'_>)) {
    check(&OpCase {
        name: "add_rms_norm",
        inputs: vec![randn(shape, 1), randn(shape, 3)],
        weights: vec![randn(*shape.last().unwrap(), 2)],
        op: &residual,
        reference: &|a| {
            let sum = (&a[0] + &a[1])?;
            let mean = sum.sqr()?.mean_keepdim(D::Minus1)?;
            sum.broadcast_div(&(mean + EPS)?.sqrt()?)?.broadcast_mul(&a[2])? + sum
        },
    });
}

#[test]
fn of_a_sum_it_equals_the_reference() {
    for shape in [&[7, 576][..], &[300, 33], &[5, 3, 64], &[2000, 2], &[13, 1024], &[5, 16_392]] {
        residual_case(shape, |case| case.check(DType::F32));
    }
    residual_case(&[6, 20], |case| case.check_finite_difference());
}

#[test]
fn of_a_sum_it_has_the_bits_of_add_and_then_the_norm() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (test_device, d) in TestDevice::all()
            .into_iter()
            .flat_map(|test_device| [33, 128, 576, 16_392].map(|d| (test_device.clone(), d)))
        {
            let put = |shape: &[usize], seed| test_device.put(&randn(shape, seed).to_dtype(dtype).unwrap());
            let (inputs, w, dy) = ([put(&[20, d], 1), put(&[20, d], 2)], put(&[d], 3), put(&[20, d], 4));
            let results = |op: &dyn Fn(&[Weight]) -> candle_core::Result<Tensor>| {
                test_device.run(|| {
                    let weights = [trainable(&w)];
                    let tape = tape(&inputs, || op(&weights));
                    let y = bits(tape.output());
                    let grads = tape.backward(&dy).unwrap();
                    let of_inputs = inputs.iter().map(|x| bits(grads.get(x).unwrap()));
                    of_inputs.chain([y, bits(&grad_of(&weights[0]))]).collect::<Vec<_>>()
                })
            };
            let apart = results(&|w| {
                let sum = add(&inputs[0], &inputs[1])?;
                add(&sum, &rms_norm(&sum, &w[0], EPS)?)
            });
            assert!(results(&|w| residual(&inputs, w)) == apart, "{d} {dtype:?} {test_device:?}");
        }
    }
}

/// An f32 input with weights of 16 bits: sums and gradients of the input stay in f32, and the norm is rounded once.
#[test]
fn the_norm_of_an_f32_residual_stream_has_the_dtype_of_its_weight() {
    for dtype in [DType::BF16, DType::F16] {
        for (test_device, d) in TestDevice::all()
            .into_iter()
            .flat_map(|test_device| [33, 128, 576, 1024, 2560, 16_392].map(|d| (test_device.clone(), d)))
        {
            let round = |x: Tensor| x.to_dtype(dtype).unwrap();
            let [stream, sum_grad] = [1, 2].map(|seed| randn((20, d), seed));
            let branch = round(randn((20, d), 3));
            let w = round(randn(d, 5));
            // Outputs and gradients of `norm(a + b)`, with all tensors in f32 or in their own dtypes.
            let results = |widen: bool| {
                let put =
                    |x: &Tensor| test_device.put(&if widen { x.to_dtype(DType::F32).unwrap() } else { x.clone() });
                let (inputs, w) = ([put(&stream), put(&branch)], trainable(&put(&w)));
                test_device.run(|| {
                    let mut sum = None;
                    let tape = tape(&inputs, || {
                        let (stream, normed) = add_rms_norm(&inputs[0], &inputs[1], &w, EPS)?;
                        sum = Some(stream.clone());
                        add(&stream, &normed)
                    });
                    let grads = tape.backward(&put(&sum_grad)).unwrap();
                    let of_inputs = inputs.each_ref().map(|x| grads.get(x).unwrap().clone());
                    let normed = rms_norm(sum.as_ref().unwrap(), &w, EPS).unwrap();
                    (sum.unwrap(), normed, of_inputs, grad_of(&w))
                })
            };
            let (sum, normed, [dx, branch_grad], dw) = results(false);
            let (want_sum, want_normed, [want_dx, want_branch], want_dw) = results(true);
            let dtypes = [&sum, &dx, &normed, &branch_grad].map(Tensor::dtype);
            assert_eq!(dtypes, [DType::F32, DType::F32, dtype, dtype]);
            assert_eq!(bits(&sum), bits(&want_sum));
            assert_eq!(bits(&normed), bits(&round(want_normed)), "{d} {dtype:?} {test_device:?}");
            // The gradient of the norm is rounded to 16 bits before its backward.
            assert_close("dx", &dx, &want_dx, bound(dtype));
            assert_close("the branch's gradient", &branch_grad, &want_branch, bound(dtype));
            assert_close("dw", &dw, &want_dw, bound(dtype));
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
    let w = Weight::frozen(randn(4, 2));
    assert_eq!(rms_norm(&x, &w, EPS).unwrap().dims(), [0, 4]);
    assert_eq!(add_rms_norm(&x, &x, &w, EPS).unwrap().1.dims(), [0, 4]);
}

#[test]
fn wrong_shapes_are_named() {
    let run = |x: &Tensor, w: Tensor| rms_norm(x, &Weight::frozen(w), EPS);
    assert_error(run(&randn((2, 4), 1), randn(3, 2)), "weight has shape [3], want [4]");
    assert_error(run(&randn((2, 0), 1), randn(0, 2)), "want an input [.., d]");
    let both = add_rms_norm(&randn((2, 4), 1), &randn((2, 3), 1), &Weight::frozen(randn(4, 2)), EPS);
    assert_error(both, "one is F32 [2, 4], the other F32 [2, 3]");
    let narrow = Weight::frozen(randn(4, 2).to_dtype(DType::BF16).unwrap());
    let both = add_rms_norm(&randn((2, 4), 1), &randn((2, 4), 1), &narrow, EPS);
    assert_error(both, "the second input is F32, want BF16, the dtype of the norm");
    let wider = add(&randn((2, 4), 1).to_dtype(DType::BF16).unwrap(), &randn((2, 4), 1));
    assert_error(wider, "one is BF16 [2, 4], the other F32 [2, 4]");
}
