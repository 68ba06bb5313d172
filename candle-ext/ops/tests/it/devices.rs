//! Devices compared with each other, for every op at small sizes: each gives the CPU's results, and the same bits in
//! every run.
//!
//! `scripts/gpu-check` also runs these tests under compute-sanitizer.

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    AdamW, AdamWState, AdamWStep, CrossEntropy, Dropout, GradPolicy, GradScaler, LossGrad, Reduction, adamw, copy_into,
    dropout, linear_cross_entropy, sum_of_squares, zero_,
};

use crate::cases::{TestDevice, assert_close, bits, bound, check_each, grad_of, randn, trainable};
use crate::invariants::{self, RepeatedOp};

const FORMATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Returns the results of each op for inputs of this dtype, copied to the CPU.
fn results(test_device: &TestDevice, dtype: DType) -> Vec<(String, Tensor)> {
    let put = |x: &Tensor| test_device.put(&x.to_dtype(dtype).unwrap());
    let mut all = Vec::new();
    let mut add = |name: &str, results: Vec<Tensor>| {
        let host = |x: &Tensor| x.to_device(&Device::Cpu).unwrap();
        all.extend(results.iter().enumerate().map(|(i, x)| (format!("{name} {i} {dtype:?} {test_device:?}"), host(x))));
    };
    test_device.run(|| {
        for op in invariants::ops() {
            let here = |all: &[Tensor]| all.iter().map(put).collect();
            add(op.name, invariants::run(&RepeatedOp { inputs: here(&op.inputs), weights: here(&op.weights), ..op }));
        }
        add("dropout", vec![dropout(&put(&randn((37, 129), 1)), Dropout { p: 0.3, key: 5 }).unwrap()]);
        add("linear_cross_entropy", head(put));
        add("adamw", updated(test_device, dtype));
        let x = put(&randn(20_001, 3));
        add("sum_of_squares", vec![sum_of_squares(&x).unwrap()]);
        let copy = test_device.put(&randn(20_001, 4));
        copy_into(&copy, &x).unwrap();
        zero_(&x.narrow(0, 5, 9_000).unwrap()).unwrap();
        add("copy_into and zero_", vec![copy, x]);
    });
    all
}

/// Returns the loss and both gradients.
fn head(put: impl Fn(&Tensor) -> Tensor) -> Vec<Tensor> {
    let (x, w) = (put(&randn((150, 40), 1)), trainable(&put(&randn((301, 40), 2))));
    let targets: Vec<i64> = (0..150).map(|i| if i % 5 == 0 { -100 } else { i * 2 }).collect();
    let targets = Tensor::new(targets, &Device::Cpu).unwrap();
    let spec = CrossEntropy { reduction: Reduction::Mean, ignore_index: -100, label_smoothing: 0.0, chunk: 64 };
    let out = linear_cross_entropy(&x, &w, &targets, &spec, LossGrad::Scalar(1.0)).unwrap();
    vec![out.loss, out.dx.unwrap(), grad_of(&w)]
}

/// Returns a parameter, its moments and its compute copy after two steps.
fn updated(test_device: &TestDevice, dtype: DType) -> Vec<Tensor> {
    let [p, m, v, copy] = [1, 2, 3, 4].map(|seed| test_device.put(&randn(9_001, seed).abs().unwrap()));
    let copy = copy.to_dtype(dtype).unwrap();
    let hyper = AdamW { lr: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let scaler =
        GradScaler::new(GradPolicy { max_norm: Some(50.0), ..GradPolicy::NO_CLIP_NO_SCALE }, 0, &test_device.device())
            .unwrap();
    let losses = test_device.put(&randn(3, 5));
    for step in 1..3 {
        let grad = test_device.put(&randn(9_001, 10 + step));
        let squares = sum_of_squares(&grad).unwrap().reshape(1).unwrap();
        scaler.update(&squares, &losses).unwrap();
        // An f32 master has no f32 compute copy.
        let compute = (dtype != DType::F32).then_some(&copy);
        let state = AdamWState { master: &p, grad: &grad, exp_avg: &m, exp_avg_sq: &v, compute };
        adamw(&hyper, &AdamWStep::new(&hyper, &scaler).unwrap(), state).unwrap();
    }
    vec![p, m, v, copy, scaler.state().clone()]
}

#[test]
fn every_op_gives_the_same_bits_twice() {
    check_each(TestDevice::all(), |test_device| {
        for dtype in FORMATS {
            check_each(
                results(&test_device, dtype).iter().zip(results(&test_device, dtype)),
                |((what, once), (_, again))| {
                    assert!(bits(once) == bits(&again), "{what}: another run gives other bits");
                },
            );
        }
    });
}

#[test]
fn every_op_gives_what_it_gives_on_the_cpu() {
    check_each(FORMATS, |dtype| {
        let of_cpu = results(&TestDevice::Cpu, dtype);
        for test_device in TestDevice::all() {
            check_each(results(&test_device, dtype).iter().zip(&of_cpu), |((what, got), (_, want))| {
                assert_eq!(got.dtype(), want.dtype(), "{what}");
                assert_close(what, got, want, bound(dtype));
            });
        }
    });
}
