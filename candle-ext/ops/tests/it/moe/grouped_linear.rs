use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{
    GradSink, GroupedCall, OutputDtype, QuantFormat, ScaleBlock, ScaleRounding, TokensPerCall, Weight, dequantize,
    grouped_linear, linear, quantize,
};

use super::{devices, u32s};
use crate::cases::{
    F32, OpCase, TestDevice, assert_close, assert_error, bits, check_each, grad_of, randn, tape, trainable, values,
};

/// Returns u32 offsets of groups with these sizes.
pub(super) fn offsets(sizes: &[u32]) -> Tensor {
    let ends = sizes.iter().scan(0, |end, size| {
        *end += size;
        Some(*end)
    });
    u32s(&std::iter::once(0).chain(ends).collect::<Vec<u32>>())
}

/// Multiplies group by group, in plain candle ops.
fn reference(x: &Tensor, w: &Tensor, sizes: &[u32]) -> Result<Tensor> {
    let n_out = w.dim(0)? / sizes.len();
    let mut start = 0;
    let mut parts = Vec::new();
    for (i, &size) in sizes.iter().enumerate() {
        if size > 0 {
            let w = w.narrow(0, i * n_out, n_out)?;
            parts.push(x.narrow(0, start, size as usize)?.matmul(&w.t()?)?);
        }
        start += size as usize;
    }
    let n_rest = x.dim(0)? - start;
    if n_rest > 0 {
        parts.push((x.narrow(0, start, n_rest)?.sum_keepdim(1)? * 0.0)?.broadcast_as((n_rest, n_out))?);
    }
    Tensor::cat(&parts, 0)
}

fn check(sizes: &[u32], n_rest: usize, k: usize, n: usize, tokens: TokensPerCall) {
    check_on(&devices(), sizes, n_rest, [k, n], tokens);
}

fn check_on(on: &[TestDevice], sizes: &[u32], n_rest: usize, k_and_n: [usize; 2], tokens: TokensPerCall) {
    check_each([DType::F32, DType::BF16, DType::F16], |dtype| {
        check_call(on, sizes, n_rest, k_and_n, tokens.into(), dtype);
    });
}

/// Compares a call on some devices, the CPU first, with the reference.
pub(super) fn check_call(
    on: &[TestDevice],
    sizes: &[u32],
    n_rest: usize,
    [k, n]: [usize; 2],
    call: GroupedCall,
    dtype: DType,
) {
    let n_rows = sizes.iter().sum::<u32>() as usize + n_rest;
    OpCase {
        name: &format!("grouped_linear {sizes:?} {k} {n}"),
        inputs: vec![randn((n_rows, k), 1)],
        weights: vec![randn((sizes.len() * n, k), 2)],
        op: &|x, w| grouped_linear(&x[0], &w[0], &offsets(sizes).to_device(x[0].device())?, call),
        reference: &|a| reference(&a[0], &a[1], sizes),
    }
    .check_on(on, dtype);
}

#[test]
fn it_equals_the_reference() {
    let cases: [(&[u32], usize, usize, usize); 8] = [
        (&[5, 3, 9], 0, 16, 24),
        (&[0, 7, 0, 1, 0], 0, 33, 17),
        (&[0, 0, 40, 0], 3, 8, 5),
        (&[1, 1, 1, 1], 4, 7, 3),
        (&[1], 0, 1, 1),
        (&[70, 2, 0, 31, 1, 129], 5, 40, 72),
        (&[0, 65, 130], 66, 96, 136),
        (&[3, 0, 2], 0, 130, 66),
    ];
    check_each(cases, |(sizes, n_rest, k, n)| check(sizes, n_rest, k, n, TokensPerCall::Many));
}

/// Groups that are divided into tasks by rows or columns, and weights of several panels: a CPU's matter.
#[test]
fn large_groups_and_weights_equal_the_reference() {
    let cases: [(&[u32], usize, usize, usize); 4] =
        [(&[1500, 0, 3], 2, 9, 33), (&[300, 40], 0, 200, 300), (&[2, 3], 0, 900, 700), (&[2, 1], 0, 1500, 900)];
    check_each(cases, |(sizes, n_rest, k, n)| {
        check_on(&[TestDevice::Cpu], sizes, n_rest, [k, n], TokensPerCall::Many);
    });
}

#[test]
fn the_rows_of_one_token_equal_the_reference() {
    let cases: [(&[u32], usize, usize, usize); 3] =
        [(&[1, 0, 1, 1, 0], 0, 40, 24), (&[0, 1], 1, 33, 300), (&[0, 0, 1], 0, 1, 1)];
    check_each(cases, |(sizes, n_rest, k, n)| check(sizes, n_rest, k, n, TokensPerCall::One));
}

#[test]
fn many_small_groups_equal_the_reference() {
    let sizes: Vec<u32> = (0..512).map(|i| i * i % 7 % 5).collect();
    check_on(&[TestDevice::Cpu], &sizes, 1, [10, 6], TokensPerCall::Many);
    check(&sizes[..70], 1, 10, 6, TokensPerCall::Many);
}

/// Returns the output and the gradient of x, for the rows `first..first + n` of one expert of two.
fn rows_alone(
    test_device: &TestDevice,
    x: &Tensor,
    dy: &Tensor,
    w: &Weight,
    (first, n): (usize, usize),
) -> [Vec<u64>; 2] {
    let [x, dy] = [x, dy].map(|all| test_device.put(&all.narrow(0, first, n).unwrap().contiguous().unwrap()));
    test_device.run(|| {
        let offsets = test_device.put(&offsets(&[n as u32, 0]));
        let tape = tape(std::slice::from_ref(&x), || grouped_linear(&x, w, &offsets, TokensPerCall::Many));
        let y = tape.output().clone();
        [bits(&y), bits(&tape.backward(&dy).unwrap().remove(&x).unwrap())]
    })
}

fn check_bits(test_device: &TestDevice, dtype: DType, [k, n]: [usize; 2]) {
    let cast = |x: Tensor| x.to_dtype(dtype).unwrap();
    let (x, dy, w) = (cast(randn((300, k), 1)), cast(randn((300, n), 2)), cast(randn((2 * n, k), 3)));
    let w = Weight::frozen(test_device.put(&w));
    let [y, dx] = rows_alone(test_device, &x, &dy, &w, (0, 300));
    for (first, n_rows) in [(0, 1), (7, 1), (299, 1), (3, 2), (100, 33), (0, 299), (171, 129)] {
        let [y_alone, dx_alone] = rows_alone(test_device, &x, &dy, &w, (first, n_rows));
        let what = format!("{test_device:?} {dtype:?} [{n}, {k}] rows {first} + {n_rows}");
        assert!(y_alone == y[first * n..(first + n_rows) * n], "y, {what}");
        assert!(dx_alone == dx[first * k..(first + n_rows) * k], "dx, {what}");
    }
}

#[test]
fn the_bits_of_a_row_do_not_depend_on_its_group() {
    for dtype in [DType::F32, DType::BF16] {
        check_each(devices(), |test_device| check_bits(&test_device, dtype, [48, 40]));
        check_each([[800, 530], [1025, 1100]], |sizes| check_bits(&TestDevice::Cpu, dtype, sizes));
    }
}

#[test]
fn one_token_gives_the_bits_of_linear() {
    let (x, w) = (randn((3, 70), 1), randn((4 * 50, 70), 2));
    let y = grouped_linear(&x, &Weight::frozen(w.clone()), &offsets(&[1, 0, 1, 1]), TokensPerCall::One).unwrap();
    for (row, expert) in [0, 2, 3].into_iter().enumerate() {
        let w = Weight::frozen(w.narrow(0, expert * 50, 50).unwrap());
        let alone = linear(&x.narrow(0, row, 1).unwrap(), &w, None, OutputDtype::SameAsInput).unwrap();
        assert_eq!(bits(&y.narrow(0, row, 1).unwrap()), bits(&alone), "{row}");
    }
}

#[test]
fn an_expert_without_rows_overwrites_a_stale_gradient_with_zeros() {
    for (test_device, dtype) in devices().into_iter().flat_map(|d| [DType::F32, DType::BF16].map(|t| (d.clone(), t))) {
        let sink =
            GradSink::new(test_device.put(&Tensor::full(7f32, (9, 5), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()));
        let w = Weight::trainable(test_device.put(&randn((9, 5), 1)), sink.unwrap());
        let x = test_device.put(&randn((4, 5), 2));
        let backward = || {
            test_device.run(|| {
                let offsets = test_device.put(&offsets(&[3, 0, 1]));
                let tape = tape(&[], || grouped_linear(&x, &w, &offsets, TokensPerCall::Many));
                tape.backward(&test_device.put(&randn((4, 3), 3))).unwrap();
                values(&w.sink().unwrap().grad().unwrap())
            })
        };
        let added = backward();
        w.sink().unwrap().reset();
        let written = backward();
        assert_eq!((&added[15..30], &written[15..30]), (&[7.0; 15][..], &[0.0; 15][..]), "{test_device:?} {dtype:?}");
        let bound = if dtype == DType::F32 { 1e-5 } else { 0.1 };
        assert!(added.iter().zip(&written).all(|(added, written)| (added - written - 7.0).abs() < bound), "{dtype:?}");
    }
}

#[test]
fn no_rows_give_no_output() {
    let x = Tensor::zeros((0, 4), DType::F32, &Device::Cpu).unwrap();
    let w = trainable(&randn((6, 4), 1));
    w.sink().unwrap().reset();
    let tape = tape(std::slice::from_ref(&x), || grouped_linear(&x, &w, &offsets(&[0, 0]), TokensPerCall::Many));
    let y = tape.output().clone();
    assert_eq!(y.dims(), [0, 3]);
    assert_eq!(tape.backward(&y).unwrap().get(&x).unwrap().dims(), [0, 4]);
    assert_eq!(values(&grad_of(&w)), [0.0; 24]);
}

const INT8: [f32; 256] = {
    let mut codes = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        codes[code] = code as u8 as i8 as f32;
        code += 1;
    }
    codes
};

#[test]
fn a_quantized_weight_gives_what_its_dequantized_copy_gives() {
    let blocks = [ScaleBlock::Row, ScaleBlock::Tile { rows: 16, columns: 8 }];
    check_each(
        blocks.into_iter().flat_map(|block| [TokensPerCall::One, TokensPerCall::Many].map(|t| (block, t))),
        |case| {
            let (block, tokens) = case;
            let format: &'static QuantFormat =
                Box::leak(Box::new(QuantFormat { name: "int8", codes: &INT8, block, scales: ScaleRounding::Exact }));
            let (n_out, k) = (300, 1200);
            let bytes = quantize(&randn((3 * n_out, k), 1), format).unwrap();
            let dense = dequantize(&bytes, format, &[3 * n_out, k], DType::F32).unwrap();
            let quantized = Weight::quantized(bytes, format, [3 * n_out, k]).unwrap();
            let (x, sizes) = (randn((6, k), 2), [4, 0, 2]);
            let results = |w: &Weight| {
                let tape = tape(std::slice::from_ref(&x), || grouped_linear(&x, w, &offsets(&sizes), tokens));
                let y = tape.output().clone();
                [y, tape.backward(&randn((6, n_out), 3)).unwrap().remove(&x).unwrap()]
            };
            for (got, want) in results(&quantized).iter().zip(results(&Weight::frozen(dense))) {
                assert_close("a quantized weight", got, &want, F32);
            }
        },
    );
}

#[test]
fn a_gradient_step_is_the_slope() {
    let sizes = [3, 0, 5];
    OpCase {
        name: "grouped_linear",
        inputs: vec![randn((8, 6), 1)],
        weights: vec![randn((3 * 4, 6), 2)],
        op: &|x, w| grouped_linear(&x[0], &w[0], &offsets(&sizes), TokensPerCall::Many),
        reference: &|a| reference(&a[0], &a[1], &sizes),
    }
    .check_finite_difference();
}

#[test]
fn wrong_shapes_and_offsets_are_named() {
    let x = randn((4, 5), 1);
    let run =
        |w: &[usize], offsets: &Tensor| grouped_linear(&x, &Weight::frozen(randn(w, 2)), offsets, TokensPerCall::Many);
    assert_error(run(&[6, 4], &u32s(&[0, 1, 4])), "weight has shape [6, 4], want [6, 5]");
    assert_error(run(&[7, 5], &u32s(&[0, 1, 4])), "7 rows of the weight cannot be divided by 2 groups");
    assert_error(run(&[6, 5], &u32s(&[0, 3, 2])), "offsets must rise from 0 to at most 4 rows");
    assert_error(run(&[6, 5], &u32s(&[0, 1, 5])), "got [0, 1, 5]");
    assert_error(run(&[6, 5], &u32s(&[0])), "want u32 offsets [e + 1]");
    assert_error(run(&[6, 5], &randn(3, 1)), "want u32 offsets");
}
