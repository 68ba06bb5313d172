use candle_core::{DType, Device, Tensor};
use candlewick_ops::{InputJitter, biased_logits, input_jitter, random_logits};

use super::devices;
use crate::cases::{assert_error, bits, check_each, randn, tape, values};

#[test]
fn factors_are_uniform_around_one_and_scale_the_gradient() {
    check_each([DType::F32, DType::BF16, DType::F16], |dtype| {
        for test_device in devices() {
            let x = test_device.put(&randn((100, 70), 1).ones_like().unwrap().to_dtype(dtype).unwrap());
            let tokens = test_device.put(&Tensor::arange(0u32, 100, &Device::Cpu).unwrap());
            let jitter = |key| input_jitter(&x, InputJitter { eps: 0.25, key }, &tokens);
            let (y, dx, other) = test_device.run(|| {
                let tape = tape(std::slice::from_ref(&x), || jitter(5));
                let y = tape.output().clone();
                (y, tape.backward(&x).unwrap().remove(&x).unwrap(), jitter(6).unwrap())
            });
            let factors = values(&y);
            assert!(factors.iter().all(|f| (0.75..=1.25).contains(f)), "{dtype:?}");
            let mean = factors.iter().sum::<f64>() / 7000.0;
            let variance = factors.iter().map(|f| (f - mean).powi(2)).sum::<f64>() / 7000.0;
            // A uniform distribution of width w has the variance w^2 / 12.
            assert!((mean - 1.0).abs() < 0.01 && (variance - 0.25 / 12.0).abs() < 2e-3, "{mean} {variance}");
            assert_eq!(bits(&y), bits(&dx));
            assert_ne!(bits(&y), bits(&other));
        }
    });
}

#[test]
fn no_jitter_is_the_input_itself() {
    let x = randn((3, 4), 1);
    let tokens = Tensor::arange(0u32, 3, &Device::Cpu).unwrap();
    assert_eq!(input_jitter(&x, InputJitter { eps: 0.0, key: 1 }, &tokens).unwrap().id(), x.id());
    assert_error(input_jitter(&x, InputJitter { eps: 1.0, key: 1 }, &tokens), "eps must be in [0, 1), got 1");
    let error = "want x [t, d] and u32 tokens [t], got [3, 4] and U32 [2]";
    assert_error(input_jitter(&x, InputJitter { eps: 0.5, key: 1 }, &tokens.narrow(0, 0, 2).unwrap()), error);
}

#[test]
fn the_factors_of_a_token_do_not_depend_on_its_row() {
    let x = randn((5, 7), 1);
    for test_device in devices() {
        let jittered = |rows: &[u32]| {
            let tokens = test_device.put(&Tensor::new(rows, &Device::Cpu).unwrap());
            let own = test_device.put(&x.index_select(&Tensor::new(rows, &Device::Cpu).unwrap(), 0).unwrap());
            values(&test_device.run(|| input_jitter(&own, InputJitter { eps: 0.25, key: 3 }, &tokens)).unwrap())
        };
        let all = jittered(&[0, 1, 2, 3, 4]);
        assert_eq!(jittered(&[3, 1]), [&all[21..28], &all[7..14]].concat());
    }
}

/// Returns the output of `op` and the gradient of its logits.
fn results(logits: &Tensor, dy: &Tensor, op: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> [Tensor; 2] {
    let tape = tape(std::slice::from_ref(logits), || op(logits));
    let y = tape.output().clone();
    [y, tape.backward(dy).unwrap().remove(logits).unwrap()]
}

#[test]
fn random_logits_are_normal_and_pass_the_gradient() {
    for (test_device, dtype) in devices().iter().flat_map(|d| [DType::F32, DType::F64].map(|t| (d, t))) {
        let [logits, dy] = [1, 2].map(|seed| test_device.put(&randn((200, 50), seed).to_dtype(dtype).unwrap()));
        let [y, grad] = test_device.run(|| results(&logits, &dy, |logits| random_logits(logits, 7)));
        assert_eq!((bits(&grad), y.dtype()), (bits(&dy), dtype));
        let drawn = values(&y);
        let moment = |power: i32| drawn.iter().map(|x| x.powi(power)).sum::<f64>() / 1e4;
        assert!(moment(1).abs() < 0.05 && (moment(2) - 1.0).abs() < 0.05, "{} {}", moment(1), moment(2));
        assert!(moment(3).abs() < 0.15 && (moment(4) - 3.0).abs() < 0.3, "{} {}", moment(3), moment(4));
        assert!(values(&logits).iter().zip(&drawn).filter(|(a, b)| a == b).count() < 5);
    }
}

#[test]
fn biased_logits_share_a_bias_per_expert() {
    for (test_device, dtype) in devices().iter().flat_map(|d| [DType::F32, DType::F64].map(|t| (d, t))) {
        let [logits, dy] = [1, 2].map(|seed| test_device.put(&randn((20, 6), seed).to_dtype(dtype).unwrap()));
        let [y, grad] = test_device.run(|| results(&logits, &dy, |logits| biased_logits(logits, 3.0, 7)));
        assert_eq!(bits(&grad), bits(&dy));
        let moved: Vec<f64> = values(&y).iter().zip(values(&logits)).map(|(y, x)| y - x).collect();
        assert!(moved.chunks(6).all(|row| row.iter().zip(&moved).all(|(a, b)| (a - b).abs() < 1e-5)));
        assert!(moved[0] != moved[1] && moved.iter().any(|x| x.abs() > 1.0), "{:?}", &moved[..6]);
    }
}
