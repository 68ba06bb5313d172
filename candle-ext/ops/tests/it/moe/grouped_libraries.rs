//! `grouped_linear` by cuBLASLt and CUTLASS, where the device or its emulation has them.

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{GradSink, GroupedCall, GroupedGemmImpl, TokensPerCall, Weight, grouped_linear};

use super::devices;
use super::grouped_linear::{check_call, offsets};
use crate::cases::{TestDevice, assert_close, assert_error, bound, check_each, grad_of, randn, tape, values};

fn by(implementation: GroupedGemmImpl) -> GroupedCall {
    GroupedCall { tokens: TokensPerCall::Many, implementation }
}

/// Multiplies two groups of two rows with 8 outputs.
fn call(implementation: GroupedGemmImpl, device: &TestDevice, k: usize, dtype: DType) -> Result<Tensor> {
    let put = |x: &Tensor| device.put(&x.to_dtype(dtype).unwrap());
    let (x, w) = (put(&randn((4, k), 1)), Weight::frozen(put(&randn((16, k), 2))));
    device.run(|| grouped_linear(&x, &w, &device.put(&offsets(&[2, 2])), by(implementation)))
}

/// Returns the devices that have the library, or its emulation. With CANDLEWICK_WANT_CUTLASS, a GPU must have CUTLASS.
fn devices_with(implementation: GroupedGemmImpl) -> Vec<TestDevice> {
    let is_wanted = implementation == GroupedGemmImpl::Cutlass && std::env::var_os("CANDLEWICK_WANT_CUTLASS").is_some();
    let has = |device: &TestDevice| match (device, call(implementation, device, 8, DType::BF16)) {
        (TestDevice::Cpu, _) => false,
        (_, Err(error))
            if !is_wanted
                && ["it needs", "there is no object of the tile"]
                    .iter()
                    .any(|part| error.to_string().contains(part)) =>
        {
            eprintln!("skipped on {device:?}: {error}");
            false
        }
        _ => true,
    };
    devices().into_iter().filter(has).collect()
}

#[test]
fn by_cublas_it_equals_the_reference() {
    let on = devices_with(GroupedGemmImpl::Cublas);
    check_each(SIZES, |(sizes, n_rest, k, n)| {
        check_each([DType::BF16, DType::F16], |dtype| {
            check_call(&on, sizes, n_rest, [k, n], by(GroupedGemmImpl::Cublas), dtype);
        });
    });
}

/// Sizes of groups, rows after the last, inputs and outputs.
type Sizes = (&'static [u32], usize, usize, usize);

/// Sizes with empty groups at both ends, one row, all rows in one group, and tiles that are not full.
const SIZES: [Sizes; 5] = [
    (&[5, 3, 9], 0, 16, 24),
    (&[0, 7, 0, 1, 0], 0, 32, 8),
    (&[0, 0, 40, 0], 67, 8, 40),
    (&[1], 0, 8, 8),
    (&[70, 2, 0, 31, 1, 129], 5, 40, 72),
];

#[test]
fn by_cutlass_it_equals_the_reference() {
    let on = devices_with(GroupedGemmImpl::Cutlass);
    let several_tiles: [Sizes; 3] =
        [(&[300, 0, 1, 129, 128], 3, 264, 328), (&[0, 0, 513], 0, 128, 256), (&[1, 1, 1, 1], 60, 72, 512)];
    let n_cases = if cfg!(feature = "cuda") { 3 } else { 1 };
    check_each(SIZES.into_iter().chain(several_tiles.into_iter().take(n_cases)), |(sizes, n_rest, k, n)| {
        check_call(&on, sizes, n_rest, [k, n], by(GroupedGemmImpl::Cutlass), DType::BF16);
    });
}

#[test]
fn by_cutlass_128_skewed_groups_equal_the_reference() {
    let sizes: Vec<u32> = (0..128u32).map(|i| if i % 5 == 0 { 0 } else { 200 / (i + 1) + i % 3 }).collect();
    check_call(&devices_with(GroupedGemmImpl::Cutlass), &sizes, 7, [16, 24], by(GroupedGemmImpl::Cutlass), DType::BF16);
}

/// Output and gradients of x and of the weight, whose sink of `grad` first holds 3, then is overwritten.
fn results(device: &TestDevice, call: GroupedCall, sizes: &[u32], [k, n]: [usize; 2], grad: DType) -> Vec<Tensor> {
    let bf16 = |shape: (usize, usize), seed| device.put(&randn(shape, seed).to_dtype(DType::BF16).unwrap());
    let n_rows = sizes.iter().sum::<u32>() as usize + 9;
    let (x, w, dy) = (bf16((n_rows, k), 1), bf16((sizes.len() * n, k), 2), bf16((n_rows, n), 3));
    let stale = Tensor::full(3f32, w.shape(), &Device::Cpu).unwrap().to_dtype(grad).unwrap();
    let w = Weight::trainable(w, GradSink::new(device.put(&stale)).unwrap());
    let groups = device.put(&offsets(sizes));
    let host = |x: &Tensor| x.to_device(&Device::Cpu).unwrap();
    device.run(|| {
        let backward = || {
            let tape = tape(std::slice::from_ref(&x), || grouped_linear(&x, &w, &groups, call));
            [host(tape.output()), host(&tape.backward(&dy).unwrap().remove(&x).unwrap()), host(&grad_of(&w))]
        };
        let added = backward();
        w.sink().unwrap().reset();
        added.into_iter().chain(backward()).collect()
    })
}

/// Compares CUTLASS with our kernels on the same device, and with the CPU.
fn check_beside_fused(device: &TestDevice, sizes: &[u32], k_and_n: [usize; 2]) {
    for grad in [DType::F32, DType::BF16] {
        let got = results(device, by(GroupedGemmImpl::Cutlass), sizes, k_and_n, grad);
        for other in [device, &TestDevice::Cpu] {
            let want = results(other, by(GroupedGemmImpl::Fused), sizes, k_and_n, grad);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let what = format!("{sizes:?} {k_and_n:?} {grad:?} result {i} beside {other:?}");
                // Both round the exact result once, and a sum in bf16 main gradients once more.
                assert_close(&what, got, want, 2.0 * bound(DType::BF16));
            }
        }
        let again = results(device, by(GroupedGemmImpl::Cutlass), sizes, k_and_n, grad);
        assert!(got.iter().zip(&again).all(|(got, again)| values(got) == values(again)), "{sizes:?}: other bits");
    }
}

#[test]
fn cutlass_equals_our_kernels_and_adds_to_main_gradients() {
    let small: [Sizes; 3] = [(&[0, 33, 0], 0, 16, 40), (&[1, 0, 130], 0, 136, 24), (&[0, 0], 0, 8, 8)];
    // Sizes of a model: groups from no row to several tiles of rows, in narrow and in wide tiles.
    let of_gpu: [Sizes; 3] = [
        (&[700, 0, 1, 2300, 128, 129, 0, 842], 0, 1024, 768),
        (&[0, 0, 4096, 0], 0, 2048, 1536),
        (&[513, 900, 512, 640], 0, 768, 2048),
    ];
    let n_cases = if cfg!(feature = "cuda") { 3 } else { 0 };
    let cases: Vec<Sizes> = small.into_iter().chain(of_gpu.into_iter().take(n_cases)).collect();
    check_each(devices_with(GroupedGemmImpl::Cutlass), |device| {
        check_each(&cases, |(sizes, _, k, n)| check_beside_fused(&device, sizes, [*k, *n]));
    });
}

#[test]
fn cutlass_of_128_groups_equals_our_kernels() {
    let sizes: Vec<u32> = (0..128u32).map(|i| if i % 7 == 3 { 0 } else { 300 / (i + 1) }).collect();
    let k_and_n = if cfg!(feature = "cuda") { [256, 384] } else { [8, 16] };
    check_each(devices_with(GroupedGemmImpl::Cutlass), |device| check_beside_fused(&device, &sizes, k_and_n));
}

#[test]
fn auto_computes_unmeasured_cases_by_our_kernels() {
    for device in devices() {
        for (k, dtype) in [(16, DType::BF16), (12, DType::F32)] {
            let [auto, fused] =
                [GroupedGemmImpl::Auto, GroupedGemmImpl::Fused].map(|of| values(&call(of, &device, k, dtype).unwrap()));
            assert_eq!(auto, fused, "{device:?} {dtype:?}");
        }
    }
}

#[test]
fn what_a_library_does_not_support_is_named() {
    let names = [(GroupedGemmImpl::Cublas, "bf16 or f16"), (GroupedGemmImpl::Cutlass, "bf16")];
    check_each(names, |(implementation, dtypes)| {
        for device in devices() {
            let error = |k: usize, dtype: DType| call(implementation, &device, k, dtype);
            if matches!(device, TestDevice::Cpu) {
                assert_error(
                    error(8, DType::BF16),
                    "the tensors are on the CPU; choose `experts_implementation: fused`",
                );
            } else if !devices_with(implementation).is_empty() {
                assert_error(error(12, DType::BF16), "multiples of 8, not 12 and 8");
                assert_error(error(8, DType::F32), &format!("must be {dtypes}, not F32"));
            }
        }
    });
}

#[test]
fn a_cpu_has_no_cutlass() {
    let explain = |of: GroupedGemmImpl| of.explain(&Device::Cpu, DType::BF16, [16, 8]);
    assert_eq!(explain(GroupedGemmImpl::Auto).unwrap(), None);
    assert_eq!(explain(GroupedGemmImpl::Fused).unwrap(), None);
    assert_error(explain(GroupedGemmImpl::Cutlass), "CUTLASS is requested but unusable: it computes on GPUs only");
}
