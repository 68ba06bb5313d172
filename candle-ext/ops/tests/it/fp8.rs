//! FP8 quantization compared with torch's (tests/reference/fp8.py), and linear layers in FP8.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    AmaxHistoryPolicy, Contraction, DelayedScaling, FP8_WEIGHT_FORMAT, FlatBuffer, Fp8Config, Fp8Format, Fp8Formats,
    Fp8Layers, Fp8Module, Fp8Operand, Fp8Recipe, Fp8Rounding, GradSink, OutputDtype, ScaleBlock, ScaleRule, Weight,
    amax, fp8_quantize, fp8_quantize_current, linear, record_exchange,
};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::cases::{TestDevice, assert_close, assert_error, bits, check_each, grad_of, randn, tape, trainable, values};

#[derive(Deserialize)]
struct Fixture {
    encodings: Encodings,
    quantized: Vec<QuantizedCase>,
    delayed: Delayed,
}

/// Bits of the first bf16 of each code.
#[derive(Deserialize)]
struct Encodings {
    e4m3: Vec<u16>,
    e5m2: Vec<u16>,
}

#[derive(Deserialize)]
struct QuantizedCase {
    rows: usize,
    columns: usize,
    seed: u64,
    dtype: String,
    format: String,
    block: Option<[usize; 2]>,
    power_of_two: bool,
    epsilon: f32,
    codes: String,
    scale_inv: String,
    first_scale_inv: Vec<f32>,
}

#[derive(Deserialize)]
struct Delayed {
    amaxes: Vec<String>,
    cases: Vec<DelayedCase>,
}

#[derive(Deserialize)]
struct DelayedCase {
    format: String,
    margin: i32,
    length: usize,
    algorithm: String,
    scales: Vec<f32>,
}

pub(crate) fn devices() -> Vec<TestDevice> {
    TestDevice::all()
}

/// Returns the devices that multiply a weight [n, k] by a recipe. cuBLASLt needs multiples of 16, tensor cores for FP8, and
/// for scales of blocks Hopper.
fn devices_for([n, k]: [usize; 2], recipe: Fp8Recipe) -> Vec<TestDevice> {
    let is_wide = n.is_multiple_of(16) && k.is_multiple_of(16);
    let multiplies = |test_device: &TestDevice| match test_device {
        TestDevice::Cpu => true,
        _ => is_wide && gpu_multiplies(recipe),
    };
    devices().into_iter().filter(multiplies).collect()
}

#[cfg(feature = "cuda")]
fn gpu_multiplies(recipe: Fp8Recipe) -> bool {
    let capability = candlewick_ops::gpus().first().map_or(0, |gpu| gpu.capability);
    capability >= 89 && (!matches!(recipe, Fp8Recipe::Blockwise(_)) || capability == 90)
}

#[cfg(not(feature = "cuda"))]
fn gpu_multiplies(_: Fp8Recipe) -> bool {
    true
}

fn fixture() -> Fixture {
    serde_json::from_str(include_str!("../fixtures/fp8.json")).unwrap()
}

fn format_named(name: &str) -> Fp8Format {
    if name == "e4m3" { Fp8Format::E4m3 } else { Fp8Format::E5m2 }
}

fn scale_one(test_device: &TestDevice) -> Tensor {
    Tensor::ones(1, DType::F32, &test_device.device()).unwrap()
}

fn codes_of(matrix: &Tensor) -> Vec<u8> {
    matrix.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn all_bf16_numbers_have_the_codes_of_torch() {
    let Fixture { encodings, .. } = fixture();
    let all: Vec<half::bf16> = (0..=u16::MAX).map(half::bf16::from_bits).collect();
    let x = Tensor::from_vec(all.clone(), (256, 256), &Device::Cpu).unwrap();
    for (format, first) in [(Fp8Format::E4m3, encodings.e4m3), (Fp8Format::E5m2, encodings.e5m2)] {
        check_each(devices(), |test_device| {
            let matrix = test_device
                .run(|| fp8_quantize(&test_device.put(&x), &scale_one(&test_device), format, Fp8Rounding::Nearest))
                .unwrap();
            for (x, code) in all.iter().zip(codes_of(&matrix.codes)) {
                let (sign, magnitude) = ((x.to_bits() >> 8) as u8 & 0x80, x.to_bits() & 0x7fff);
                let want = sign | (first.partition_point(|first| *first <= magnitude) - 1) as u8;
                let want = if x.is_nan() { 0x7f } else { want };
                assert_eq!(code, want, "{format:?} {test_device:?}: {x} ({:#06x})", x.to_bits());
            }
        });
    }
}

/// Computes the inputs of `numbers` in the Python script.
fn numbers(rows: usize, columns: usize, seed: u64) -> Tensor {
    let number = |i: usize| {
        let mut z = (i as u64).wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        let mantissa = (z >> 40) as f64 - f64::from(1 << 23);
        if i / columns < 128 && i % columns < 128 { 0.0 } else { (mantissa * 2f64.powi((z & 7) as i32 - 27)) as f32 }
    };
    Tensor::from_vec((0..rows * columns).map(number).collect::<Vec<f32>>(), (rows, columns), &Device::Cpu).unwrap()
}

fn sha256(bytes: impl AsRef<[u8]>) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn codes_and_scales_are_those_of_the_reference() {
    check_each(fixture().quantized, |case| {
        let dtype = if case.dtype == "f32" { DType::F32 } else { DType::BF16 };
        let x = numbers(case.rows, case.columns, case.seed).to_dtype(dtype).unwrap();
        let block = case.block.map_or(ScaleBlock::Tensor, |[rows, columns]| ScaleBlock::Tile { rows, columns });
        let rule = ScaleRule { power_of_two: case.power_of_two, amax_epsilon: case.epsilon };
        let format = format_named(&case.format);
        for test_device in devices() {
            let x = test_device.put(&x);
            let matrix =
                test_device.run(|| fp8_quantize_current(&x, block, rule, format, Fp8Rounding::Nearest)).unwrap();
            let scale_inv: Vec<f32> = matrix.scale_inv.to_vec1().unwrap();
            let n_first = case.first_scale_inv.len();
            let what =
                format!("{}x{} {dtype:?} {format:?} {block:?} {rule:?} {test_device:?}", case.rows, case.columns);
            assert_eq!(scale_inv[..n_first], case.first_scale_inv, "{what}");
            let scale_bytes: Vec<u8> = scale_inv.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            assert_eq!(sha256(scale_bytes), case.scale_inv, "inverse scales of {what}");
            assert_eq!(sha256(codes_of(&matrix.codes)), case.codes, "codes of {what}");
        }
    });
}

#[test]
fn delayed_scales_are_those_of_the_reference() {
    let Delayed { amaxes, cases } = fixture().delayed;
    check_each(cases, |case| {
        let amax_compute = if case.algorithm == "max" { AmaxHistoryPolicy::Max } else { AmaxHistoryPolicy::MostRecent };
        let scaling = DelayedScaling { margin: case.margin, amax_history_len: case.length, amax_compute };
        // Slot 0, the input, is E4M3 and slot 2, the gradient, E5M2.
        let slot = if case.format == "e4m3" { 0 } else { 2 };
        for test_device in devices() {
            let config = config(Fp8Recipe::Delayed(scaling));
            let layers = Fp8Layers::new(config, vec![Fp8Module::linear("m")], &test_device.device()).unwrap();
            let mut scales = Vec::new();
            for amax in &amaxes {
                let amax: f32 = amax.parse().unwrap();
                let step = Tensor::new(&[amax; 3], &test_device.device()).unwrap();
                test_device.run(|| layers.update(&step)).unwrap();
                scales.push(layers.states().unwrap()[0].scales.to_vec1::<f32>().unwrap()[slot]);
            }
            assert_eq!(scales, case.scales, "{} margin {} length {}", case.format, case.margin, case.length);
            let history = layers.states().unwrap()[0].amax_history.get(slot).unwrap().to_vec1::<f32>().unwrap();
            let counted = amaxes.iter().rev().map(|amax| amax.parse::<f32>().unwrap());
            let counted = counted.filter(|amax| *amax != 0.0 && amax.is_finite()).chain(std::iter::repeat(0.0));
            assert_eq!(history, counted.take(case.length).collect::<Vec<_>>(), "the newest amaxes first");
        }
    });
}

#[test]
fn an_amax_is_the_largest_magnitude_without_nan() {
    let mut numbers = values(&randn(100_003, 1)).into_iter().map(|x| x as f32).collect::<Vec<_>>();
    numbers[77_777] = -9.5;
    numbers[5] = f32::NAN;
    for (dtype, want) in [(DType::F32, -9.5f32), (DType::BF16, -9.5), (DType::F16, -9.5)] {
        let x = Tensor::from_vec(numbers.clone(), (1, numbers.len()), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        check_each(devices(), |test_device| {
            let x = test_device.put(&x);
            assert_eq!(test_device.run(|| amax(&x)).unwrap().to_vec1::<f32>().unwrap(), [want.abs()]);
        });
    }
    let none = Tensor::zeros((0, 4), DType::F32, &Device::Cpu).unwrap();
    for test_device in devices() {
        let none = test_device.put(&none);
        assert_eq!(test_device.run(|| amax(&none)).unwrap().to_vec1::<f32>().unwrap(), [0.0]);
    }
}

/// The mean of many stochastic roundings is the number; the same key gives the same codes.
#[test]
fn stochastic_rounding_has_the_right_mean() {
    let n = 1 << 16;
    for (format, x) in [(Fp8Format::E4m3, 1.03f32), (Fp8Format::E4m3, 0.0007), (Fp8Format::E5m2, -5.3)] {
        let many = Tensor::full(x, (64, n / 64), &Device::Cpu).unwrap();
        check_each(devices(), |test_device| {
            let codes = |key| {
                let many = test_device.put(&many);
                let rounding = Fp8Rounding::Stochastic { key };
                test_device.run(|| fp8_quantize(&many, &scale_one(&test_device), format, rounding)).unwrap()
            };
            let matrix = codes(1);
            let values: Vec<f64> =
                codes_of(&matrix.codes).iter().map(|code| f64::from(format.values()[usize::from(*code)])).collect();
            let mean = values.iter().sum::<f64>() / n as f64;
            let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64).sqrt();
            assert!(deviation > 0.0, "both neighbours occur");
            // Five standard deviations of a mean.
            let tolerance = 5.0 * deviation / (n as f64).sqrt();
            assert!((mean - f64::from(x)).abs() < tolerance, "{format:?} {x}: mean {mean}, tolerance {tolerance}");
            assert_eq!(codes_of(&matrix.codes), codes_of(&codes(1).codes));
            assert_ne!(codes_of(&matrix.codes), codes_of(&codes(2).codes));
        });
    }
}

/// Codes and scales of odd shapes and misaligned views have the bits of the CPU, with every block and rounding.
#[test]
fn every_device_has_the_bits_of_the_cpu() {
    let tile = |rows, columns| ScaleBlock::Tile { rows, columns };
    let blocks = [ScaleBlock::Tensor, tile(1, 128), tile(128, 1), tile(128, 128)];
    let shapes = [(1, 1), (3, 200), (130, 72), (129, 131), (257, 136)];
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    check_each(shapes.into_iter().flat_map(|shape| dtypes.map(|dtype| (shape, dtype))), |((rows, columns), dtype)| {
        // A view that begins at the second row, with NaN and an infinity in a block each.
        let mut numbers: Vec<f32> = values(&randn((rows + 1, columns), 5)).into_iter().map(|x| x as f32).collect();
        numbers[columns] = f32::NAN;
        *numbers.last_mut().unwrap() = f32::NEG_INFINITY;
        let all = Tensor::from_vec(numbers, (rows + 1, columns), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        for (block, rounding) in blocks.into_iter().flat_map(|block| {
            [Fp8Rounding::Nearest, Fp8Rounding::Stochastic { key: 77 }].map(|rounding| (block, rounding))
        }) {
            for format in [Fp8Format::E4m3, Fp8Format::E5m2] {
                let of = |test_device: &TestDevice| {
                    let x = test_device.put(&all).narrow(0, 1, rows).unwrap();
                    let rule = ScaleRule { power_of_two: false, amax_epsilon: 1e-3 };
                    let matrix = test_device.run(|| fp8_quantize_current(&x, block, rule, format, rounding)).unwrap();
                    let values = test_device.run(|| matrix.dequantize()).unwrap();
                    // The sign of a NaN is not specified.
                    let values =
                        values.to_device(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    let bits: Vec<u32> = values.iter().map(|x| if x.is_nan() { 0 } else { x.to_bits() }).collect();
                    (codes_of(&matrix.codes), matrix.scale_inv.to_vec1::<f32>().unwrap(), bits)
                };
                let want = of(&TestDevice::Cpu);
                for test_device in devices() {
                    let what = format!("{rows}x{columns} {dtype:?} {block:?} {format:?} {rounding:?} {test_device:?}");
                    assert!(of(&test_device) == want, "{what}");
                }
            }
        }
    });
}

pub(crate) fn config(recipe: Fp8Recipe) -> Fp8Config {
    let formats = Fp8Formats::Hybrid;
    Fp8Config { recipe, formats, gradient_rounding: Fp8Rounding::Nearest, fake_quantize: false }
}

pub(crate) fn rule(power_of_two: bool) -> ScaleRule {
    ScaleRule { power_of_two, amax_epsilon: 0.0 }
}

pub(crate) const DELAYED: Fp8Recipe =
    Fp8Recipe::Delayed(DelayedScaling { margin: 0, amax_history_len: 16, amax_compute: AmaxHistoryPolicy::Max });

pub(crate) fn recipes() -> [Fp8Recipe; 4] {
    [DELAYED, Fp8Recipe::Current(rule(false)), Fp8Recipe::Current(rule(true)), Fp8Recipe::Blockwise(rule(true))]
}

pub(crate) fn layers(recipe: Fp8Recipe, test_device: &TestDevice) -> Arc<Fp8Layers> {
    Arc::new(
        Fp8Layers::new(config(recipe), vec![Fp8Module::linear("a"), Fp8Module::linear("b")], &test_device.device())
            .unwrap(),
    )
}

/// Quantizes and dequantizes as the recipe does in its first step, by the ops that the reference has proven.
fn rounded(recipe: Fp8Recipe, x: &Tensor, operand: Fp8Operand, contraction: Contraction) -> Tensor {
    let format = Fp8Formats::Hybrid.of(operand);
    let matrix = match recipe {
        Fp8Recipe::Delayed(_) => fp8_quantize_current(x, ScaleBlock::Tensor, rule(true), format, Fp8Rounding::Nearest),
        Fp8Recipe::Current(rule) | Fp8Recipe::Blockwise(rule) => {
            fp8_quantize_current(x, recipe.block(operand, contraction), rule, format, Fp8Rounding::Nearest)
        }
    };
    matrix.unwrap().dequantize().unwrap().to_dtype(DType::F64).unwrap()
}

/// Sums of f32 with up to 700 terms, and the rounding of inverse scales that are no powers of two.
const SUMS: f64 = 1e-6;

/// Bound of the sums on a device. Tensor cores sum FP8 matmuls with fewer bits than f32 has.
fn sums(test_device: &TestDevice) -> f64 {
    match test_device {
        #[cfg(feature = "cuda")]
        TestDevice::Cuda(_) => 2f64.powi(-8),
        _ => SUMS,
    }
}

/// Returns y, dx, dw and db of a layer with this input, weight, bias and gradient of the output.
fn step_of_linear(layers: &Arc<Fp8Layers>, [x, w, bias, dy]: [&Tensor; 4], test_device: &TestDevice) -> [Tensor; 4] {
    let w = trainable(&test_device.put(w)).with_fp8(layers.layer("a").unwrap());
    let (x, bias) = (test_device.put(x), trainable(&test_device.put(bias)));
    test_device.run(|| {
        let _on = layers.enable(0).unwrap();
        let tape = tape(std::slice::from_ref(&x), || linear(&x, &w, Some(&bias), OutputDtype::SameAsInput));
        let y = tape.output().clone();
        let dx = tape.backward(&test_device.put(dy)).unwrap().remove(&x).unwrap();
        [y, dx, grad_of(&w), grad_of(&bias)]
    })
}

/// Output and all gradients equal f64 matmuls of the quantized operands, in which nothing else is rounded.
#[test]
fn a_linear_layer_multiplies_the_quantized_operands() {
    let shapes = [
        (33, 65, 17),
        (300, 130, 260),
        (1, 64, 48),
        (9, 700, 5),
        (2, 1, 1),
        (150, 272, 144),
        (16, 128, 256),
        (40, 16, 400),
    ];
    check_each(recipes().into_iter().flat_map(|recipe| shapes.map(|shape| (recipe, shape))), |(recipe, (t, k, n))| {
        let (x, w, dy) = (randn((t, k), 1), (randn((n, k), 2) * 0.05).unwrap(), (randn((t, n), 3) * 1e-3).unwrap());
        let bias = randn(n, 4);
        let round = |x: &Tensor, operand, contraction| rounded(recipe, x, operand, contraction);
        let [xq, wq, dyq] = [(&x, Fp8Operand::Input), (&w, Fp8Operand::Weight), (&dy, Fp8Operand::GradOutput)]
            .map(|(tensor, operand)| round(tensor, operand, Contraction::Columns));
        let y = xq.matmul(&wq.t().unwrap()).unwrap().broadcast_add(&bias.to_dtype(DType::F64).unwrap()).unwrap();
        let dx = dyq.matmul(&wq).unwrap();
        let [x_rows, dy_rows] = [(&x, Fp8Operand::Input), (&dy, Fp8Operand::GradOutput)]
            .map(|(tensor, operand)| round(tensor, operand, Contraction::Rows));
        let dw = dy_rows.t().unwrap().matmul(&x_rows).unwrap();
        for test_device in devices_for([n, k], recipe) {
            let layers = layers(recipe, &test_device);
            let got = step_of_linear(&layers, [&x, &w, &bias, &dy], &test_device);
            let db = dy.to_dtype(DType::F64).unwrap().sum(0).unwrap();
            for (what, (got, want)) in ["y", "dx", "dw", "db"].iter().zip(got.iter().zip([&y, &dx, &dw, &db])) {
                assert_close(&format!("{what} {recipe:?} {t} {k} {n} {test_device:?}"), got, want, sums(&test_device));
            }
        }
    });
}

/// With `fake_quantize` any device multiplies the rounded operands of any sizes, with scales that are powers of two.
#[test]
fn a_fake_quantized_layer_multiplies_rounded_operands() {
    for recipe in [DELAYED, Fp8Recipe::Current(rule(true)), Fp8Recipe::Blockwise(rule(true))] {
        let (t, k, n) = (150, 130, 33);
        let (x, w, dy) =
            (randn((3, t / 3, k), 1), (randn((n, k), 2) * 0.05).unwrap(), (randn((3, t / 3, n), 3) * 1e-3).unwrap());
        let bias = randn(n, 4);
        let round = |x: &Tensor, operand, contraction| {
            rounded(recipe, &x.flatten_to(x.rank() - 2).unwrap(), operand, contraction)
        };
        let wq = round(&w, Fp8Operand::Weight, Contraction::Columns);
        let product = round(&x, Fp8Operand::Input, Contraction::Columns).matmul(&wq.t().unwrap()).unwrap();
        let y = product.broadcast_add(&bias.to_dtype(DType::F64).unwrap()).unwrap().reshape((3, t / 3, n)).unwrap();
        let dx = round(&dy, Fp8Operand::GradOutput, Contraction::Columns).matmul(&wq).unwrap();
        let dx = dx.reshape((3, t / 3, k)).unwrap();
        let dy_rows = round(&dy, Fp8Operand::GradOutput, Contraction::Rows);
        let dw = dy_rows.t().unwrap().matmul(&round(&x, Fp8Operand::Input, Contraction::Rows)).unwrap();
        let db = dy.to_dtype(DType::F64).unwrap().sum((0, 1)).unwrap();
        for test_device in devices() {
            let config = Fp8Config { fake_quantize: true, ..config(recipe) };
            let layers = Arc::new(Fp8Layers::new(config, vec![Fp8Module::linear("a")], &test_device.device()).unwrap());
            let got = step_of_linear(&layers, [&x, &w, &bias, &dy], &test_device);
            for (what, (got, want)) in ["y", "dx", "dw", "db"].iter().zip(got.iter().zip([&y, &dx, &dw, &db])) {
                assert_close(&format!("{what} {recipe:?} {test_device:?}"), got, want, SUMS);
            }
        }
    }
}

/// Small integers times powers of two have exact sums, so that any order of summation gives the same bits.
#[test]
fn exact_sums_are_exact() {
    let integers = |rows: usize, columns: usize, seed: usize| {
        let values: Vec<f32> =
            (0..rows * columns).map(|i| ((i * 7919 + seed * 31 + i / 13) % 15) as f32 - 7.0).collect();
        Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
    };
    let (x, w, dy) = (integers(40, 304, 1), integers(32, 304, 2), integers(40, 32, 3));
    for recipe in [Fp8Recipe::Current(rule(true)), Fp8Recipe::Blockwise(rule(true))] {
        for test_device in devices_for([32, 304], recipe) {
            let layers = layers(recipe, &test_device);
            let weight = trainable(&test_device.put(&w)).with_fp8(layers.layer("a").unwrap());
            let input = test_device.put(&x);
            let got = test_device.run(|| {
                let _on = layers.enable(0).unwrap();
                let tape =
                    tape(std::slice::from_ref(&input), || linear(&input, &weight, None, OutputDtype::SameAsInput));
                let y = tape.output().clone();
                let dx = tape.backward(&test_device.put(&dy)).unwrap().remove(&input).unwrap();
                [y, dx, grad_of(&weight)]
            });
            // E4M3 holds integers to 16, and E5M2 to 8.
            let want = [x.matmul(&w.t().unwrap()), dy.matmul(&w), dy.t().unwrap().matmul(&x)];
            for (got, want) in got.iter().zip(want) {
                assert!(bits(got) == bits(&want.unwrap()), "{recipe:?} {test_device:?}");
            }
        }
    }
}

/// With bf16 activations the output is rounded once.
#[test]
fn bf16_outputs_are_rounded_once() {
    let (x, w) =
        (randn((9, 128), 1).to_dtype(DType::BF16).unwrap(), randn((16, 128), 2).to_dtype(DType::BF16).unwrap());
    let recipe = Fp8Recipe::Current(rule(false));
    for test_device in devices_for([16, 128], recipe) {
        let layers = layers(recipe, &test_device);
        let weight = Weight::frozen(test_device.put(&w)).with_fp8(layers.layer("a").unwrap());
        let x = test_device.put(&x);
        let of = |dtype| {
            test_device.run(|| {
                let _on = layers.enable(0).unwrap();
                linear(&x, &weight, None, dtype).unwrap()
            })
        };
        let wide = of(OutputDtype::F32).to_dtype(DType::BF16).unwrap();
        assert!(bits(&of(OutputDtype::SameAsInput)) == bits(&wide));
    }
}

/// A step's amaxes become the next scales, the same for layers that read one input; without them nothing changes.
#[test]
fn delayed_scales_follow_the_tensors_of_the_step() {
    for test_device in devices_for([16, 32], DELAYED) {
        let layers = layers(DELAYED, &test_device);
        let x = test_device.put(&randn((20, 32), 1));
        let weight = |seed, module: &str| {
            trainable(&test_device.put(&randn((16, 32), seed))).with_fp8(layers.layer(module).unwrap())
        };
        let (a, b) = (weight(2, "a"), weight(3, "b"));
        let dy = test_device.put(&randn((20, 16), 4));
        test_device.run(|| {
            let _on = layers.enable(0).unwrap();
            for w in [&a, &b] {
                let tape = tape(std::slice::from_ref(&x), || linear(&x, w, None, OutputDtype::SameAsInput));
                tape.backward(&dy).unwrap();
            }
        });
        let amax_of = |x: &Tensor| values(x).into_iter().fold(0.0, |max: f64, x| max.max(x.abs())) as f32;
        let want = [
            amax_of(&x),
            amax_of(&a.value().unwrap()),
            amax_of(&dy),
            amax_of(&x),
            amax_of(&b.value().unwrap()),
            amax_of(&dy),
        ];
        let amaxes = layers.amaxes().unwrap().clone();
        assert_eq!(amaxes.to_vec1::<f32>().unwrap(), want);
        test_device.run(|| layers.update(&amaxes.copy().unwrap())).unwrap();
        assert_eq!(layers.amaxes().unwrap().to_vec1::<f32>().unwrap(), [0.0; 6], "the next step starts anew");
        let scales = || -> Vec<f32> { layers.states().unwrap()[1].scales.to_vec1().unwrap() };
        let (e4m3, e5m2) = (Fp8Format::E4m3.max(), Fp8Format::E5m2.max());
        assert_eq!(scales(), [e4m3 / want[3], e4m3 / want[4], e5m2 / want[5]]);
        let before = scales();
        let nothing = amaxes.zeros_like().unwrap();
        test_device.run(|| layers.update(&nothing)).unwrap();
        assert_eq!(scales(), before, "a step without tensors keeps the scales");
        // The next step multiplies with these scales.
        let y = test_device.run(|| {
            let _on = layers.enable(0).unwrap();
            linear(&x, &b, None, OutputDtype::SameAsInput).unwrap()
        });
        let quantized = |x: &Tensor, scale: f32| {
            let scale = Tensor::new(&[scale], &Device::Cpu).unwrap();
            fp8_quantize(x, &scale, Fp8Format::E4m3, Fp8Rounding::Nearest).unwrap().dequantize().unwrap()
        };
        let want =
            quantized(&randn((20, 32), 1), before[0]).matmul(&quantized(&randn((16, 32), 3), before[1]).t().unwrap());
        assert_close("y of the second step", &y, &want.unwrap(), sums(&test_device));
    }
}

/// The copy of a weight in its buffer is used until the contents change, and dropped with them.
#[test]
fn a_quantized_weight_is_cached_until_its_buffer_changes() {
    let recipe = Fp8Recipe::Current(rule(false));
    for test_device in devices_for([16, 16], recipe) {
        let layers = layers(recipe, &test_device);
        let flat = test_device.put(&randn(256, 1));
        let buffer = FlatBuffer::from_tensor(flat.copy().unwrap());
        let weight = Weight::frozen(buffer.view(0, (16, 16)).unwrap()).with_fp8(layers.layer("a").unwrap());
        let x = test_device.put(&randn((3, 16), 2));
        let _on = layers.enable(0).unwrap();
        let run = || test_device.run(|| linear(&x, &weight, None, OutputDtype::SameAsInput));
        let y = || bits(&run().unwrap());
        let first = y();
        test_device.run(|| candlewick_ops::zero_(&buffer.data().unwrap())).unwrap();
        assert!(y() == first, "the copy is used");
        buffer.drop_fp8_copies();
        assert!(y().iter().all(|bits| f64::from_bits(*bits) == 0.0), "the new contents are used");
        buffer.release();
        assert!(run().is_err());
        buffer.materialize(flat).unwrap();
        assert!(y() == first);
    }
}

/// A copy made for the forward alone is replaced by one that backward can read.
#[test]
fn a_cached_weight_serves_a_later_backward() {
    let recipe = Fp8Recipe::Blockwise(rule(true));
    for test_device in devices_for([32, 16], recipe) {
        let layers = layers(recipe, &test_device);
        let buffer = FlatBuffer::from_tensor(test_device.put(&randn(32 * 16, 1)));
        let weight = Weight::frozen(buffer.view(0, (32, 16)).unwrap()).with_fp8(layers.layer("a").unwrap());
        let (x, dy) = (test_device.put(&randn((3, 16), 2)), test_device.put(&randn((3, 32), 3)));
        let dx = || {
            test_device.run(|| {
                let _on = layers.enable(0).unwrap();
                let run = || linear(&x, &weight, None, OutputDtype::SameAsInput);
                let tape = tape(std::slice::from_ref(&x), run);
                bits(&tape.backward(&dy).unwrap().remove(&x).unwrap())
            })
        };
        let want = dx();
        buffer.drop_fp8_copies();
        test_device.run(|| {
            let _on = layers.enable(0).unwrap();
            linear(&x, &weight, None, OutputDtype::SameAsInput).unwrap()
        });
        assert!(dx() == want, "{test_device:?}");
    }
}

/// Returns output and gradients of a linear layer whose weight is a view of `buffer`.
fn step_with(weight: &Weight, x: &Tensor, dy: &Tensor) -> [Vec<u64>; 3] {
    weight.sink().unwrap().reset();
    let tape = tape(std::slice::from_ref(x), || linear(x, weight, None, OutputDtype::SameAsInput));
    let y = bits(tape.output());
    let dx = bits(&tape.backward(dy).unwrap().remove(x).unwrap());
    [y, dx, bits(&grad_of(weight))]
}

/// A weight of which ranks have parts: the codes of all parts, with the scale of the whole, are those of the whole weight. A
/// layer with these codes in its buffer needs no elements, and has the same statistics.
#[test]
fn codes_of_parts_are_those_of_the_whole_weight() {
    let (n, k, start) = (80, 272, 128);
    let values = randn(start + n * k, 1);
    let recipes = recipes().into_iter().filter(|recipe| !matches!(recipe, Fp8Recipe::Blockwise(_)));
    check_each(
        recipes.flat_map(|recipe| devices_for([n, k], recipe).into_iter().map(move |on| (recipe, on))),
        |case| {
            let (recipe, test_device) = case;
            let flat = test_device.put(&values.to_dtype(DType::BF16).unwrap());
            let buffer = FlatBuffer::from_tensor(flat.clone());
            let sink = GradSink::new(Tensor::zeros((n, k), DType::F32, flat.device()).unwrap()).unwrap();
            let layers = layers(recipe, &test_device);
            let layer = layers.layer("b").unwrap();
            let weight = Weight::trainable(buffer.view(start, (n, k)).unwrap(), sink).with_fp8(layer.clone());
            let bf16 =
                |shape: (usize, usize), seed| test_device.put(&randn(shape, seed).to_dtype(DType::BF16).unwrap());
            let (x, dy) = (bf16((20, k), 2), bf16((20, n), 3));
            // The parts of three ranks: the second has whole tiles, the third the rest.
            let parts = [0..1003, 1003..1003 + 4096, 5099..n * k]
                .map(|part: std::ops::Range<usize>| flat.narrow(0, start + part.start, part.len()).unwrap());
            for step in 0..2 {
                test_device.run(|| {
                    layers.request_stats();
                    let on = layers.enable(0).unwrap();
                    let want = step_with(&weight, &x, &dy);
                    drop(on);
                    let amaxes = layers.amaxes().map(|amaxes| amaxes.copy().unwrap());
                    let stats = layers.take_stats().unwrap();
                    if let Some(amaxes) = layers.amaxes() {
                        candlewick_ops::zero_(amaxes).unwrap();
                    }
                    buffer.release();
                    layers.request_stats();
                    let on = layers.enable(0).unwrap();
                    let of_parts = parts.each_ref().map(|part| amax(part).unwrap());
                    of_parts.iter().for_each(|amax| layer.record_weight_amax(amax).unwrap());
                    let whole = Tensor::cat(&of_parts, 0).unwrap().max_keepdim(0).unwrap();
                    let scale = layer.weight_scale(&whole).unwrap();
                    assert_eq!(layers.weight_scales_need_amaxes(), step == 0 || recipe != DELAYED);
                    let codes = parts.each_ref().map(|part| layer.quantize_part(part, &scale).unwrap());
                    let codes = Tensor::cat(&codes, 0).unwrap().reshape((n, k)).unwrap();
                    buffer.hold_fp8_copies([(start, layer.weight_from_codes(codes, &scale).unwrap())].into());
                    assert!(buffer.has_fp8_copies() && !buffer.is_allocated());
                    assert!(step_with(&weight, &x, &dy) == want, "{recipe:?} {test_device:?} step {step}");
                    drop(on);
                    let of_codes = layers.take_stats().unwrap();
                    assert_close("sums of statistics", &of_codes.sums, &stats.sums, SUMS);
                    assert!(bits(&of_codes.amaxes) == bits(&stats.amaxes), "{recipe:?} {test_device:?} step {step}");
                    if let (Some(amaxes), Some(want)) = (layers.amaxes(), &amaxes) {
                        assert!(bits(amaxes) == bits(want), "{test_device:?}: the next scales");
                        layers.update(want).unwrap();
                    }
                    buffer.materialize(flat.clone()).unwrap();
                });
            }
        },
    );
}

#[test]
fn parts_of_a_weight_have_no_blocks() {
    let layers = layers(Fp8Recipe::Blockwise(rule(true)), &TestDevice::Cpu);
    let scale = layers.layer("b").unwrap().weight_scale(&Tensor::ones(1, DType::F32, &Device::Cpu).unwrap());
    assert_error(scale, "b: fp8_param_gather: shards of a weight divide the blocks of blockwise scaling");
}

/// On a GPU the error names the layer and its sizes, and the CPU multiplies all sizes.
#[test]
fn a_weight_that_cublas_cannot_multiply_is_an_error() {
    for (n, k) in [(24, 32), (32, 40), (1, 16)] {
        for test_device in devices() {
            let layers = layers(Fp8Recipe::Current(rule(false)), &test_device);
            let w = Weight::frozen(test_device.put(&randn((n, k), 1))).with_fp8(layers.layer("b").unwrap());
            let x = test_device.put(&randn((2, k), 2));
            let y = test_device.run(|| {
                let _on = layers.enable(0).unwrap();
                linear(&x, &w, None, OutputDtype::SameAsInput)
            });
            match test_device {
                TestDevice::Cpu => assert_eq!(y.unwrap().dims(), [2, n]),
                _ => assert_error(
                    y,
                    &format!(
                        "b: FP8 on a GPU needs a weight whose rows and columns are multiples of 16, not [{n}, {k}]"
                    ),
                ),
            }
        }
    }
}

/// Statistics read codes in the order of rows, which on a GPU are not those that its matmuls read.
#[test]
fn statistics_of_a_step_are_those_of_the_cpu() {
    for recipe in recipes() {
        let (x, w, dy) = (randn((20, 144), 1), randn((32, 144), 2), (randn((20, 32), 3) * 1e-6).unwrap());
        let of = |test_device: &TestDevice| {
            let layers = layers(recipe, test_device);
            let weight = trainable(&test_device.put(&w)).with_fp8(layers.layer("a").unwrap());
            let (x, dy) = (test_device.put(&x), test_device.put(&dy));
            test_device.run(|| {
                layers.request_stats();
                let on = layers.enable(0).unwrap();
                let run = || linear(&x, &weight, None, OutputDtype::SameAsInput);
                tape(std::slice::from_ref(&x), run).backward(&dy).unwrap();
                drop(on);
                let stats = layers.take_stats().unwrap();
                [stats.sums, stats.amaxes].map(|stats| stats.to_device(&Device::Cpu).unwrap())
            })
        };
        let want = of(&TestDevice::Cpu);
        assert!(values(&want[1])[..3].iter().all(|amax| *amax > 0.0), "all operands of the layer are quantized");
        for test_device in devices_for([32, 144], recipe) {
            for (got, want) in of(&test_device).iter().zip(&want) {
                assert_close(&format!("{recipe:?} {test_device:?}"), got, want, SUMS);
            }
        }
    }
}

#[test]
fn a_layer_is_dense_while_fp8_is_off() {
    let layers = layers(Fp8Recipe::Current(rule(false)), &TestDevice::Cpu);
    let (x, value) = (randn((5, 32), 1), randn((8, 32), 2));
    let dense = Weight::frozen(value.clone());
    let weight = Weight::frozen(value).with_fp8(layers.layer("a").unwrap());
    let y = |w: &Weight| bits(&linear(&x, w, None, OutputDtype::SameAsInput).unwrap());
    assert!(y(&weight) == y(&dense));
    let guard = layers.enable(0).unwrap();
    assert!(y(&weight) != y(&dense));
    drop(guard);
    assert!(y(&weight) == y(&dense));
}

/// A layer whose input is recomputed in backward has the gradient of one that saves it.
#[test]
fn a_recomputed_input_gives_the_same_gradient() {
    check_each(
        recipes().into_iter().flat_map(|recipe| devices_for([32, 48], recipe).into_iter().map(move |on| (recipe, on))),
        |(recipe, on)| {
            let layers = layers(recipe, &on);
            let w = trainable(&on.put(&randn((32, 48), 1))).with_fp8(layers.layer("a").unwrap());
            let [gate, up] = [2, 3].map(|seed| on.put(&randn((30, 48), seed)));
            let dy = on.put(&randn((30, 32), 4));
            let _enabled = layers.enable(0).unwrap();
            on.run(|| {
                let gated = candlewick_ops::swiglu(&gate, &up).unwrap();
                let saved = tape(std::slice::from_ref(&gated), || linear(&gated, &w, None, OutputDtype::SameAsInput));
                saved.backward(&dy).unwrap();
                let want = bits(&grad_of(&w));
                let sink: &GradSink = w.sink().unwrap();
                sink.reset();
                let recomputed = tape(&[gate.clone(), up.clone()], || {
                    linear(&candlewick_ops::swiglu(&gate, &up)?, &w, None, OutputDtype::SameAsInput)
                });
                recomputed.backward(&dy).unwrap();
                assert!(bits(&grad_of(&w)) == want, "{recipe:?}");
            });
        },
    );
}

/// Frozen weights in FP8 storage are exact in bf16, and their errors are half a step of E4M3: 2^-4 of an element, or of a
/// subnormal number's step.
#[test]
fn fp8_storage_is_exact_in_bf16() {
    let x = randn((200, 300), 1);
    let bytes = candlewick_ops::quantize(&x, &FP8_WEIGHT_FORMAT).unwrap();
    assert_eq!(bytes.elem_count(), 200 * 300 + 4 * 6);
    let of = |dtype| values(&candlewick_ops::dequantize(&bytes, &FP8_WEIGHT_FORMAT, &[200, 300], dtype).unwrap());
    let stored = of(DType::F32);
    assert_eq!(stored, of(DType::BF16));
    for (x, stored) in values(&x).into_iter().zip(stored) {
        assert!((x - stored).abs() <= x.abs() / 16.0 + 2f64.powi(-16), "{x} is stored as {stored}");
    }
}

/// If an exchange waits for dx, dw is computed after it: from the same codes, to the bit.
#[test]
fn a_deferred_weight_gradient_is_the_plain_one() {
    for recipe in recipes() {
        for test_device in devices() {
            let layers = layers(recipe, &test_device);
            let value = test_device.put(&randn((48, 32), 2));
            let (x, dy) = (test_device.put(&randn((40, 32), 1)), test_device.put(&randn((40, 48), 3)));
            let run = |exchanges: bool| {
                let w = trainable(&value).with_fp8(layers.layer("a").unwrap());
                let _on = layers.enable(0).unwrap();
                let op = || {
                    let y = match exchanges {
                        false => x.clone(),
                        true => record_exchange(
                            "exchange",
                            &x,
                            |x| x.affine(1.0, 0.0),
                            |dy| {
                                let dy = dy.clone();
                                Ok(Box::new(move || Ok(dy)))
                            },
                        )?,
                    };
                    linear(&y, &w, None, OutputDtype::SameAsInput)
                };
                let dx = tape(std::slice::from_ref(&x), op).backward(&dy).unwrap().remove(&x).unwrap();
                (bits(&dx), bits(&grad_of(&w)))
            };
            assert!(test_device.run(|| run(true)) == test_device.run(|| run(false)), "{recipe:?} {test_device:?}");
        }
    }
}
