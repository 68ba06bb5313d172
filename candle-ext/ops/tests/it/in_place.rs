use candle_core::{DType, Device, Tensor};
use candlewick_ops::{copy_into, count_zeros, sum_of_squares, zero_};

use crate::cases::{TestDevice, assert_error, bits, check_each, randn, values};

const FORMATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

#[test]
fn zero_clears_the_view_and_nothing_else() {
    check_each(TestDevice::all(), |test_device| {
        for (dtype, start) in FORMATS.into_iter().flat_map(|dtype| [(dtype, 3), (dtype, 8)]) {
            let flat = test_device.put(&Tensor::ones(40_000, dtype, &Device::Cpu).unwrap());
            test_device.run(|| zero_(&flat.narrow(0, start, 39_000).unwrap())).unwrap();
            let flat = values(&flat);
            assert!(flat[start..start + 39_000].iter().all(|&x| x == 0.0));
            assert_eq!(flat.iter().sum::<f64>(), 1000.0);
        }
    });
}

#[test]
fn copy_into_rounds_to_the_destination() {
    check_each(TestDevice::all(), |test_device| {
        for (from, to) in FORMATS.into_iter().flat_map(|from| FORMATS.map(|to| (from, to))) {
            for start in [1, 8] {
                check_copy(&test_device, (from, to), start);
            }
        }
    });
}

fn check_copy(test_device: &TestDevice, (from, to): (DType, DType), start: usize) {
    let n = 30_000;
    let src = randn((150, 200), 1).to_dtype(from).unwrap();
    let flat = test_device.put(&Tensor::ones(n + 10, to, &Device::Cpu).unwrap());
    let dst = flat.narrow(0, start, n).unwrap();
    test_device.run(|| copy_into(&dst, &test_device.put(&src))).unwrap();
    let want = src.to_dtype(to).unwrap().flatten_all().unwrap();
    assert_eq!(bits(&dst), bits(&want));
    let flat = values(&flat);
    assert_eq!((flat[start - 1], flat[start + n]), (1.0, 1.0));
}

#[test]
fn copy_into_reads_strided_sources_and_its_own_buffer() {
    check_each(TestDevice::all(), |test_device| {
        test_device.run(|| {
            let dst = test_device.put(&Tensor::zeros(6, DType::F32, &Device::Cpu).unwrap());
            let src = test_device.put(&randn((2, 3), 1)).t().unwrap();
            copy_into(&dst, &src).unwrap();
            assert_eq!(bits(&dst), bits(&src));
            let flat = test_device.put(&Tensor::new(&[1f32, 2.0, 3.0, 4.0], &Device::Cpu).unwrap());
            copy_into(&flat.narrow(0, 1, 3).unwrap(), &flat.narrow(0, 0, 3).unwrap()).unwrap();
            assert_eq!(values(&flat), [1.0, 1.0, 2.0, 3.0]);
        });
    });
}

#[test]
fn sum_of_squares_is_exact_to_f64() {
    check_each(TestDevice::all(), |test_device| {
        let sum = |x: &Tensor, n| {
            test_device
                .run(|| sum_of_squares(&test_device.put(x).narrow(0, 0, n).unwrap()))
                .unwrap()
                .to_scalar::<f64>()
                .unwrap()
        };
        for n in [0, 1, 7, 16_384, 100_001] {
            for dtype in FORMATS {
                let x = randn(n + 1, 1).to_dtype(dtype).unwrap();
                let want: f64 = values(&x)[..n].iter().map(|x| x * x).sum();
                let got = sum(&x, n);
                assert!((got - want).abs() <= 1e-12 * want, "{n} {dtype:?} {test_device:?}: {got} {want}");
            }
        }
        // 3e38 squared overflows in f32.
        let huge = Tensor::new(&[3e38f32], &Device::Cpu).unwrap();
        assert!((sum(&huge, 1) / 9e76 - 1.0).abs() < 1e-6);
    });
}

/// Squares of small integers add up exactly in any order.
///
/// A CUDA thread has four vector loads in flight, of 4 f32 elements, 8 16-bit elements or 1 unaligned element. A grid
/// loops over long buffers. The lengths end just after a whole number of its rounds.
#[test]
fn sum_of_squares_counts_each_element_once() {
    for test_device in TestDevice::all() {
        for (n, dtype) in [1_081_345, 2_162_692, 4_325_384].into_iter().flat_map(|n| FORMATS.map(|dtype| (n, dtype))) {
            let x: Vec<f32> = (0..n).map(|i| (i % 13) as f32).collect();
            let want: f64 = x.iter().map(|x| f64::from(x * x)).sum();
            let x = test_device.put(&Tensor::new(x, &Device::Cpu).unwrap().to_dtype(dtype).unwrap());
            let got = test_device.run(|| sum_of_squares(&x)).unwrap().to_scalar::<f64>().unwrap();
            assert_eq!(got, want, "{n} {dtype:?} {test_device:?}");
        }
    }
}

#[test]
fn count_zeros_counts_both_signs_and_no_tiny_number() {
    for test_device in TestDevice::all() {
        for (n, dtype) in [0, 1, 7, 16_384, 1_081_345].into_iter().flat_map(|n| FORMATS.map(|dtype| (n, dtype))) {
            let zeros = |i: usize| if i.is_multiple_of(2) { 0.0 } else { -0.0 };
            // 6e-8 is the smallest f16.
            let x: Vec<f32> = (0..n + 1).map(|i: usize| if i.is_multiple_of(13) { zeros(i) } else { 6e-8 }).collect();
            let want = x[..n].iter().filter(|x| **x == 0.0).count() as f64;
            let x = test_device.put(&Tensor::new(x, &Device::Cpu).unwrap().to_dtype(dtype).unwrap());
            let got = test_device.run(|| count_zeros(&x.narrow(0, 0, n).unwrap())).unwrap();
            assert_eq!(got.to_scalar::<f64>().unwrap(), want, "{n} {dtype:?} {test_device:?}");
        }
    }
}

#[test]
fn wrong_arguments_are_named() {
    let (a, b) = (randn(3, 1), randn(4, 1));
    assert_error(copy_into(&a, &b), "[4] does not fit into [3]");
    assert_error(zero_(&randn((2, 3), 1).t().unwrap()), "want a contiguous tensor");
    let ids = Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap();
    assert_error(zero_(&ids), "the tensor is U32");
    assert_error(copy_into(&a, &ids), "the source is U32");
    assert_error(sum_of_squares(&ids), "the tensor is U32");
    assert_error(count_zeros(&ids), "the tensor is U32");
}
