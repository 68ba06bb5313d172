//! The matmul of a router in f64: each element is a sum in f64, rounded once.

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    GradSink, OutputDtype, QuantFormat, ScaleBlock, ScaleRounding, Tape, Weight, dequantize, linear, linear_f64,
    linear_f64_bytes, quantize, record_exchange, rms_norm, scale,
};
use serde_json::Value;

use super::devices;
use super::router_fixture::{FIXTURE, matrix};
use crate::cases::{
    F32, TestDevice, assert_close, assert_error, bits, check_each, grad_of, randn, tape, trainable, values,
};

const CODES: [f32; 256] = {
    let mut codes = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        codes[code] = code as u8 as i8 as f32;
        code += 1;
    }
    codes
};

static INT8: QuantFormat =
    QuantFormat { name: "int8", codes: &CODES, block: ScaleBlock::Row, scales: ScaleRounding::Exact };

/// Returns the largest relative error of rounding to a dtype.
fn roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-24),
    }
}

/// Returns a matrix of sums of n terms, row by row.
fn sums([rows, columns, n]: [usize; 3], term: impl Fn(usize, usize, usize) -> f64) -> Vec<f64> {
    let sum = |i: usize| (0..n).map(|l| term(i / columns, i % columns, l)).sum();
    (0..rows * columns).map(sum).collect()
}

/// Checks that each element is `want` within the error of `n_roundings`. Sums in f32 have larger errors.
#[track_caller]
fn assert_rounded(what: &str, got: &Tensor, want: &[f64], n_roundings: f64) {
    let bound = n_roundings * roundoff(got.dtype()) * 1.001;
    for (i, (got, want)) in values(got).iter().zip(want).enumerate() {
        assert!((got - want).abs() <= bound * want.abs().max(1e-3), "{what}: element {i} is {got}, want {want}");
    }
}

/// Returns a weight whose gradient is NaN and stale.
fn stale(test_device: &TestDevice, value: &Tensor, grad: DType) -> Weight {
    let nan = Tensor::full(f32::NAN, value.shape(), &Device::Cpu).unwrap().to_dtype(grad).unwrap();
    let sink = GradSink::new(test_device.put(&nan)).unwrap();
    sink.reset();
    Weight::trainable(test_device.put(value), sink)
}

/// Compares a forward and two backwards with sums in f64. The dtypes are those of x, w and dw.
#[track_caller]
fn check(lead: &[usize], k: usize, n: usize, [of_x, of_w, of_grad]: [DType; 3]) {
    let t: usize = lead.iter().product();
    let x = randn([lead, &[k]].concat(), 1).to_dtype(of_x).unwrap();
    let w = randn((n, k), 2).to_dtype(of_w).unwrap();
    let dy = randn([lead, &[n]].concat(), 3);
    let [xs, ws, dys] = [&x, &w, &dy].map(values);
    let y = sums([t, n, k], |i, j, l| xs[i * k + l] * ws[j * k + l]);
    let dx = sums([t, k, n], |i, j, l| dys[i * n + l] * ws[l * k + j]);
    let dw = sums([n, k, t], |i, j, l| dys[l * n + i] * xs[l * k + j]);
    for test_device in devices() {
        let what = format!("{lead:?} {k} {n} {of_x:?} {of_w:?} {of_grad:?} {test_device:?}");
        let weight = stale(&test_device, &w, of_grad);
        let (x, dy) = (test_device.put(&x), test_device.put(&dy));
        for n_backwards in 1..=2 {
            let (got_y, got_dx) = test_device.run(|| {
                let tape = tape(std::slice::from_ref(&x), || linear_f64(&x, &weight));
                (tape.output().clone(), tape.backward(&dy).unwrap().remove(&x).unwrap())
            });
            assert_eq!((got_y.dtype(), got_y.dims()), (DType::F32, dy.dims()), "{what}");
            assert_eq!((got_dx.dtype(), got_dx.dims()), (of_x, x.dims()), "{what}");
            assert_rounded(&format!("{what} y"), &got_y, &y, 1.0);
            assert_rounded(&format!("{what} dx"), &got_dx, &dx, 1.0);
            let want: Vec<f64> = dw.iter().map(|dw| dw * f64::from(n_backwards)).collect();
            let got = test_device.run(|| grad_of(&weight));
            assert_eq!(got.dtype(), of_grad, "{what}");
            assert_rounded(&format!("{what} dw"), &got, &want, n_backwards.into());
        }
    }
}

#[test]
fn outputs_and_gradients_are_sums_in_f64_rounded_once() {
    use DType::{BF16, F16, F32};
    let shapes: [(&[usize], usize, usize); 6] =
        [(&[33], 65, 17), (&[2, 5], 16, 30), (&[1], 64, 48), (&[1], 1, 1), (&[3, 1, 2], 7, 1), (&[9], 1500, 8)];
    let dtypes = [[F32, F32, F32], [BF16, BF16, F32], [BF16, BF16, BF16], [BF16, F32, F32], [F16, F16, F32]];
    check_each(shapes.into_iter().flat_map(|shape| dtypes.map(|dtypes| (shape, dtypes))), |((lead, k, n), dtypes)| {
        check(lead, k, n, dtypes);
    });
}

/// An f32 sum of these terms is 0 in any order that adds the ones to a large term.
#[test]
fn small_terms_next_to_large_ones_are_kept() {
    let x = Tensor::new(&[[1e8f32, 1.0, 1.0, -1e8]], &Device::Cpu).unwrap();
    let w = Weight::frozen(Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap());
    for test_device in devices() {
        let (x, w) = (test_device.put(&x), Weight::frozen(test_device.put(&w.value().unwrap())));
        assert_eq!(values(&test_device.run(|| linear_f64(&x, &w)).unwrap()), [2.0, 2.0]);
    }
}

#[test]
fn logits_and_gradients_equal_megatrons() {
    for want in FIXTURE["gating_f64"].as_array().unwrap() {
        let dtype = if want["dtype"] == "bfloat16" { DType::BF16 } else { DType::F32 };
        let get = |key: &str| matrix(&want[key]);
        let doubles = |key: &str| -> Vec<f64> {
            let rows = want[key].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap());
            rows.map(|value: &Value| value.as_f64().unwrap()).collect()
        };
        for test_device in devices() {
            let put = |x: Tensor| test_device.put(&x.to_dtype(dtype).unwrap());
            let (x, w) = (put(get("x")), trainable(&put(get("w"))));
            let (y, dx, dw) = test_device.run(|| {
                let tape = tape(std::slice::from_ref(&x), || linear_f64(&x, &w));
                let y = tape.output().clone();
                let dx = tape.backward(&test_device.put(&get("upstream"))).unwrap().remove(&x).unwrap();
                (y, dx, grad_of(&w))
            });
            assert_rounded("logits", &y, &doubles("logits"), 1.0);
            // Megatron-LM has rounded these gradients to the dtype.
            assert_eq!(values(&dx), doubles("dx"), "{dtype:?}");
            assert_eq!(values(&dw.to_dtype(dtype).unwrap()), doubles("dw"), "{dtype:?}");
        }
    }
}

#[test]
fn a_frozen_weight_has_no_gradient_and_changes_no_other() {
    let (x, w, dy) = (randn((5, 8), 1), randn((3, 8), 2), randn((5, 3), 3));
    let dx = |w: &Weight| {
        let tape = tape(std::slice::from_ref(&x), || linear_f64(&x, w));
        tape.backward(&dy).unwrap().remove(&x).unwrap()
    };
    let frozen = Weight::frozen(w.clone());
    assert_eq!(bits(&dx(&frozen)), bits(&dx(&trainable(&w))));
    assert!(tape(&[], || linear_f64(&x, &frozen)).is_empty());
}

#[test]
fn a_weight_is_trained_if_its_input_is_not() {
    let (x, w, dy) = (randn((5, 8), 1), trainable(&randn((3, 8), 2)), randn((5, 3), 3));
    tape(&[], || linear_f64(&x, &w)).backward(&dy).unwrap();
    assert_close("dw", &grad_of(&w), &dy.t().unwrap().matmul(&x).unwrap(), F32);
}

#[test]
fn the_sink_is_added_to_inside_its_buffer_only() {
    let flat = Tensor::ones(20, DType::F32, &Device::Cpu).unwrap();
    let view = flat.narrow(0, 4, 6).unwrap().reshape((2, 3)).unwrap();
    let w = Weight::trainable(randn((2, 3), 1), GradSink::new(view).unwrap());
    let (x, dy) = (randn((5, 3), 2), randn((5, 2), 3));
    tape(&[], || linear_f64(&x, &w)).backward(&dy).unwrap();
    let flat: Vec<f32> = flat.to_vec1().unwrap();
    assert!(flat[..4].iter().chain(&flat[10..]).all(|&x| x == 1.0));
    assert_close("dw", &(grad_of(&w) - 1.0).unwrap(), &dy.t().unwrap().matmul(&x).unwrap(), F32);
}

#[test]
fn a_strided_input_equals_its_copy() {
    let (x, w) = (randn((8, 5), 1).t().unwrap(), trainable(&randn((3, 8), 2)));
    assert_eq!(bits(&linear_f64(&x, &w).unwrap()), bits(&linear_f64(&x.contiguous().unwrap(), &w).unwrap()));
}

/// Backward recomputes the output of a norm.
#[test]
fn a_recomputed_input_gives_the_gradients_of_f32() {
    let (x, norm, dy) = (randn((5, 8), 1), trainable(&randn(8, 4)), randn((5, 3), 3));
    let grads = |op: &dyn Fn(&Tensor, &Weight) -> candle_core::Result<Tensor>| {
        let w = trainable(&randn((3, 8), 2));
        let tape = tape(std::slice::from_ref(&x), || op(&rms_norm(&x, &norm, 1e-6)?, &w));
        let dx = tape.backward(&dy).unwrap().remove(&x).unwrap();
        [dx, grad_of(&w)]
    };
    let of_f32 = grads(&|x, w| linear(x, w, None, OutputDtype::F32));
    for (got, want) in grads(&linear_f64).iter().zip(&of_f32) {
        assert_close("gradient", got, want, 1e-6);
    }
}

/// The gradient of the weight waits until the exchange of the input's gradient is in flight.
#[test]
fn an_exchange_of_the_input_changes_no_gradient() {
    let (x, dy) = (randn((5, 3), 1), randn((5, 4), 3));
    let grads = |exchanges: bool| {
        let w = trainable(&randn((4, 3), 2));
        let (before, after) = (grad_of(&w), w.clone());
        let tape = Tape::record(&[&x], || {
            if !exchanges {
                return linear_f64(&scale(&x, 2.0, DType::F32)?, &w);
            }
            let start = move |dy: &Tensor| -> candle_core::Result<candlewick_ops::PendingExchange> {
                assert_eq!(bits(&before), vec![0; 12], "nothing is added yet");
                let sum = dy.affine(2.0, 0.0)?;
                Ok(Box::new(move || {
                    assert_ne!(bits(&grad_of(&after)), vec![0; 12]);
                    Ok(sum)
                }))
            };
            linear_f64(&record_exchange("exchange", &x, |x: &Tensor| x.affine(2.0, 0.0), start)?, &w)
        });
        let dx = tape.unwrap().backward(&dy).unwrap().remove(&x).unwrap();
        [bits(&dx), bits(&grad_of(&w))]
    };
    assert_eq!(grads(true), grads(false));
}

#[test]
fn a_quantized_weight_gives_the_results_of_its_dequantized_values() {
    let (x, dy) = (randn((5, 8), 1), randn((3, 4), 3));
    let x = x.narrow(0, 0, 3).unwrap();
    let bytes = quantize(&randn((4, 8), 2), &INT8).unwrap();
    let dense = dequantize(&bytes, &INT8, &[4, 8], DType::F32).unwrap();
    let results = |w: &Weight| {
        let tape = tape(std::slice::from_ref(&x), || linear_f64(&x, w));
        [bits(tape.output()), bits(&tape.backward(&dy).unwrap().remove(&x).unwrap())]
    };
    let quantized = Weight::quantized(bytes, &INT8, [4, 8]).unwrap();
    assert_eq!(results(&quantized), results(&Weight::frozen(dense)));
}

#[test]
fn no_tokens_give_no_output_and_no_gradient() {
    let x = Tensor::zeros((0, 4), DType::BF16, &Device::Cpu).unwrap();
    let w = stale(&TestDevice::Cpu, &randn((3, 4), 1), DType::F32);
    let tape = tape(std::slice::from_ref(&x), || linear_f64(&x, &w));
    let y = tape.output().clone();
    assert_eq!((y.dims(), y.dtype()), (&[0, 3][..], DType::F32));
    let dx = tape.backward(&y).unwrap().remove(&x).unwrap();
    assert_eq!((dx.dims(), dx.dtype()), (&[0, 4][..], DType::BF16));
    assert_eq!(values(&grad_of(&w)), [0.0; 12]);
}

#[test]
fn results_are_the_same_bits_for_any_number_of_threads() {
    let on = |n_threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        pool.install(|| {
            let (x, w) = (randn((600, 300), 1), trainable(&randn((64, 300), 2)));
            let tape = tape(std::slice::from_ref(&x), || linear_f64(&x, &w));
            let y = bits(tape.output());
            [y, bits(&tape.backward(&randn((600, 64), 3)).unwrap().remove(&x).unwrap()), bits(&grad_of(&w))]
        })
    };
    let one = on(1);
    assert!([2, 3].into_iter().all(|n_threads| on(n_threads) == one));
}

#[test]
fn wrong_shapes_and_dtypes_are_named() {
    let (x, w) = (randn((2, 4), 1), Weight::frozen(randn((3, 5), 2)));
    assert_error(linear_f64(&x, &w), "linear_f64: weight has shape [3, 5], want [3, 4]");
    let ids = Tensor::zeros((2, 5), DType::U32, &Device::Cpu).unwrap();
    assert_error(linear_f64(&ids, &w), "want f32, bf16 or f16");
}

#[test]
fn bytes_are_those_of_input_weight_and_output() {
    assert_eq!(linear_f64_bytes(10, 3, 4), (10 * 3 + 4 * 3 + 10 * 4) * 8);
}
