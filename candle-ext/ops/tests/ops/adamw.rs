use candle_core::{DType, Device, Tensor};
use candlewick_ops::{AdamW, adamw};

use crate::cases::{F32, Place, assert_close, assert_error, bits, randn};

const HYPER: AdamW =
    AdamW { lr: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1, grad_scale: 1.0 };

fn zeros(n: usize) -> Tensor {
    Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap()
}

/// Printed by torch.optim.AdamW, torch 2.15, after three steps from these values and gradients.
#[test]
fn three_steps_equal_torch() {
    for place in Place::all() {
        place.run(|| check_three_steps(&place));
    }
}

fn check_three_steps(place: &Place) {
    let put = |values: &[f32; 4]| place.put(&Tensor::new(values, &Device::Cpu).unwrap());
    let master = put(&[1.0, -2.0, 0.5, 3.0]);
    let (mean, square) = (put(&[0.0; 4]), put(&[0.0; 4]));
    let grads = [[0.1f32, -0.2, 0.3, 0.0], [0.4, 0.1, -0.3, 1e-4], [-0.2, 0.05, 0.6, 2.0]];
    for (i, grad) in grads.iter().enumerate() {
        adamw(&AdamW { step: i + 1, ..HYPER }, &master, &put(grad), &mean, &square, None).unwrap();
    }
    let want = |values: [f64; 4]| Tensor::new(&values, &Device::Cpu).unwrap();
    let torch = want([0.875306129, -1.90417147, 0.421052277, 2.88750315]);
    assert_close("p", &master, &torch, F32);
    let torch = want([0.0241, -0.00219999999, 0.0573000051, 0.200009003]);
    assert_close("exp_avg", &mean, &torch, F32);
    let torch = want([0.0100512514, 0.00240500015, 0.0263362527, 0.200000003]);
    assert_close("exp_avg_sq", &square, &torch, F32);
}

#[test]
fn views_of_flat_buffers_equal_whole_tensors() {
    for place in Place::all() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            place.run(|| check_views(&place, dtype));
        }
    }
}

fn check_views(place: &Place, dtype: DType) {
    let n = 20_000;
    let (whole, flat) = (place.put(&randn(n, 1)), place.put(&randn(n, 1)));
    let zeros = || place.put(&zeros(n));
    let (mean, square) = (zeros(), zeros());
    let (flat_mean, flat_square) = (zeros(), zeros());
    let copy = zeros().to_dtype(dtype).unwrap();
    for step in 1..4 {
        let grad = place.put(&randn(n, 10 + step as u64));
        let hyper = AdamW { step, grad_scale: 0.3, ..HYPER };
        adamw(&hyper, &whole, &grad, &mean, &square, None).unwrap();
        for (start, len) in [(0, 9000), (9000, 1), (9001, n - 9001)] {
            let part = |x: &Tensor| x.narrow(0, start, len).unwrap();
            let (master, grad, copy) = (part(&flat), part(&grad), part(&copy));
            let moments = (part(&flat_mean), part(&flat_square));
            adamw(&hyper, &master, &grad, &moments.0, &moments.1, Some(&copy)).unwrap();
        }
    }
    assert_eq!(bits(&flat), bits(&whole));
    assert_eq!(bits(&flat_square), bits(&square));
    assert_eq!(bits(&copy), bits(&whole.to_dtype(dtype).unwrap()));
}

#[test]
fn the_gradient_is_scaled_before_use() {
    for place in Place::all() {
        let step = |grad: &Tensor, grad_scale| {
            let master = place.put(&randn(50, 1));
            let (mean, square) = (place.put(&zeros(50)), place.put(&zeros(50)));
            let hyper = AdamW { grad_scale, ..HYPER };
            place.run(|| adamw(&hyper, &master, &place.put(grad), &mean, &square, None)).unwrap();
            [bits(&master), bits(&mean), bits(&square)]
        };
        let grad = randn(50, 2);
        assert_eq!(step(&grad, 0.25), step(&(&grad * 0.25).unwrap(), 1.0));
        assert_ne!(step(&grad, 0.25), step(&grad, 1.0));
    }
}

#[test]
fn nothing_to_update_is_no_error() {
    for place in Place::all() {
        let none = || place.put(&zeros(1)).narrow(0, 0, 0).unwrap();
        place.run(|| adamw(&HYPER, &none(), &none(), &none(), &none(), None)).unwrap();
    }
}

#[test]
fn wrong_arguments_are_named() {
    let run = |hyper: &AdamW, master: &Tensor, grad: &Tensor, mean: &Tensor, copy: Option<&Tensor>| {
        adamw(hyper, master, grad, mean, &zeros(4), copy)
    };
    let (p, g, m) = (zeros(4), zeros(4), zeros(4));
    assert_error(run(&AdamW { step: 0, ..HYPER }, &p, &g, &m, None), "first step has number 1");
    assert_error(run(&HYPER, &p, &zeros(3), &m, None), "grad is F32 [3], want f32 with 4");
    let half = p.to_dtype(DType::BF16).unwrap();
    assert_error(run(&HYPER, &half, &g, &m, None), "master is BF16");
    assert_error(run(&HYPER, &p, &g, &m, Some(&zeros(5))), "compute has 5 elements, master 4");
    assert_error(run(&HYPER, &p, &g, &p, None), "master and exp_avg must be in different buffers");
}
