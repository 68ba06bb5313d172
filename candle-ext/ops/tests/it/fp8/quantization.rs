//! Codes and scales compared with torch's (tests/reference/fp8.py), amaxes and roundings.

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    AmaxHistoryPolicy, DelayedScaling, FP8_WEIGHT_FORMAT, Fp8Format, Fp8Layers, Fp8Module, Fp8Recipe, Fp8Rounding,
    ScaleBlock, ScaleRule, amax, fp8_quantize, fp8_quantize_current,
};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::{codes_of, config, devices};
use crate::cases::{TestDevice, check_each, randn, values};

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

fn fixture() -> Fixture {
    serde_json::from_str(include_str!("../../fixtures/fp8.json")).unwrap()
}

fn format_named(name: &str) -> Fp8Format {
    if name == "e4m3" { Fp8Format::E4m3 } else { Fp8Format::E5m2 }
}

fn scale_one(test_device: &TestDevice) -> Tensor {
    Tensor::ones(1, DType::F32, &test_device.device()).unwrap()
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
