//! Kernels that quantize activations where they are computed, and the choice between kernels. All have the same bits.
//!
//! t tokens, d hidden size, f MLP intermediate size

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    Fp8Config, Fp8Format, Fp8Formats, Fp8Kernels, Fp8Layers, Fp8Module, Fp8Recipe, Fp8Rounding, NormCall, OutputDtype,
    ScaleBlock, Weight, add_rms_norm, fp8_normed_linears, fp8_normed_swiglu_mlp, fp8_quantize_current, fp8_swiglu_mlp,
    linear, rms_norm, swiglu,
};

use crate::cases::{TestDevice, bits, grad_of, identity_exchange, randn, tape, trainable};
use crate::fp8::{DELAYED, config, config_in, rule};

const NAMES: [&str; 3] = ["gate", "up", "down"];

/// Weights of gate and up [f, d] and down [d, f], of which some are trained.
struct Mlp {
    recipe: Fp8Recipe,
    layers: Arc<Fp8Layers>,
    weights: [Weight; 3],
}

impl Mlp {
    fn new(config: Fp8Config, [d, f]: [usize; 2], is_trained: [bool; 3], test_device: &TestDevice) -> Self {
        let modules = NAMES.map(Fp8Module::linear).to_vec();
        let layers = Arc::new(Fp8Layers::new(config, modules, &test_device.device()).unwrap());
        let weights = [([f, d], 1), ([f, d], 2), ([d, f], 3)].map(|([n, k], seed)| {
            let value = test_device.put(&randn((n, k), seed)).to_dtype(DType::BF16).unwrap();
            let layer = layers.layer(NAMES[seed as usize - 1]).unwrap();
            match is_trained[seed as usize - 1] {
                true => trainable(&value).with_fp8(layer),
                false => Weight::frozen(value).with_fp8(layer),
            }
        });
        Self { recipe: config.recipe, layers, weights }
    }

    /// Computes the MLP by the fused op, or by linear layers and SwiGLU.
    fn forward(&self, x: &Tensor, kernels: Fp8Kernels) -> candle_core::Result<Tensor> {
        kernels.select();
        let [gate, up, down] = &self.weights;
        if let Some(y) = fp8_swiglu_mlp(x, [gate, up, down])? {
            assert_eq!(kernels, Fp8Kernels::Fused);
            return Ok(y);
        }
        assert_ne!(kernels, Fp8Kernels::Fused, "the op must be fused here");
        let same = OutputDtype::SameAsInput;
        linear(&swiglu(&linear(x, gate, None, same)?, &linear(x, up, None, same)?)?, down, None, same)
    }

    /// Computes the MLP of a norm, which the fused op quantizes as it computes it.
    fn forward_of_norm(&self, x: &Tensor, kernels: Fp8Kernels) -> candle_core::Result<Tensor> {
        kernels.select();
        let weight = Weight::frozen(norm_weight(x));
        let norm = NormCall { x, plus: None, weight: &weight, eps: 1e-5 };
        let is_early = kernels == Fp8Kernels::Fused && !matches!(self.recipe, Fp8Recipe::Current(_));
        match fp8_normed_swiglu_mlp(norm, self.weights.each_ref())? {
            Some([stream, y]) => {
                assert!(is_early && stream.id() == x.id());
                Ok(y)
            }
            None => {
                assert!(!is_early, "the norm must not be written here");
                self.forward(&rms_norm(x, &weight, 1e-5)?, kernels)
            }
        }
    }

    /// Returns the bits of y, dx, the trained weights' gradients and the amaxes of two steps. `follows` is true if x comes from
    /// an exchange.
    fn steps(
        &self,
        [x, dy]: [&Tensor; 2],
        follows: bool,
        kernels: Fp8Kernels,
        test_device: &TestDevice,
    ) -> Vec<Vec<u64>> {
        let mut all = Vec::new();
        for step in 0..2 {
            // The first step of delayed scaling has no scales.
            let is_first = step == 0 && self.layers.amaxes().is_some();
            let kernels = if is_first { Fp8Kernels::Registers } else { kernels };
            self.weights.iter().filter_map(Weight::sink).for_each(|sink| sink.reset());
            test_device.run(|| {
                let _on = self.layers.enable(step).unwrap();
                let tape = tape(std::slice::from_ref(x), || match follows {
                    true => self.forward(&identity_exchange(x)?, kernels),
                    // The norm's output is quantized again in backward.
                    false => self.forward_of_norm(x, kernels),
                });
                all.push(bits(tape.output()));
                all.push(bits(&tape.backward(dy).unwrap().remove(x).unwrap()));
            });
            all.extend(self.weights.iter().filter(|w| w.sink().is_some()).map(|w| bits(&grad_of(w))));
            if let Some(amaxes) = self.layers.amaxes() {
                let amaxes = amaxes.copy().unwrap();
                all.push(bits(&amaxes));
                test_device.run(|| self.layers.update(&amaxes)).unwrap();
            }
        }
        all
    }
}

/// Returns a norm's weight with elements that are not 1.
fn norm_weight(x: &Tensor) -> Tensor {
    let d = x.dim(1).unwrap();
    randn(d, 9).to_dtype(x.dtype()).unwrap().to_device(x.device()).unwrap()
}

fn gpus() -> impl Iterator<Item = TestDevice> {
    TestDevice::all().into_iter().filter(|test_device| !matches!(test_device, TestDevice::Cpu))
}

fn bf16(test_device: &TestDevice, shape: (usize, usize), seed: u64) -> Tensor {
    test_device.put(&randn(shape, seed).to_dtype(DType::BF16).unwrap())
}

/// One test selects all kernels, because the selection is that of the process.
#[test]
fn all_kernels_have_the_same_bits() {
    for test_device in gpus() {
        fused_and_separate_ops_have_the_same_bits(&test_device);
        a_norm_is_quantized_where_it_is_computed(&test_device);
        a_norm_is_written_where_its_readers_need_it(&test_device);
        what_cannot_be_fused_is_not(&test_device);
        patches_and_tiles_have_the_bits_of_the_cpu(&test_device);
    }
    Fp8Kernels::default().select();
}

fn fused_and_separate_ops_have_the_same_bits(test_device: &TestDevice) {
    let stochastic = Fp8Config { gradient_rounding: Fp8Rounding::Stochastic { key: 7 }, ..config(DELAYED) };
    let blockwise = config(Fp8Recipe::Blockwise(rule(true)));
    let cases = [
        (config(DELAYED), [48, 32, 80], [true; 3], false),
        (config(DELAYED), [144, 32, 144], [true; 3], true),
        (config(DELAYED), [16, 32, 16], [false; 3], false),
        (config(DELAYED), [16, 32, 48], [true, false, true], false),
        (config(DELAYED), [32, 16, 48], [false, false, true], true),
        (stochastic, [32, 48, 80], [true; 3], false),
        (config(Fp8Recipe::Current(rule(false))), [48, 32, 80], [true; 3], false),
        (config(Fp8Recipe::Current(rule(true))), [144, 32, 144], [true, false, true], true),
        (blockwise, [48, 32, 80], [true; 3], false),
        (blockwise, [144, 32, 144], [true; 3], true),
        (blockwise, [16, 32, 16], [false, true, false], false),
        (config_in(Fp8Formats::E4m3, DELAYED), [48, 32, 80], [true; 3], false),
        (config_in(Fp8Formats::E4m3, Fp8Recipe::Current(rule(false))), [144, 32, 48], [true; 3], false),
        (config_in(Fp8Formats::E4m3, blockwise.recipe), [144, 32, 80], [true; 3], false),
    ];
    for (config, [t, d, f], is_trained, follows) in cases {
        let (x, dy) = (bf16(test_device, (t, d), 4), bf16(test_device, (t, d), 5));
        let of =
            |kernels| Mlp::new(config, [d, f], is_trained, test_device).steps([&x, &dy], follows, kernels, test_device);
        let want = of(Fp8Kernels::SharedMemory);
        assert!(want[2].iter().any(|bits| f64::from_bits(*bits) != 0.0));
        for kernels in [Fp8Kernels::Registers, Fp8Kernels::Fused] {
            for (i, (got, want)) in of(kernels).iter().zip(&want).enumerate() {
                assert!(got == want, "{config:?} {t} {d} {f} {is_trained:?} {kernels:?}: tensor {i}");
            }
        }
    }
}

/// Two layers that read one norm, with any number of tokens. Backward quantizes it where it recomputes it. Forward does so where it
/// computes it in `fp8_normed_linears`, and writes it in the separate ops.
fn a_norm_is_quantized_where_it_is_computed(test_device: &TestDevice) {
    for (recipe, [t, d]) in [DELAYED, Fp8Recipe::Current(rule(false)), Fp8Recipe::Blockwise(rule(true))]
        .into_iter()
        .flat_map(|recipe| [[1, 32], [40, 144], [144, 160], [150, 48]].map(|sizes| (recipe, sizes)))
    {
        let (x, plus, dy) = (bf16(test_device, (t, d), 1), bf16(test_device, (t, d), 2), bf16(test_device, (t, 32), 3));
        let of = |kernels: Fp8Kernels, addend: Option<&Tensor>, norm_op: NormOp| {
            kernels.select();
            let layers = crate::fp8::layers(recipe, test_device);
            let weight =
                |name, seed| trainable(&bf16(test_device, (32, d), seed)).with_fp8(layers.layer(name).unwrap());
            let (a, b) = (weight("a", 4), weight("b", 5));
            let norm = trainable(&test_device.put(&norm_weight(&x)));
            let bias = trainable(&test_device.put(&randn(32, 6).to_dtype(DType::BF16).unwrap()));
            let mut all = Vec::new();
            for step in 0..2 {
                test_device.run(|| {
                    let _on = layers.enable(step).unwrap();
                    let is_early = norm_op == NormOp::Unwritten && (step > 0 || layers.amaxes().is_none());
                    let tape = tape(&[x.clone(), plus.clone()], || {
                        let linears = [(&a, Some(&bias)), (&b, None)];
                        let call = NormCall { x: &x, plus: addend, weight: &norm, eps: 1e-5 };
                        let [stream, of_a, of_b] = match is_early {
                            true => {
                                let (stream, [of_a, of_b]) = fp8_normed_linears(call, linears)?.expect("it is fused");
                                [stream, of_a, of_b]
                            }
                            false => {
                                let (stream, y) = match addend {
                                    Some(plus) => add_rms_norm(&x, plus, &norm, 1e-5)?,
                                    None => (x.clone(), rms_norm(&x, &norm, 1e-5)?),
                                };
                                let multiply = |(w, bias)| linear(&y, w, bias, OutputDtype::SameAsInput);
                                [stream, multiply(linears[0])?, multiply(linears[1])?]
                            }
                        };
                        all.push(bits(&stream));
                        let square = trainable(&bf16(test_device, (32, d), 7));
                        let of_stream = linear(&stream, &square, None, OutputDtype::SameAsInput)?;
                        candlewick_ops::add(&of_stream, &candlewick_ops::add(&of_a, &of_b)?)
                    });
                    all.push(bits(tape.output()));
                    let mut grads = tape.backward(&dy).unwrap();
                    all.push(bits(&grads.remove(&x).unwrap()));
                    all.extend(grads.remove(&plus).as_ref().map(bits));
                });
                all.extend([&a, &b, &norm, &bias].map(|w| bits(&grad_of(w))));
                if let Some(amaxes) = layers.amaxes() {
                    let amaxes = amaxes.copy().unwrap();
                    all.push(bits(&amaxes));
                    test_device.run(|| layers.update(&amaxes)).unwrap();
                }
            }
            all
        };
        for addend in [Some(&plus), None] {
            let want = of(Fp8Kernels::SharedMemory, addend, NormOp::Written);
            let (registers, fused) = (Fp8Kernels::Registers, Fp8Kernels::Fused);
            let unwritten = (!matches!(recipe, Fp8Recipe::Current(_))).then_some((fused, NormOp::Unwritten));
            let cases = [(registers, NormOp::Written), (fused, NormOp::Written)].into_iter().chain(unwritten);
            for (kernels, norm_op) in cases {
                let got = of(kernels, addend, norm_op);
                assert_eq!(got.len(), want.len());
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert!(got == want, "{recipe:?} {t} {d} {kernels:?} {norm_op:?}: tensor {i}");
                }
            }
        }
    }
}

/// Op that computes a norm in forward.
#[derive(Clone, Copy, Debug, PartialEq)]
enum NormOp {
    /// The norm's own op, which writes its output.
    Written,
    /// The op of the layers that read it.
    Unwritten,
}

fn a_norm_is_written_where_its_readers_need_it(test_device: &TestDevice) {
    Fp8Kernels::Fused.select();
    let blockwise = Fp8Recipe::Blockwise(rule(true));
    let layers = |recipe| crate::fp8::layers(recipe, test_device);
    let is_unwritten = |layers: &Arc<Fp8Layers>, fp8_readers: usize, [x, plus]: [&Tensor; 2]| {
        let w = bf16(test_device, (32, 32), 1);
        let weight = |i: usize, name| match i < fp8_readers {
            true => trainable(&w).with_fp8(layers.layer(name).unwrap()),
            false => trainable(&w),
        };
        let (a, b) = (weight(0, "a"), weight(1, "b"));
        let norm = Weight::frozen(norm_weight(&bf16(test_device, (1, x.dim(1).unwrap()), 1)));
        let call = NormCall { x, plus: Some(plus), weight: &norm, eps: 1e-5 };
        test_device.run(|| {
            let _on = layers.enable(0).unwrap();
            fp8_normed_linears(call, [(&a, None), (&b, None)]).unwrap().is_some()
        })
    };
    let x = bf16(test_device, (7, 32), 1);
    let f32 = x.to_dtype(DType::F32).unwrap();
    assert!(is_unwritten(&layers(blockwise), 2, [&x, &x]));
    assert!(!is_unwritten(&layers(blockwise), 1, [&x, &x]), "a reader is not in FP8");
    assert!(!is_unwritten(&layers(DELAYED), 2, [&x, &x]), "the first step has no scales");
    assert!(!is_unwritten(&layers(Fp8Recipe::Current(rule(true))), 2, [&x, &x]));
    assert!(!is_unwritten(&layers(blockwise), 2, [&f32, &x]), "an f32 residual stream");
    let with_stats = layers(blockwise);
    with_stats.request_stats();
    assert!(!is_unwritten(&with_stats, 2, [&x, &x]), "statistics need the norm");
    Fp8Kernels::Registers.select();
    assert!(!is_unwritten(&layers(blockwise), 2, [&x, &x]));
    Fp8Kernels::Fused.select();
}

fn what_cannot_be_fused_is_not(test_device: &TestDevice) {
    Fp8Kernels::Fused.select();
    let is_fused = |config: Fp8Config, t: usize, dtype: DType, test_device: &TestDevice| {
        let mlp = Mlp::new(config, [32, 48], [true; 3], test_device);
        let x = bf16(test_device, (t, 32), 1).to_dtype(dtype).unwrap();
        test_device.run(|| {
            let _on = mlp.layers.enable(0).unwrap();
            fp8_swiglu_mlp(&x, mlp.weights.each_ref()).unwrap().is_some()
        })
    };
    let blockwise = config(Fp8Recipe::Blockwise(rule(true)));
    assert!(is_fused(blockwise, 16, DType::BF16, test_device));
    assert!(!is_fused(blockwise, 16, DType::BF16, &TestDevice::Cpu));
    assert!(!is_fused(blockwise, 17, DType::BF16, test_device), "padded rows have no sum");
    assert!(!is_fused(blockwise, 16, DType::F32, test_device));
    assert!(!is_fused(Fp8Config { fake_quantize: true, ..blockwise }, 16, DType::BF16, test_device));
    assert!(!is_fused(config(DELAYED), 16, DType::BF16, test_device), "the first step has no scales");
    assert!(is_fused(config(Fp8Recipe::Current(rule(true))), 16, DType::BF16, test_device));
    let mlp = Mlp::new(blockwise, [32, 48], [true; 3], test_device);
    let x = bf16(test_device, (16, 32), 1);
    let run = || test_device.run(|| fp8_swiglu_mlp(&x, mlp.weights.each_ref())).unwrap();
    assert!(run().is_none(), "FP8 is off");
    mlp.layers.request_stats();
    let _on = mlp.layers.enable(0).unwrap();
    assert!(run().is_none(), "statistics need the activation");
}

fn patches_and_tiles_have_the_bits_of_the_cpu(test_device: &TestDevice) {
    let tile = |rows, columns| ScaleBlock::Tile { rows, columns };
    for (rows, columns) in [(1, 8), (7, 136), (130, 264), (257, 128), (64, 12)] {
        let mut numbers: Vec<f32> =
            crate::cases::values(&randn((rows, columns), 5)).into_iter().map(|x| x as f32).collect();
        numbers[columns / 2] = f32::NAN;
        *numbers.last_mut().unwrap() = f32::NEG_INFINITY;
        let x = Tensor::from_vec(numbers, (rows, columns), &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        for block in [ScaleBlock::Tensor, tile(1, 128), tile(128, 1), tile(128, 128)] {
            for format in [Fp8Format::E4m3, Fp8Format::E5m2] {
                let of = |test_device: &TestDevice| {
                    let x = test_device.put(&x);
                    let run = || fp8_quantize_current(&x, block, rule(false), format, Fp8Rounding::Nearest);
                    let matrix = test_device.run(run).unwrap();
                    let codes: Vec<u8> = matrix.codes.flatten_all().unwrap().to_vec1().unwrap();
                    (codes, matrix.scale_inv.to_vec1::<f32>().unwrap())
                };
                let want = of(&TestDevice::Cpu);
                for kernels in [Fp8Kernels::SharedMemory, Fp8Kernels::Registers] {
                    kernels.select();
                    assert!(of(test_device) == want, "{rows} {columns} {block:?} {format:?} {kernels:?}");
                }
            }
        }
    }
}
