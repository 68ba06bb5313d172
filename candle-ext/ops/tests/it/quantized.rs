use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    FP8_WEIGHT_FORMAT, OutputDtype, QuantFormat, ScaleBlock, ScaleRounding, Weight, dequantize, linear, quantize,
};

use crate::cases::{TestDevice, assert_close, assert_error, bits, bound, check_each, randn, tape, values};

const INT8: [f32; 256] = {
    let mut codes = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        codes[code] = code as u8 as i8 as f32;
        code += 1;
    }
    codes
};

const BLOCKS: [ScaleBlock; 4] = [
    ScaleBlock::Tensor,
    ScaleBlock::Row,
    ScaleBlock::Tile { rows: 1, columns: 128 },
    ScaleBlock::Tile { rows: 16, columns: 8 },
];

const SHAPES: [(usize, usize); 6] = [(33, 65), (1, 1), (64, 256), (17, 8), (700, 3000), (0, 5)];

fn format(block: ScaleBlock, scales: ScaleRounding) -> &'static QuantFormat {
    format_of(&INT8, block, scales)
}

fn format_of(codes: &'static [f32; 256], block: ScaleBlock, scales: ScaleRounding) -> &'static QuantFormat {
    Box::leak(Box::new(QuantFormat { name: "int8", codes, block, scales }))
}

/// Returns the bits of all elements, and those of one NaN for each NaN.
fn bits_without_payloads(x: &Tensor) -> Vec<u64> {
    values(x).into_iter().map(|x| if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// Returns a function from row and column to the index of their scale, and the number of scales.
fn scale_of(block: ScaleBlock, (n, k): (usize, usize)) -> (impl Fn(usize, usize) -> usize, usize) {
    let (rows, columns) = match block {
        ScaleBlock::Tensor => (n.max(1), k),
        ScaleBlock::Row => (1, k),
        ScaleBlock::Tile { rows, columns } => (rows, columns),
    };
    let across = k.div_ceil(columns);
    (move |row, column| row / rows * across + column / columns, n.div_ceil(rows) * across)
}

#[test]
fn each_element_is_its_code_times_the_scale_of_its_block() {
    let cases = BLOCKS.into_iter().flat_map(|block| SHAPES.map(|shape| (block, shape)));
    let cases = cases.map(|case| (case, &INT8));
    let of_fp8 = SHAPES[..4].iter().map(|shape| ((BLOCKS[3], *shape), FP8_WEIGHT_FORMAT.codes));
    for ((block, shape), table) in cases.chain(of_fp8) {
        let (n, k) = shape;
        let (scale_of, n_scales) = scale_of(block, shape);
        let codes: Vec<u8> = (0..n * k).map(|i| (i * 31 + i / 7) as u8).collect();
        let scales: Vec<f32> = (0..n_scales).map(|i| 0.01 + i as f32 * 0.003).collect();
        let mut bytes = codes.clone();
        bytes.resize((n * k).next_multiple_of(4), 0);
        bytes.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
        let want: Vec<f32> =
            (0..n * k).map(|i| scales[scale_of(i / k, i % k)] * table[usize::from(codes[i])]).collect();
        let want = Tensor::from_vec(want, shape, &Device::Cpu).unwrap();
        let n_bytes = bytes.len();
        let bytes = Tensor::from_vec(bytes, n_bytes, &Device::Cpu).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let want = want.to_dtype(dtype).unwrap();
            check_each(TestDevice::all(), |test_device| {
                let bytes = test_device.put(&bytes);
                let format = format_of(table, block, ScaleRounding::Exact);
                let got = test_device.run(|| dequantize(&bytes, format, &[n, k], dtype).unwrap());
                let is_equal = bits_without_payloads(&got) == bits_without_payloads(&want);
                assert!(is_equal, "{block:?} {shape:?} {dtype:?} {test_device:?}");
            });
        }
    }
}

#[test]
fn the_nearest_code_is_taken_and_ties_go_to_the_even_one() {
    let x = Tensor::new(&[[127.0f32, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -126.6]], &Device::Cpu).unwrap();
    let bytes = quantize(&x, format(ScaleBlock::Row, ScaleRounding::PowerOfTwo)).unwrap();
    let got = dequantize(&bytes, format(ScaleBlock::Row, ScaleRounding::PowerOfTwo), &[1, 8], DType::F32).unwrap();
    assert_eq!(values(&got), [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, 0.0, -127.0]);
}

#[test]
fn quantizing_is_off_by_half_a_step_and_again_by_nothing() {
    for block in BLOCKS {
        for scales in [ScaleRounding::Exact, ScaleRounding::PowerOfTwo] {
            let format = format(block, scales);
            let x = randn((33, 300), 7);
            let again = |x: &Tensor| dequantize(&quantize(x, format).unwrap(), format, &[33, 300], DType::F32).unwrap();
            let once = again(&x);
            let most = values(&x).into_iter().fold(0.0, |max: f64, x| max.max(x.abs()));
            let step = if scales == ScaleRounding::Exact { most / 127.0 } else { most / 63.5 };
            let off = values(&x).into_iter().zip(values(&once)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off > 0.0 && off <= 0.51 * step, "{block:?} {scales:?}: off by {off}, a step is {step}");
            if scales == ScaleRounding::PowerOfTwo {
                assert!(bits(&again(&once)) == bits(&once), "{block:?}");
            }
        }
    }
}

#[test]
fn a_block_of_zeros_is_zeros() {
    let x = Tensor::zeros((5, 7), DType::F32, &Device::Cpu).unwrap();
    let format = format(ScaleBlock::Row, ScaleRounding::Exact);
    let got = dequantize(&quantize(&x, format).unwrap(), format, &[5, 7], DType::F32).unwrap();
    assert_eq!(values(&got), [0.0; 35]);
}

/// Every int8 value times a power of two is a bf16, so a dense bf16 weight can hold the same values.
#[test]
fn a_linear_layer_gives_the_bits_of_a_dense_weight() {
    let format = format(ScaleBlock::Tile { rows: 16, columns: 8 }, ScaleRounding::PowerOfTwo);
    for (t, n, k) in [(33, 17, 65), (1, 64, 256), (9, 700, 3000), (1, 300, 1024), (5, 1, 1)] {
        let bytes = quantize(&randn((n, k), 2), format).unwrap();
        let dense = dequantize(&bytes, format, &[n, k], DType::BF16).unwrap();
        let (x, dy) =
            (randn((t, k), 1).to_dtype(DType::BF16).unwrap(), randn((t, n), 3).to_dtype(DType::BF16).unwrap());
        check_each(TestDevice::all(), |test_device| {
            let (x, dy) = (test_device.put(&x), test_device.put(&dy));
            let run = |w: Weight| {
                let tape = tape(std::slice::from_ref(&x), || linear(&x, &w, None, OutputDtype::SameAsInput));
                let y = tape.output().clone();
                let dx = tape.backward(&dy).unwrap().get(&x).unwrap().clone();
                [bits(&y), bits(&dx)]
            };
            test_device.run(|| {
                let quantized = run(Weight::quantized(test_device.put(&bytes), format, [n, k]).unwrap());
                assert!(quantized == run(Weight::frozen(test_device.put(&dense))), "{t} {n} {k} {test_device:?}");
            });
        });
    }
}

/// With f32 inputs the weight is not rounded to a shorter dtype.
#[test]
fn a_linear_layer_of_f32_inputs_equals_the_dequantized_weight() {
    let format = format(ScaleBlock::Row, ScaleRounding::Exact);
    let (x, w) = (randn((9, 100), 1), quantize(&randn((30, 100), 2), format).unwrap());
    let dense = dequantize(&w, format, &[30, 100], DType::F32).unwrap();
    let want = x.matmul(&dense.t().unwrap()).unwrap();
    check_each(TestDevice::all(), |test_device| {
        let x = test_device.put(&x);
        let w = Weight::quantized(test_device.put(&w), format, [30, 100]).unwrap();
        let y = test_device.run(|| linear(&x, &w, None, OutputDtype::SameAsInput).unwrap());
        assert_close("quantized linear", &y, &want, bound(DType::F32));
    });
}

#[test]
fn unsupported_tensors_are_not_quantized() {
    let format = format(ScaleBlock::Row, ScaleRounding::Exact);
    let x = Tensor::new(&[[1.0f32, 2.0], [f32::NAN, 4.0]], &Device::Cpu).unwrap();
    assert_error(quantize(&x, format), "the element at row 1, column 0 is NaN");
    assert_error(quantize(&randn(4, 1), format), "only matrices are quantized");
    let bytes = Tensor::zeros(10, DType::U8, &Device::Cpu).unwrap();
    assert_error(dequantize(&bytes, format, &[2, 2], DType::F32), "want 12 bytes, got U8 [10]");
    assert_error(Weight::quantized(bytes, format, [2, 2]), "has 12 bytes");
    let bytes = Tensor::zeros(12, DType::U8, &Device::Cpu).unwrap();
    let w = Weight::quantized(bytes, format, [2, 2]).unwrap();
    assert_error(w.value(), "only linear layers read int8 weights");
}
