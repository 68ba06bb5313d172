//! Attention implementations compared with each other.

#[cfg(feature = "cuda")]
use std::io::{self, Write};

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    AttentionChoice, AttentionHeads, AttentionImpl, AttentionPasses, AttentionSpec, CuSeqlens, ModelAttention,
    attention,
};

use crate::attention::{AttentionCase, CAUSAL, setups};
#[cfg(feature = "cuda")]
use crate::attention::{BIDIRECTIONAL, shifted, window};
use crate::cases::{F32, assert_close_above, assert_error, check_each, norm, randn, tape};

/// Attention of a small model without a sliding window.
const MODEL: ModelAttention =
    ModelAttention { heads: AttentionHeads { n_query: 4, n_kv: 2, dim: 64 }, window: None, max_tokens: 1024 };

/// Returns the output and the gradients of q, k and v for a random upstream gradient, on the CPU in f32.
pub(crate) fn results(
    setup: &AttentionCase,
    implementation: AttentionImpl,
    device: &Device,
    dtype: DType,
) -> Vec<Tensor> {
    let put = |x: &Tensor| x.to_dtype(dtype).unwrap().to_device(device).unwrap();
    let inputs: Vec<Tensor> = setup.inputs().iter().map(put).collect();
    let choice = AttentionChoice { implementation, ..setup.spec.choice };
    let spec = AttentionSpec { choice, ..setup.spec };
    let tape = tape(&inputs, || attention(&inputs[0], &inputs[1], &inputs[2], &setup.seqs(), &spec));
    let y = tape.output().clone();
    let grads = tape.backward(&put(&randn(y.shape(), 99))).unwrap();
    // Without queries there is no gradient, which means zero.
    let grad = |x: &Tensor| grads.get(x).cloned().unwrap_or_else(|| x.zeros_like().unwrap());
    let all = std::iter::once(y).chain(inputs.iter().map(grad));
    all.map(|x| x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap()).collect()
}

#[track_caller]
pub(crate) fn compare(setup: &AttentionCase, got: &[Tensor], want: &[Tensor], bound: f64) {
    let floor = 0.1 * norm(&want[0]);
    for (what, (got, want)) in ["y", "dq", "dk", "dv"].iter().zip(got.iter().zip(want)) {
        assert_close_above(&format!("{what} of {setup:?}"), got, want, bound, floor);
    }
}

#[test]
fn the_reference_equals_the_fused_kernel() {
    check_each(setups(), |setup| {
        let of = |implementation| results(&setup, implementation, &Device::Cpu, DType::F32);
        compare(&setup, &of(AttentionImpl::Reference), &of(AttentionImpl::Fused), 10.0 * F32);
    });
}

#[test]
fn the_reference_keeps_the_dtype_and_accepts_empty_sequences() {
    let setup = AttentionCase::packed(&[0, 0], (2, 1, 4), CAUSAL);
    assert_eq!(results(&setup, AttentionImpl::Reference, &Device::Cpu, DType::F32)[0].dims(), [0, 2, 4]);
    let q = randn((5, 2, 4), 1).to_dtype(DType::BF16).unwrap();
    let choice = AttentionChoice { implementation: AttentionImpl::Reference, deterministic: true };
    let y =
        attention(&q, &q, &q, &CuSeqlens::packed(vec![0, 5]).unwrap(), &AttentionSpec { choice, ..CAUSAL }).unwrap();
    assert_eq!(y.dtype(), DType::BF16);
}

#[test]
fn on_the_cpu_auto_is_fused_and_what_gpus_have_an_error_that_says_what_to_do() {
    let setup = AttentionCase::packed(&[70, 3], (4, 2, 8), CAUSAL);
    let of = |implementation| results(&setup, implementation, &Device::Cpu, DType::F32);
    compare(&setup, &of(AttentionImpl::Auto), &of(AttentionImpl::Fused), 0.0);

    let explain = |implementation| {
        let choice = AttentionChoice { implementation, deterministic: false };
        choice.explain(&Device::Cpu, DType::BF16, MODEL, AttentionPasses::Forward)
    };
    assert_eq!(explain(AttentionImpl::Auto).unwrap(), None);
    assert_eq!(explain(AttentionImpl::Fused).unwrap(), None);
    assert!(explain(AttentionImpl::Reference).unwrap().unwrap().contains("reference"));
    assert_error(explain(AttentionImpl::Cudnn), "it computes on GPUs only, and this is the CPU; choose `fused`");
    assert_error(explain(AttentionImpl::Flash), "flash is requested but unusable: it computes on GPUs only");
}

/// Declares `cases`, which returns all of these setups, and in `cudnn_equals_the_reference` a test of each. A setup
/// that fails, or breaks the device, does not affect the others.
#[cfg(feature = "cuda")]
macro_rules! cases {
    ($($name:ident: $setup:expr,)*) => {
        /// Returns setups that the 16-bit kernels of other libraries support.
        #[cfg(feature = "flash-attn")]
        fn cases() -> Vec<AttentionCase> {
            vec![$($setup),*]
        }

        /// Compares cuDNN with the reference, on a GPU.
        mod cudnn_equals_the_reference {
            use super::*;

            $(#[test]
            fn $name() {
                cudnn::check(&$setup);
            })*
        }
    };
}

#[cfg(feature = "cuda")]
cases! {
    causal_dim_64: ragged(64, CAUSAL),
    causal_dim_96: ragged(96, CAUSAL),
    causal_dim_128: ragged(128, CAUSAL),
    bidirectional: ragged(64, BIDIRECTIONAL),
    window_of_1: ragged(64, window(1)),
    window_of_130: ragged(64, window(130)),
    bidirectional_window: ragged(64, AttentionSpec { window: Some(20), ..BIDIRECTIONAL }),
    one_token: AttentionCase::packed(&[1], (1, 1, 64), CAUSAL),
    sequences_of_one_token: AttentionCase::packed(&[1; 5], (4, 2, 64), CAUSAL),
    empty_sequences_at_both_ends: AttentionCase::packed(&[0, 0, 40, 0, 9, 0], (4, 2, 64), CAUSAL),
    one_token_beside_others: AttentionCase::packed(&[1, 2, 1, 1, 9], (4, 2, 64), CAUSAL),
    thousands_of_tokens: AttentionCase::packed(&[1100, 900], (2, 2, 128), CAUSAL),
    many_short_sequences: AttentionCase::packed(&[3; 70], (2, 1, 64), CAUSAL),
    remembered_keys: cached(CAUSAL),
    remembered_keys_window: cached(window(9)),
    remembered_keys_bidirectional: cached(BIDIRECTIONAL),
}

#[cfg(feature = "cuda")]
fn ragged(dim: usize, spec: AttentionSpec) -> AttentionCase {
    let spec = AttentionSpec { scale: (dim as f32).powf(-0.5), ..spec };
    AttentionCase::packed(&[150, 1, 0, 37, 300], (6, 2, dim), spec)
}

#[cfg(feature = "cuda")]
fn cached(spec: AttentionSpec) -> AttentionCase {
    AttentionCase { keys: vec![140, 3, 12, 200], ..AttentionCase::packed(&[1, 3, 0, 90], (4, 2, 64), spec) }
}

/// Returns the f32 reference for inputs rounded to a dtype.
#[cfg(feature = "cuda")]
fn rounded(setup: &AttentionCase, dtype: DType) -> Vec<Tensor> {
    let round = |x: &Tensor| x.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
    let inputs: Vec<Tensor> = setup.inputs().iter().map(round).collect();
    let choice = AttentionChoice { implementation: AttentionImpl::Reference, deterministic: false };
    let spec = AttentionSpec { choice, ..setup.spec };
    let tape = tape(&inputs, || attention(&inputs[0], &inputs[1], &inputs[2], &setup.seqs(), &spec));
    let y = tape.output().clone();
    let grads = tape.backward(&round(&randn(y.shape(), 99))).unwrap();
    std::iter::once(y).chain(inputs.iter().map(|x| grads.get(x).unwrap().clone())).collect()
}

/// Tests on a GPU where cuDNN supports a usual case. With `CANDLEWICK_WANT_CUDNN` set, it must.
#[cfg(feature = "cuda")]
mod cudnn {
    use super::*;
    use crate::cases::bits;

    fn device() -> Option<Device> {
        let device = crate::cases::TestDevice::all().last().expect("a test_device").device();
        let choice = AttentionChoice { implementation: AttentionImpl::Cudnn, deterministic: false };
        match choice.explain(&device, DType::BF16, MODEL, AttentionPasses::Both) {
            Ok(said) => {
                println!("{}", said.unwrap_or_default());
                Some(device)
            }
            Err(why) => {
                assert!(std::env::var_os("CANDLEWICK_WANT_CUDNN").is_none(), "no cuDNN: {why}");
                let _ = writeln!(io::stderr(), "skipped: {why}");
                None
            }
        }
    }

    /// Checks cuDNN, which also rounds the probabilities and their gradients before it multiplies them.
    pub(super) fn check(setup: &AttentionCase) {
        let Some(device) = device() else { return };
        check_each([(DType::BF16, 2f64.powi(-7)), (DType::F16, 2f64.powi(-10))], |(dtype, bound)| {
            let got = results(setup, AttentionImpl::Cudnn, &device, dtype);
            compare(setup, &got, &rounded(setup, dtype), bound);
        });
    }

    #[test]
    fn auto_computes_sequences_of_one_token_and_misaligned_views_by_fused() {
        let Some(device) = device() else { return };
        let setup = AttentionCase::packed(&[1; 5], (4, 2, 64), CAUSAL);
        let of = |setup: &AttentionCase, implementation| results(setup, implementation, &device, DType::BF16);
        compare(&setup, &of(&setup, AttentionImpl::Auto), &of(&setup, AttentionImpl::Fused), 0.0);

        let setup = AttentionCase::packed(&[70, 3], (4, 2, 64), CAUSAL);
        let run = |implementation, views: bool| {
            let put = |x: &Tensor| x.to_dtype(DType::BF16).unwrap().to_device(&device).unwrap();
            let inputs: Vec<Tensor> = setup.inputs().iter().map(put).collect();
            let inputs: Vec<Tensor> = if views { inputs.iter().map(shifted).collect() } else { inputs };
            let choice = AttentionChoice { implementation, deterministic: false };
            let spec = AttentionSpec { choice, ..setup.spec };
            attention(&inputs[0], &inputs[1], &inputs[2], &setup.seqs(), &spec).unwrap()
        };
        assert_eq!(bits(&run(AttentionImpl::Auto, true)), bits(&run(AttentionImpl::Fused, false)));
        // Under `cudnn`, cuDNN gets aligned copies.
        assert_eq!(bits(&run(AttentionImpl::Cudnn, true)), bits(&run(AttentionImpl::Cudnn, false)));
    }

    #[test]
    fn deterministic_it_gives_the_same_bits_twice() {
        let Some(device) = device() else { return };
        let choice = AttentionChoice { deterministic: true, ..CAUSAL.choice };
        let setup = AttentionCase::packed(&[700, 20], (6, 2, 64), AttentionSpec { choice, ..CAUSAL });
        let run = || results(&setup, AttentionImpl::Cudnn, &device, DType::BF16);
        let (first, second) = (run(), run());
        first.iter().zip(&second).for_each(|(a, b)| assert_eq!(bits(a), bits(b)));
    }

    #[test]
    fn unsupported_calls_are_refused_and_auto_uses_another_implementation() {
        let Some(device) = device() else { return };
        let explain = |implementation, dtype| {
            let choice = AttentionChoice { implementation, deterministic: false };
            choice.explain(&device, dtype, MODEL, AttentionPasses::Both)
        };
        assert_error(explain(AttentionImpl::Cudnn, DType::F32), "bf16 and f16, not F32");
        assert!(explain(AttentionImpl::Auto, DType::F32).unwrap().unwrap().contains("fused; not cuDNN"));
        let setup = AttentionCase::packed(&[70, 3], (4, 2, 64), CAUSAL);
        let of = |implementation| results(&setup, implementation, &device, DType::F32);
        compare(&setup, &of(AttentionImpl::Auto), &of(AttentionImpl::Fused), 0.0);
    }
}

/// Tests FlashAttention 2 on a GPU.
#[cfg(feature = "flash-attn")]
mod flash {
    use super::*;

    #[test]
    fn it_equals_the_reference() {
        let device = Device::new_cuda(0).expect("tests with the feature flash-attn need a GPU");
        check_each(cases(), |setup| {
            for (dtype, bound) in [(DType::BF16, 2f64.powi(-7)), (DType::F16, 2f64.powi(-10))] {
                let inputs = setup.inputs();
                let [q, k, v] = [0, 1, 2].map(|i| inputs[i].to_dtype(dtype).unwrap().to_device(&device).unwrap());
                let choice = AttentionChoice { implementation: AttentionImpl::Flash, deterministic: false };
                let y = attention(&q, &k, &v, &setup.seqs(), &AttentionSpec { choice, ..setup.spec }).unwrap();
                let y = y.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
                compare(&setup, &[y], &rounded(&setup, dtype), bound);
            }
        });
    }
}
