use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{
    AdamW, AdamWState, AdamWStep, GradPolicy, GradScaler, LossScaling, ShardPosition, StochasticRounding, adamw,
    adamw_stochastic, derive_key,
};

use crate::cases::{F32, TestDevice, assert_close, assert_error, bits, check_each, randn, values};

const HYPER: AdamW = AdamW { lr: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

/// Runs the update that the scaler has decided on.
fn update(hyper: &AdamW, scaler: &GradScaler, state: AdamWState) -> Result<()> {
    adamw(hyper, &AdamWStep::new(hyper, scaler)?, state)
}

fn update_stochastic(
    hyper: &AdamW,
    scaler: &GradScaler,
    state: AdamWState,
    rounding: &StochasticRounding,
) -> Result<()> {
    adamw_stochastic(hyper, &AdamWStep::new(hyper, scaler)?, state, rounding)
}

/// Returns a scaler that permits update `number` and multiplies gradients by 1 / `loss_scale`.
fn scaler(test_device: &TestDevice, number: usize, loss_scale: f64) -> GradScaler {
    let loss_scaling = LossScaling { initial: loss_scale, ..LossScaling::NONE };
    let policy = GradPolicy { loss_scaling, ..GradPolicy::NO_CLIP_NO_SCALE };
    let scaler = GradScaler::new(policy, number - 1, &test_device.device()).unwrap();
    judge(test_device, &scaler, 1.0);
    scaler
}

fn judge(test_device: &TestDevice, scaler: &GradScaler, square: f64) {
    let squares = test_device.put(&Tensor::new(&[square], &Device::Cpu).unwrap());
    let losses = test_device.put(&Tensor::new(&[1f32], &Device::Cpu).unwrap());
    test_device.run(|| scaler.update(&squares, &losses)).unwrap();
}

fn zeros(n: usize) -> Tensor {
    Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap()
}

/// Expected values from torch.optim.AdamW, torch 2.15, after three steps from these values and gradients.
#[test]
fn three_steps_equal_torch() {
    check_each(TestDevice::all(), |test_device| {
        test_device.run(|| check_three_steps(&test_device));
    });
}

fn check_three_steps(test_device: &TestDevice) {
    let put = |values: &[f32; 4]| test_device.put(&Tensor::new(values, &Device::Cpu).unwrap());
    let master = put(&[1.0, -2.0, 0.5, 3.0]);
    let (mean, square) = (put(&[0.0; 4]), put(&[0.0; 4]));
    let grads = [[0.1f32, -0.2, 0.3, 0.0], [0.4, 0.1, -0.3, 1e-4], [-0.2, 0.05, 0.6, 2.0]];
    for (i, grad) in grads.iter().enumerate() {
        let (grad, scaler) = (put(grad), scaler(test_device, i + 1, 1.0));
        let state = AdamWState { master: &master, grad: &grad, exp_avg: &mean, exp_avg_sq: &square, compute: None };
        update(&HYPER, &scaler, state).unwrap();
    }
    let want = |values: [f64; 4]| Tensor::new(&values, &Device::Cpu).unwrap();
    let torch = want([0.875306129, -1.90417147, 0.421052277, 2.88750315]);
    assert_close("p", &master, &torch, F32);
    let torch = want([0.0241, -0.00219999999, 0.0573000051, 0.200009003]);
    assert_close("exp_avg", &mean, &torch, F32);
    let torch = want([0.0100512514, 0.00240500015, 0.0263362527, 0.200000003]);
    assert_close("exp_avg_sq", &square, &torch, F32);
}

/// With an unchanging gradient, the first moments divided by their corrections are the gradient and its square: every update
/// is of length lr. Skipped steps do not count.
#[test]
fn bias_corrections_count_updates_and_not_steps() {
    let hyper = AdamW { weight_decay: 0.0, ..HYPER };
    check_each(TestDevice::all(), |test_device| {
        let ones = || test_device.put(&(zeros(3) + 1.0).unwrap());
        let (master, grad) = (ones(), ones());
        let (mean, square) = (test_device.put(&zeros(3)), test_device.put(&zeros(3)));
        let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &test_device.device()).unwrap();
        for norm in [1.0, f64::INFINITY, 1.0, f64::NAN, 1.0] {
            judge(&test_device, &scaler, norm);
            let state = AdamWState { master: &master, grad: &grad, exp_avg: &mean, exp_avg_sq: &square, compute: None };
            test_device.run(|| update(&hyper, &scaler, state)).unwrap();
        }
        for value in values(&master) {
            assert!((value - (1.0 - 3.0 * HYPER.lr)).abs() < 1e-6, "{value}, {test_device:?}");
        }
    });
}

#[test]
fn views_of_flat_buffers_equal_whole_tensors() {
    check_each(TestDevice::all(), |test_device| {
        for (copy, moments) in [
            (DType::F32, DType::F32),
            (DType::BF16, DType::F32),
            (DType::F16, DType::F32),
            (DType::BF16, DType::BF16),
            (DType::F16, DType::BF16),
        ] {
            test_device.run(|| check_views(&test_device, copy, moments));
        }
    });
}

fn check_views(test_device: &TestDevice, dtype: DType, moments: DType) {
    let n = 20_000;
    let (whole, flat) = (test_device.put(&randn(n, 1)), test_device.put(&randn(n, 1)));
    let moment = || test_device.put(&zeros(n).to_dtype(moments).unwrap());
    let (mean, square) = (moment(), moment());
    let (flat_mean, flat_square) = (moment(), moment());
    let copy = test_device.put(&zeros(n).to_dtype(dtype).unwrap());
    for number in 1..4 {
        let grad = test_device.put(&randn(n, 10 + number as u64));
        let scaler = scaler(test_device, number, 4.0);
        let state = AdamWState { master: &whole, grad: &grad, exp_avg: &mean, exp_avg_sq: &square, compute: None };
        update(&HYPER, &scaler, state).unwrap();
        for (start, len) in [(0, 9000), (9000, 1), (9001, n - 9001)] {
            let part = |x: &Tensor| x.narrow(0, start, len).unwrap();
            let (master, grad, copy) = (part(&flat), part(&grad), part(&copy));
            let (mean, square) = (part(&flat_mean), part(&flat_square));
            let (exp_avg, exp_avg_sq, compute) = (&mean, &square, Some(&copy));
            let state = AdamWState { master: &master, grad: &grad, exp_avg, exp_avg_sq, compute };
            update(&HYPER, &scaler, state).unwrap();
        }
    }
    assert_eq!(bits(&flat), bits(&whole));
    assert_eq!(bits(&flat_square), bits(&square));
    assert_eq!(bits(&copy), bits(&whole.to_dtype(dtype).unwrap()));
}

/// After 100 steps with bf16 moments the weights are within 2e-3 of those with f32 moments, TransformerEngine's tolerance
/// for its FusedAdam, and with its hyperparameters.
#[test]
fn a_hundred_steps_with_moments_in_bf16_stay_near_those_in_f32() {
    const HYPER: AdamW = AdamW { lr: 5e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let n = 5000;
    check_each(TestDevice::all(), |test_device| {
        let weights = |moments: DType| {
            let master = test_device.put(&randn(n, 1));
            let moment = || test_device.put(&zeros(n).to_dtype(moments).unwrap());
            let (mean, square) = (moment(), moment());
            for number in 1..=100 {
                let grad = test_device.put(&randn(n, 10 + number as u64));
                let scaler = scaler(&test_device, number, 1.0);
                let state =
                    AdamWState { master: &master, grad: &grad, exp_avg: &mean, exp_avg_sq: &square, compute: None };
                test_device.run(|| update(&HYPER, &scaler, state)).unwrap();
            }
            values(&master)
        };
        let (in_f32, in_bf16) = (weights(DType::F32), weights(DType::BF16));
        assert_ne!(in_f32, in_bf16);
        for (want, got) in in_f32.iter().zip(&in_bf16) {
            assert!((got - want).abs() <= 2e-3 + 2e-3 * want.abs(), "{got} instead of {want}, {test_device:?}");
        }
    });
}

/// A step with bf16 buffers equals a step with f32 buffers from the same rounded values.
#[test]
fn moments_in_bf16_are_widened_and_rounded_once() {
    check_each(TestDevice::all(), |test_device| {
        let round = |x: &Tensor| x.to_dtype(DType::BF16).unwrap();
        let rounded =
            [randn(3000, 1), randn(3000, 2), randn(3000, 3), randn(3000, 4).sqr().unwrap()].map(|x| round(&x));
        let step = |masters: DType, moments: DType| {
            let formats = [masters, masters, moments, moments];
            let put = |i: usize| test_device.put(&rounded[i].to_dtype(formats[i]).unwrap().copy().unwrap());
            let [master, grad, mean, square] = [0, 1, 2, 3].map(put);
            let scaler = scaler(&test_device, 2, 1.0);
            let state = AdamWState { master: &master, grad: &grad, exp_avg: &mean, exp_avg_sq: &square, compute: None };
            test_device.run(|| update(&HYPER, &scaler, state)).unwrap();
            [master, mean, square]
        };
        let want = step(DType::F32, DType::F32);
        for (masters, moments) in [(DType::F32, DType::BF16), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)] {
            for ((got, want), dtype) in step(masters, moments).iter().zip(&want).zip([masters, moments, moments]) {
                let want = want.to_dtype(dtype).unwrap();
                assert_eq!(bits(got), bits(&want), "{masters:?} {moments:?} {test_device:?}");
            }
        }
    });
}

const KEY: u64 = 7;

/// Returns the position of the first `n` elements of a vector.
fn vector(n: usize) -> ShardPosition {
    ShardPosition { row_len: n, columns: 0..n, first: 0 }
}

/// Updates bf16 masters with these values once, with moments of zero, and returns them.
fn stochastic_step(
    test_device: &TestDevice,
    hyper: &AdamW,
    [p, grad]: [&Tensor; 2],
    position: ShardPosition,
) -> Vec<f32> {
    let put = |x: &Tensor| test_device.put(&x.to_dtype(DType::BF16).unwrap().copy().unwrap());
    let zero = || test_device.put(&zeros(p.elem_count()));
    let (master, grad, mean, square) = (put(p), put(grad), zero(), zero());
    let state = AdamWState { master: &master, grad: &grad, exp_avg: &mean, exp_avg_sq: &square, compute: None };
    let (scaler, rounding) = (scaler(test_device, 1, 1.0), StochasticRounding { key: KEY, position });
    test_device.run(|| update_stochastic(hyper, &scaler, state, &rounding)).unwrap();
    values(&master).into_iter().map(|x| x as f32).collect()
}

/// A number of 16 random bits decides: below the fraction of the distance to the next number of bf16, the magnitude is
/// rounded up, as torchao's `_fp32_to_bf16_sr` does.
#[test]
fn a_master_is_rounded_up_as_often_as_its_distance_to_the_next_number() {
    check_each(TestDevice::all(), |test_device| {
        for moments in [DType::F32, DType::BF16] {
            let n = 5000;
            let rounded = |seed| randn(n, seed).to_dtype(DType::BF16).unwrap();
            let (start, grad, scaler) = (rounded(1), rounded(2), scaler(&test_device, 1, 1.0));
            let step = |masters: DType, rounding: Option<StochasticRounding>| {
                let put = |x: &Tensor| test_device.put(&x.to_dtype(masters).unwrap().copy().unwrap());
                let moment = || test_device.put(&zeros(n).to_dtype(moments).unwrap());
                let (master, grad, mean, square) = (put(&start), put(&grad), moment(), moment());
                let state =
                    AdamWState { master: &master, grad: &grad, exp_avg: &mean, exp_avg_sq: &square, compute: None };
                let run = || match &rounding {
                    None => update(&HYPER, &scaler, state),
                    Some(rounding) => update_stochastic(&HYPER, &scaler, state, rounding),
                };
                test_device.run(run).unwrap();
                (values(&master), bits(&mean), bits(&square))
            };
            let exact = step(DType::F32, None);
            let got = step(DType::BF16, Some(StochasticRounding { key: KEY, position: vector(n) }));
            for (i, (exact, got)) in exact.0.iter().zip(&got.0).enumerate() {
                let (bits, random) = ((*exact as f32).to_bits(), derive_key(KEY, i as u64) as u32 >> 16);
                let goes_up = 0xffff - random < bits & 0xffff;
                let want = f32::from_bits((bits & 0xffff_0000) + if goes_up { 0x1_0000 } else { 0 });
                assert_eq!(*got as f32, want, "element {i}, {exact}, {test_device:?}");
            }
            assert_eq!([exact.1, exact.2], [got.1, got.2]);
        }
    });
}

#[test]
fn updates_below_half_a_step_of_bf16_move_the_mean() {
    let (n, lr) = (40_000, 1e-3);
    let hyper = AdamW { lr, weight_decay: 0.0, ..HYPER };
    let ones = (zeros(n) + 1.0).unwrap();
    check_each(TestDevice::all(), |test_device| {
        // The step of bf16 below 1 is 2^-8. AdamW's first update is lr.
        let below = 1.0 - 2f32.powi(-8);
        let got = stochastic_step(&test_device, &hyper, [&ones, &ones], vector(n));
        assert!(got.iter().all(|x| *x == 1.0 || *x == below));
        let mean = got.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
        let share = lr * 256.0;
        let deviation = (share * (1.0 - share) / n as f64).sqrt() / 256.0;
        assert!((mean - (1.0 - lr)).abs() < 5.0 * deviation, "mean {mean}, {test_device:?}");
        let nearest = {
            let put = || test_device.put(&ones.to_dtype(DType::BF16).unwrap().copy().unwrap());
            let (master, grad) = (put(), put());
            let (mean, square) = (test_device.put(&zeros(n)), test_device.put(&zeros(n)));
            let state = AdamWState { master: &master, grad: &grad, exp_avg: &mean, exp_avg_sq: &square, compute: None };
            test_device.run(|| update(&hyper, &scaler(&test_device, 1, 1.0), state)).unwrap();
            values(&master)
        };
        assert!(nearest.iter().all(|x| *x == 1.0), "{test_device:?}");
    });
}

#[test]
fn stochastic_rounding_keeps_what_bf16_represents() {
    let n = 3000;
    let hyper = AdamW { lr: 0.0, ..HYPER };
    let special = Tensor::new(&[0f32, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX], &Device::Cpu).unwrap();
    let p = Tensor::cat(&[&special, &randn(n - 5, 1)], 0).unwrap().to_dtype(DType::BF16).unwrap();
    check_each(TestDevice::all(), |test_device| {
        let got = stochastic_step(&test_device, &hyper, [&p, &randn(n, 2)], vector(n));
        assert_eq!(got, p.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap(), "{test_device:?}");
        let nan = (zeros(4) * f64::NAN).unwrap();
        assert!(stochastic_step(&test_device, &hyper, [&nan, &zeros(4)], vector(4)).iter().all(|x| x.is_nan()));
    });
}

#[test]
fn a_shard_is_rounded_as_the_whole_parameter() {
    let (n_rows, row_len) = (40, 37);
    let n = n_rows * row_len;
    let (p, grad) = (randn(n, 1), randn(n, 2));
    check_each(TestDevice::all(), |test_device| {
        let whole = stochastic_step(&test_device, &HYPER, [&p, &grad], vector(n));
        for (columns, first, len) in
            [(0..37, 0, n), (0..37, 100, 1001), (5..18, 0, 40 * 13), (5..18, 20, 64), (36..37, 3, 1)]
        {
            let width = columns.len();
            let index = |i: usize| (first + i) / width * row_len + columns.start + (first + i) % width;
            let indices = Tensor::from_iter((0..len).map(|i| index(i) as u32), &Device::Cpu).unwrap();
            let part = |x: &Tensor| x.index_select(&indices, 0).unwrap();
            let position = ShardPosition { row_len, columns: columns.clone(), first };
            let got = stochastic_step(&test_device, &HYPER, [&part(&p), &part(&grad)], position);
            let want: Vec<f32> = (0..len).map(|i| whole[index(i)]).collect();
            assert_eq!(got, want, "columns {columns:?} from {first}, {test_device:?}");
        }
    });
}

#[test]
fn the_gradient_is_scaled_before_use_and_a_refused_step_changes_nothing() {
    check_each(TestDevice::all(), |test_device| {
        let step = |grad: &Tensor, scaler: &GradScaler| {
            let [grad, master] = [grad, &randn(50, 1)].map(|x| test_device.put(x));
            let (mean, square) = (test_device.put(&zeros(50)), test_device.put(&zeros(50)));
            let state = AdamWState { master: &master, grad: &grad, exp_avg: &mean, exp_avg_sq: &square, compute: None };
            test_device.run(|| update(&HYPER, scaler, state)).unwrap();
            [bits(&master), bits(&mean), bits(&square)]
        };
        let (grad, plain) = (randn(50, 2), scaler(&test_device, 1, 1.0));
        let quarter = step(&grad, &scaler(&test_device, 1, 4.0));
        assert_eq!(quarter, step(&(&grad * 0.25).unwrap(), &plain));
        assert_ne!(quarter, step(&grad, &plain));
        judge(&test_device, &plain, f64::NAN);
        assert_eq!(step(&grad, &plain), [bits(&randn(50, 1)), bits(&zeros(50)), bits(&zeros(50))]);
    });
}

#[test]
fn nothing_to_update_is_no_error() {
    check_each(TestDevice::all(), |test_device| {
        let none = || test_device.put(&zeros(1)).narrow(0, 0, 0).unwrap();
        let (master, grad, mean, square) = (none(), none(), none(), none());
        let state = AdamWState { master: &master, grad: &grad, exp_avg: &mean, exp_avg_sq: &square, compute: None };
        let scaler = scaler(&test_device, 1, 1.0);
        test_device.run(|| update(&HYPER, &scaler, state)).unwrap();
    });
}

#[test]
fn wrong_arguments_are_named() {
    let scaler = scaler(&TestDevice::Cpu, 1, 1.0);
    let square = zeros(4);
    let run = |master: &Tensor, grad: &Tensor, mean: &Tensor, compute: Option<&Tensor>| {
        update(&HYPER, &scaler, AdamWState { master, grad, exp_avg: mean, exp_avg_sq: &square, compute })
    };
    let (p, g, m) = (zeros(4), zeros(4), zeros(4));
    assert_error(run(&p, &zeros(3), &m, None), "grad has 3 elements, master 4");
    let half = p.to_dtype(DType::BF16).unwrap();
    assert_error(run(&half, &g, &m, None), "master is BF16 and grad F32");
    assert_error(run(&half, &half.copy().unwrap(), &m, Some(&zeros(4))), "is its own compute copy");
    assert_error(run(&p, &g, &half, None), "exp_avg is BF16 and exp_avg_sq F32");
    assert_error(run(&p, &g, &m, Some(&zeros(5))), "compute has 5 elements, master 4");
    assert_error(run(&p, &g, &p, None), "master and exp_avg must be in different buffers");
    let state = AdamWState { master: &p, grad: &g, exp_avg: &m, exp_avg_sq: &square, compute: None };
    let step = AdamWStep::new(&AdamW { beta1: 0.5, ..HYPER }, &scaler).unwrap();
    assert_error(adamw(&HYPER, &step, state), "bias corrections are of betas [0.5, 0.95]");
    let stochastic = |master: &Tensor, grad: &Tensor, columns| {
        let state = AdamWState { master, grad, exp_avg: &m, exp_avg_sq: &square, compute: None };
        let position = ShardPosition { row_len: 4, columns, first: 0 };
        update_stochastic(&HYPER, &scaler, state, &StochasticRounding { key: 1, position })
    };
    assert_error(stochastic(&p, &g, 0..4), "stochastic rounding is for a master in BF16, got F32");
    assert_error(stochastic(&half, &half.copy().unwrap(), 3..5), "want columns of a row of 4 elements, got 3..5");
}
