use candle_core::{DType, Device, Tensor};
use candlewick_ops::{OutputDtype, Weight, add, linear, swiglu, swiglu_joined};

use crate::cases::{OpCase, TestDevice, assert_error, bits, check_each, grad_of, randn, tape, trainable, values};

fn case(shape: &[usize], check: impl Fn(&OpCase<'_>)) {
    check(&OpCase {
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
fn of_joined_rows_it_equals_the_reference() {
    for shape in [&[33, 1536][..], &[2], &[3, 5, 14], &[5, 9728], &[1, 10_000], &[700, 6]] {
        let case = OpCase {
            name: "swiglu_joined",
            inputs: vec![randn(shape, 1)],
            weights: vec![],
            op: &|x, _| swiglu_joined(&x[0]),
            reference: &|a| {
                let (dim, half) = (a[0].rank() - 1, a[0].dims()[a[0].rank() - 1] / 2);
                a[0].narrow(dim, 0, half)?.silu()?.mul(&a[0].narrow(dim, half, half)?)
            },
        };
        case.check_all_formats();
    }
}

#[test]
fn joined_rows_give_the_bits_of_two_inputs() {
    let joined = randn((70, 300), 1);
    let [gate, up] = [0, 150].map(|first| joined.narrow(1, first, 150).unwrap());
    for test_device in TestDevice::all() {
        let dy = test_device.put(&randn((70, 150), 3));
        let [of_one, of_two] = [vec![joined.clone()], vec![gate.clone(), up.clone()]].map(|inputs| {
            let inputs: Vec<Tensor> = inputs.iter().map(|x| test_device.put(x)).collect();
            test_device.run(|| {
                let tape = tape(&inputs, || match inputs.as_slice() {
                    [joined] => swiglu_joined(joined),
                    two => swiglu(&two[0], &two[1]),
                });
                let y = tape.output().clone();
                let grads = tape.backward(&dy).unwrap();
                let grads: Vec<Tensor> = inputs.iter().map(|x| grads.get(x).unwrap().clone()).collect();
                [y, Tensor::cat(&grads, 1).unwrap()].map(|x| bits(&x))
            })
        });
        assert!(of_one == of_two, "{test_device:?}");
    }
}

/// Readers of the output of SwiGLU.
#[derive(Clone, Copy, Debug)]
enum Readers {
    /// A linear layer.
    Linear,
    /// Two linear layers.
    TwoLinears,
    /// A linear layer and an addition.
    LinearAndAdd,
}

/// Returns the bits of the output, of the gradients of the inputs, and of those of the weights. `splits` separates SwiGLU from its
/// readers, so that each has a backward of its own.
fn results_of_readers(
    test_device: &TestDevice,
    dtype: DType,
    (joins, readers): (bool, Readers),
    splits: bool,
) -> Vec<Vec<u64>> {
    let put = |x: Tensor| test_device.put(&x.to_dtype(dtype).unwrap());
    let inputs = match joins {
        true => vec![put(randn((33, 96), 1))],
        false => vec![put(randn((33, 48), 1)), put(randn((33, 48), 2))],
    };
    let (dy, weights) = (put(randn((33, 48), 3)), [4, 5].map(|seed| trainable(&put(randn((48, 48), seed)))));
    let project = |y: &Tensor, w: &Weight| linear(y, w, None, OutputDtype::SameAsInput);
    let read = |y: &Tensor| match readers {
        Readers::Linear => project(y, &weights[0]),
        Readers::TwoLinears => add(&project(y, &weights[0])?, &project(y, &weights[1])?),
        Readers::LinearAndAdd => add(&project(y, &weights[0])?, y),
    };
    let gated = || match inputs.as_slice() {
        [joined] => swiglu_joined(joined),
        two => swiglu(&two[0], &two[1]),
    };
    test_device.run(|| {
        let (output, grads) = match splits {
            false => {
                let tape = tape(&inputs, || read(&gated()?));
                (tape.output().clone(), tape.backward(&dy).unwrap())
            }
            true => {
                let first = tape(&inputs, gated);
                let y = first.output().affine(1.0, 0.0).unwrap();
                let second = tape(std::slice::from_ref(&y), || read(&y));
                let output = second.output().clone();
                let dy = second.backward(&dy).unwrap().remove(&y).unwrap();
                (output, first.backward(&dy).unwrap())
            }
        };
        let of_inputs = inputs.iter().map(|x| bits(grads.get(x).unwrap()));
        let of_weights = weights.iter().map(|w| bits(&grad_of(w)));
        [bits(&output)].into_iter().chain(of_inputs).chain(of_weights).collect()
    })
}

#[test]
fn the_pass_of_the_gradients_computes_the_output_for_readers() {
    for test_device in TestDevice::all() {
        check_each([DType::F32, DType::BF16, DType::F16], |dtype| {
            for readers in [Readers::Linear, Readers::TwoLinears, Readers::LinearAndAdd] {
                for joins in [true, false] {
                    let [one, two] =
                        [false, true].map(|splits| results_of_readers(&test_device, dtype, (joins, readers), splits));
                    assert!(one == two, "{test_device:?} {dtype:?} {readers:?} {joins}");
                    assert!(one.last().unwrap().len() == 48 * 48 && one.iter().flatten().any(|bits| *bits != 0));
                }
            }
        });
    }
}

/// The gradient of the down projection's weight reads the output that backward writes, so no launch computes the output again.
#[test]
#[cfg(not(feature = "cuda"))]
fn a_backward_launches_swiglu_once() {
    let half = |x: Tensor| x.to_dtype(DType::BF16).unwrap();
    let (inputs, w) = ([half(randn((9, 64), 1))], trainable(&half(randn((16, 32), 2))));
    let recorded = tape(&inputs, || linear(&swiglu_joined(&inputs[0])?, &w, None, OutputDtype::SameAsInput));
    let (_, work) = candlewick_ops::emulate_counted(|| recorded.backward(&half(randn((9, 16), 3))).unwrap());
    assert_eq!(work.launches, ["gemm", "backward_bf16", "gemm"]);
    // The gradients of y and of the joined rows. y takes the memory of its gradient.
    assert_eq!(work.output_bytes, 9 * (32 + 64) * 2);
}

#[test]
fn the_gradient_is_the_slope() {
    case(&[6, 20], |case| case.check_finite_difference());
}

#[test]
fn large_gates_neither_overflow_nor_turn_into_nan() {
    let gate = Tensor::new(&[-1e4f32, -100.0, -20.0, 0.0, 100.0, 1e4], &Device::Cpu).unwrap();
    for test_device in TestDevice::all() {
        let gate = test_device.put(&gate);
        let y = values(&test_device.run(|| swiglu(&gate, &gate.ones_like().unwrap())).unwrap());
        assert!(y[0].abs() < 1e-30 && y[1].abs() < 1e-30, "{y:?}");
        assert!((y[2] - -20.0 / (1.0 + 20f64.exp())).abs() < 1e-13, "{y:?}");
        assert_eq!(y[3..], [0.0, 100.0, 1e4]);
    }
}

#[test]
fn an_empty_input_gives_an_empty_output() {
    let none = randn((0, 3), 1);
    assert_eq!(swiglu(&none, &none).unwrap().dims(), [0, 3]);
    assert_eq!(swiglu_joined(&randn((0, 6), 1)).unwrap().dims(), [0, 3]);
    assert_eq!(swiglu_joined(&randn((3, 0), 1)).unwrap().dims(), [3, 0]);
}

#[test]
fn wrong_shapes_and_dtypes_are_named() {
    let (a, b) = (randn((2, 3), 1), randn((3, 2), 1));
    assert_error(swiglu(&a, &b), "gate is F32 [2, 3] but up is F32 [3, 2]");
    assert_error(swiglu(&a, &a.to_dtype(DType::BF16).unwrap()), "up is BF16");
    assert_error(swiglu_joined(&a), "want an input [.., 2f] of gate and up, got [2, 3]");
}
