//! Cases that a version of cuDNN computes wrongly: windows over long sequences, low scores, empty sequences.

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{AttentionChoice, AttentionImpl, AttentionSpec, CuSeqlens, attention};

use crate::attention::{AttentionCase, CAUSAL, window};
use crate::attention_implementations::{compare, results};
use crate::cases::{TestDevice, bits, check_each, randn, tape, values};

/// Returns the implementations of a device. On a GPU, `auto` selects cuDNN where its version is right.
fn implementations(test_device: &TestDevice) -> Vec<AttentionImpl> {
    match test_device.device() {
        Device::Cpu => vec![AttentionImpl::Fused],
        _ => vec![AttentionImpl::Auto, AttentionImpl::Fused],
    }
}

/// Compares a windowed attention in bf16 with the f32 kernel of the CPU.
fn check_window(test_device: &TestDevice, n_keys: usize, width: usize) {
    let spec = AttentionSpec { scale: 0.125, ..window(width) };
    let setup = AttentionCase::packed(&[n_keys, 70], (2, 1, 64), spec);
    let exact = results(&setup, AttentionImpl::Fused, &Device::Cpu, DType::F32);
    check_each(implementations(test_device), |implementation| {
        let device = test_device.device();
        let got = test_device.run(|| results(&setup, implementation, &device, DType::BF16));
        // The inputs are rounded too.
        compare(&setup, &got, &exact, 2f64.powi(-6));
    });
}

#[test]
fn windows_over_long_sequences_are_right_in_every_implementation() {
    check_each(TestDevice::all(), |test_device| {
        check_window(&test_device, 1025, 100);
        if !test_device.device().is_cpu() {
            check_each([1025, 2048, 4096, 8192], |n_keys| check_window(&test_device, n_keys, 1000));
        }
    });
}

#[test]
fn the_cpu_kernel_of_long_windows_equals_the_reference() {
    check_each([1025, 2048], |n_keys| {
        let setup = AttentionCase::packed(&[n_keys], (1, 1, 16), window(700));
        let of = |implementation| results(&setup, implementation, &Device::Cpu, DType::F32);
        compare(&setup, &of(AttentionImpl::Fused), &of(AttentionImpl::Reference), 1e-5);
    });
}

/// Inputs whose scores are all near -100, in a dtype: queries around a, keys around -a.
fn low_scores(n_tokens: usize, dtype: DType) -> [Tensor; 3] {
    const DIM: usize = 64;
    // scale a^2 DIM = 100 with a scale of 1 / 8.
    let a = (100.0 * 8.0 / DIM as f64).sqrt();
    let around = |center: f64, seed| randn((n_tokens, 1, DIM), seed).affine(0.2, center).unwrap();
    [around(a, 1), around(-a, 2), around(0.0, 3)].map(|x| x.to_dtype(dtype).unwrap())
}

/// Returns the output and the gradients, in f32.
fn passes(inputs: &[Tensor; 3], implementation: AttentionImpl, causal: bool) -> Vec<Tensor> {
    let choice = AttentionChoice { implementation, deterministic: false };
    let spec = AttentionSpec { scale: 0.125, causal, window: None, choice };
    let seqs = CuSeqlens::packed(vec![0, inputs[0].dims()[0]]).unwrap();
    let tape = tape(inputs, || attention(&inputs[0], &inputs[1], &inputs[2], &seqs, &spec));
    let y = tape.output().clone();
    let d_y = randn(y.shape(), 99).to_dtype(y.dtype()).unwrap().to_device(y.device()).unwrap();
    let grads = tape.backward(&d_y).unwrap();
    let all = std::iter::once(&y).chain(inputs.iter().map(|x| grads.get(x).unwrap()));
    all.map(|x| x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap()).collect()
}

/// cuDNN's backward gave NaN where the log-sum-exp is below -88 and a length is 64 modulo 128.
#[test]
fn scores_near_minus_100_give_finite_and_right_gradients() {
    let setup = AttentionCase::packed(&[0], (1, 1, 64), CAUSAL);
    let lengths = [(64, false), (64, true), (192, true), (1216, true)];
    let all = lengths.iter().flat_map(|length| [DType::F32, DType::BF16].map(|dtype| (*length, dtype)));
    check_each(all, |((n_tokens, causal), dtype)| {
        let inputs = low_scores(n_tokens, dtype);
        let exact = inputs.each_ref().map(|x| x.to_dtype(DType::F32).unwrap());
        let want = passes(&exact, AttentionImpl::Reference, causal);
        // Scores of 100 have an error of 1e-5 in f32. In dq and dk the large constant of the keys and queries, which
        // cancels, multiplies the rounding of the probabilities' gradients.
        let bound = if dtype == DType::F32 { 2e-4 } else { 2f64.powi(-4) };
        check_each(TestDevice::all(), |test_device| {
            // The emulator is slow.
            if n_tokens > 200 && test_device.device().is_cpu() && !matches!(test_device, TestDevice::Cpu) {
                return;
            }
            let inputs = inputs.each_ref().map(|x| test_device.put(x));
            check_each(implementations(&test_device), |implementation| {
                let got = test_device.run(|| passes(&inputs, implementation, causal));
                assert!(got.iter().all(|x| values(x).iter().all(|value| value.is_finite())));
                compare(&setup, &got, &want, bound);
            });
        });
    });
}

#[test]
fn empty_sequences_change_no_bit_of_the_others() {
    let choice = AttentionChoice { implementation: AttentionImpl::Auto, deterministic: false };
    let with_empty = AttentionCase::packed(&[0, 0, 70, 0, 3, 0], (4, 2, 64), AttentionSpec { choice, ..CAUSAL });
    let without = AttentionCase { queries: vec![70, 3], keys: vec![70, 3], ..with_empty.clone() };
    check_each(TestDevice::all(), |test_device| {
        check_each([DType::F32, DType::BF16], |dtype| {
            let of = |setup: &AttentionCase, implementation| {
                test_device.run(|| results(setup, implementation, &test_device.device(), dtype))
            };
            check_each(implementations(&test_device), |implementation| {
                let (got, want) = (of(&with_empty, implementation), of(&without, implementation));
                // cuDNN has another graph for more sequences, and sums dq in the order in which blocks finish.
                let may_be_cudnn = implementation == AttentionImpl::Auto && dtype == DType::BF16;
                if !may_be_cudnn {
                    assert_eq!(bits(&got[0]), bits(&want[0]));
                }
                compare(&with_empty, &got, &want, if may_be_cudnn { 1e-2 } else { 0.0 });
            });
        });
    });
}
