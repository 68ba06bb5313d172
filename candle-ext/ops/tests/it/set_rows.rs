use candle_core::{DType, Device, Tensor};
use candlewick_ops::set_rows;

use crate::cases::{TestDevice, assert_error, bits, check_each, randn};

/// Writes rows of `src` [m, ..] into a buffer of ones and compares with a copy made row by row.
#[track_caller]
fn check(test_device: &TestDevice, row: &[usize], n: usize, rows: &[u32], dtype: DType) {
    let shape = |n: usize| [&[n], row].concat();
    let dst = test_device.put(&Tensor::ones(shape(n), dtype, &Device::Cpu).unwrap());
    let src = randn(shape(rows.len()), 1).to_dtype(dtype).unwrap();
    test_device.run(|| set_rows(&dst, rows, &test_device.put(&src))).unwrap();
    let of = |i: usize| match rows.iter().position(|row| *row as usize == i) {
        Some(from) => src.narrow(0, from, 1).unwrap(),
        None => Tensor::ones(shape(1), dtype, &Device::Cpu).unwrap(),
    };
    let want = Tensor::cat(&(0..n).map(of).collect::<Vec<_>>(), 0).unwrap();
    assert_eq!(bits(&dst), bits(&want), "{rows:?} of {n} {row:?} {dtype:?} {test_device:?}");
}

#[test]
fn rows_land_where_they_belong_and_the_others_stay() {
    check_each(TestDevice::all(), |test_device| {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            check(&test_device, &[2, 5], 7, &[3, 0, 6], dtype);
            check(&test_device, &[300], 4, &[1], dtype);
            check(&test_device, &[3, 408], 4, &[2, 0], dtype);
            check(&test_device, &[1, 1], 3, &[2, 1, 0], dtype);
            check(&test_device, &[4], 3, &[], dtype);
        }
    });
}

#[test]
fn the_cpu_rounds_to_the_destination() {
    let dst = Tensor::zeros((2, 3), DType::BF16, &Device::Cpu).unwrap();
    let src = randn((1, 3), 1);
    set_rows(&dst, &[1], &src).unwrap();
    let want = src.to_dtype(DType::BF16).unwrap();
    assert_eq!(bits(&dst.narrow(0, 1, 1).unwrap()), bits(&want));
}

#[test]
fn wrong_arguments_are_named() {
    let (dst, src) = (randn((4, 3), 1), randn((2, 3), 2));
    assert_error(set_rows(&dst, &[0], &src), "[2, 3] does not give 1 rows of [4, 3]");
    assert_error(set_rows(&dst, &[0, 1], &randn((2, 4), 1)), "[2, 4] does not give 2 rows");
    assert_error(set_rows(&dst, &[0, 4], &src), "row 4 of 4");
    assert_error(set_rows(&dst, &[0, 1], &dst.narrow(0, 2, 2).unwrap()), "the destination's own buffer");
    assert_error(set_rows(&dst.t().unwrap(), &[0, 1], &randn((2, 4), 1)), "want a contiguous tensor");
}
