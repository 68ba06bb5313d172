use candle_core::{DType, Tensor};
use candlewick_ops::weighted_swiglu;

use super::devices;
use crate::cases::{OpCase, assert_close, assert_error, bound, check_each, randn, tape, values};

fn case(n: usize, f: usize, check: impl Fn(&OpCase<'_>)) {
    check(&OpCase {
        name: &format!("weighted_swiglu [{n}, {f}]"),
        inputs: vec![randn((n, 2 * f), 1), randn(n, 2)],
        weights: vec![],
        // Weights are f32 for every dtype of activations.
        op: &|x, _| weighted_swiglu(&x[0], &x[1].to_dtype(DType::F32)?),
        reference: &|a| {
            let f = a[0].dim(1)? / 2;
            a[0].narrow(1, 0, f)?.silu()?.mul(&a[0].narrow(1, f, f)?)?.broadcast_mul(&a[1].unsqueeze(1)?)
        },
    });
}

#[test]
fn it_equals_the_reference() {
    check_each([(33, 768), (1, 1), (15, 7), (5, 4864), (6, 5000), (700, 3), (2, 8192)], |(n, f)| {
        case(n, f, |case| case.check_on(&devices(), DType::F32));
    });
}

#[test]
fn sixteen_bit_rows_equal_the_reference() {
    for dtype in [DType::BF16, DType::F16] {
        for (n, f) in [(33, 768), (15, 7), (3, 5000)] {
            let inputs = [randn((n, 2 * f), 1).to_dtype(dtype).unwrap(), randn(n, 2)];
            for test_device in devices() {
                let inputs = [0, 1].map(|i| test_device.put(&inputs[i]));
                let dy = test_device.put(&randn((n, f), 3).to_dtype(dtype).unwrap());
                let results = |[gate_up, w]: [&Tensor; 2], dy: &Tensor| {
                    let inputs = [gate_up.clone(), w.clone()];
                    let tape = tape(&inputs, || weighted_swiglu(&inputs[0], &inputs[1]));
                    let y = tape.output().clone();
                    let grads = tape.backward(dy).unwrap();
                    [y, grads.get(&inputs[0]).unwrap().clone(), grads.get(&inputs[1]).unwrap().clone()]
                };
                let wide = |x: &Tensor| x.to_dtype(DType::F32).unwrap();
                let got = test_device.run(|| results([&inputs[0], &inputs[1]], &dy));
                let want = test_device.run(|| results([&wide(&inputs[0]), &inputs[1]], &wide(&dy)));
                for (got, want) in got.iter().zip(&want) {
                    assert_close("16 bits", got, want, bound(dtype));
                }
            }
        }
    }
}

#[test]
fn the_gradient_is_the_slope() {
    case(6, 20, |case| case.check_finite_difference());
}

#[test]
fn nothing_gives_nothing() {
    let inputs = [randn((3, 0), 1), randn(3, 2)];
    let tape = tape(&inputs, || weighted_swiglu(&inputs[0], &inputs[1]));
    let y = tape.output().clone();
    assert_eq!(y.dims(), [3, 0]);
    assert_eq!(values(tape.backward(&y).unwrap().get(&inputs[1]).unwrap()), [0.0; 3]);
    assert_eq!(weighted_swiglu(&randn((0, 6), 1), &randn(0, 2)).unwrap().dims(), [0, 3]);
}

#[test]
fn wrong_shapes_and_dtypes_are_named() {
    let x = randn((2, 6), 1);
    assert_error(weighted_swiglu(&randn((2, 3), 1), &randn(2, 1)), "want an input [n, 2f] of gate and up, got [2, 3]");
    assert_error(weighted_swiglu(&x, &randn(3, 1)), "want f32 weights [2], got F32 [3]");
    assert_error(weighted_swiglu(&x, &randn(2, 1).to_dtype(DType::BF16).unwrap()), "got BF16 [2]");
}
