//! Matmuls of FP8 linear layers over the stand-in: attributes of forward, dgrad and wgrad, and their results.

use super::*;
use crate::fp8::{Fp8Format, Fp8Matrix, cuda as layer};
use crate::gemm::Accumulate;
use crate::quantized::ScaleBlock;
use crate::weight_matmul::Dims;

/// Attributes of the last matmul with FP8 operands. Same layout as in cublas.cpp; the first operand is b.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fp8Call {
    types: [i32; 3],
    modes: [i32; 2],
    fast_accumulation: i32,
    has_bias: i32,
    has_addend: i32,
}

// As in cudaDataType and cublasLtMatmulMatrixScale_t.
const F32: i32 = 0;
const BF16: i32 = 14;
const E4M3: i32 = 28;
const E5M2: i32 = 29;
const TENSOR: i32 = 0;
const VEC128: i32 = 4;
const BLK128X128: i32 = 5;

/// Tokens with padding, outputs and inputs.
const DIMS: Dims = Dims { t: 48, n: 144, k: 272 };

fn last_call() -> Fp8Call {
    // SAFETY: the stand-in is loaded, the symbol has this type, and no matmul is running.
    unsafe {
        let library = Loaded::new("libcuda.so.1").unwrap();
        let call: Symbol<*mut Fp8Call> = library.get(b"stand_in_fp8").unwrap();
        let found = **call;
        std::mem::forget(library);
        found
    }
}

/// Returns a matrix [outer, k] of pseudorandom codes and scales on a device.
fn matrix(outer: usize, k: usize, format: Fp8Format, scaling: Scaling, device: &Device) -> Fp8Matrix {
    let n_scales = scaling.layout(outer, k).0;
    // Without codes of NaN and infinities.
    let code = |i: usize| ((i * 37 + outer) % 120) as u8 | if i.is_multiple_of(3) { 0x80 } else { 0 };
    let codes = Tensor::from_vec((0..outer * k).map(code).collect::<Vec<u8>>(), (outer, k), device).unwrap();
    let scale = |i: usize| 0.01 + (i % 11) as f32 * 0.003;
    let scale_inv = Tensor::from_vec((0..n_scales).map(scale).collect::<Vec<f32>>(), n_scales, device).unwrap();
    let block = match scaling {
        Scaling::Tensor => ScaleBlock::Tensor,
        Scaling::Vector128 => ScaleBlock::Tile { rows: 1, columns: 128 },
        Scaling::Block128 => ScaleBlock::Tile { rows: 128, columns: 128 },
    };
    Fp8Matrix::in_order_of_cublas_lt(codes, scale_inv, format, block)
}

fn floats(n: usize, dtype: DType, device: &Device) -> Tensor {
    let values: Vec<f32> = (0..n).map(|i| ((i + 1) as f64 * 0.7).sin() as f32).collect();
    Tensor::from_vec(values, n, &Device::Cpu).unwrap().to_dtype(dtype).unwrap().to_device(device).unwrap()
}

/// A matmul of a linear layer.
#[derive(Clone, Copy, Debug)]
enum Matmul {
    Forward { out: DType, has_bias: bool },
    GradX { format: Fp8Format, has_sum: bool },
    GradW { format: Fp8Format, dtype: DType, accumulate: Accumulate },
}

impl Matmul {
    fn run(self, is_blockwise: bool, device: &Device) -> Vec<f32> {
        let Dims { t, n, k } = DIMS;
        let [of_tokens, of_weight] =
            if is_blockwise { [Scaling::Vector128, Scaling::Block128] } else { [Scaling::Tensor; 2] };
        let out = match self {
            Self::Forward { out, has_bias } => {
                let x = matrix(t, k, Fp8Format::E4m3, of_tokens, device);
                let w = matrix(n, k, Fp8Format::E4m3, of_weight, device);
                let bias = has_bias.then(|| floats(n, out, device));
                layer::forward(&x, &w, bias.as_ref(), out, DIMS).unwrap()
            }
            Self::GradX { format, has_sum } => {
                let dy = matrix(t, n, format, of_tokens, device);
                let w = matrix(k, n, Fp8Format::E4m3, of_weight, device);
                assert_eq!(layer::adds_to_sum(&dy, DIMS), !is_blockwise);
                let sum = has_sum.then(|| floats(t * k, DType::BF16, device).reshape((t, k)).unwrap());
                layer::grad_x(&dy, &w, sum.as_ref(), DType::BF16, DIMS).unwrap()
            }
            Self::GradW { format, dtype, accumulate } => {
                let dy = matrix(n, t, format, of_tokens, device);
                let x = matrix(k, t, Fp8Format::E4m3, of_tokens, device);
                let dw = floats(n * k, dtype, device);
                layer::grad_w(&dy, &x, (&dw, accumulate), DIMS).unwrap();
                dw
            }
        };
        let out = out.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
        out.flatten_all().unwrap().to_vec1().unwrap()
    }
}

#[track_caller]
fn check_fp8(device: &Device, matmul: Matmul, is_blockwise: bool, want: Fp8Call) {
    let got = matmul.run(is_blockwise, device);
    assert_eq!(last_call(), want, "{matmul:?} {is_blockwise}");
    let exact = matmul.run(is_blockwise, &Device::Cpu);
    let norm = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let difference: Vec<f32> = got.iter().zip(&exact).map(|(got, want)| got - want).collect();
    assert!(norm(&difference) <= 2f64.powi(-8) * norm(&exact), "{matmul:?} {is_blockwise}");
}

#[test]
fn each_matmul_of_a_layer_requests_its_types_scales_and_accumulation() {
    let Some(_stand_in) = StandIn::open() else { return };
    let device = device();
    for is_blockwise in [false, true] {
        let [of_tokens, of_weight] = if is_blockwise { [VEC128, BLK128X128] } else { [TENSOR; 2] };
        let call = |types, modes| Fp8Call { types, modes, fast_accumulation: 0, has_bias: 0, has_addend: 0 };
        for (out, data) in [(DType::BF16, BF16), (DType::F32, F32)] {
            for has_bias in [false, true] {
                // Only a 16-bit bias of operands with one scale is added by the library.
                let in_epilogue = has_bias && !is_blockwise && out == DType::BF16;
                let want = Fp8Call {
                    fast_accumulation: i32::from(!is_blockwise),
                    has_bias: i32::from(in_epilogue),
                    has_addend: i32::from(has_bias && !in_epilogue),
                    ..call([E4M3, E4M3, data], [of_weight, of_tokens])
                };
                check_fp8(&device, Matmul::Forward { out, has_bias }, is_blockwise, want);
            }
        }
        // Gradients are E5M2 with `hybrid`, and E4M3 with `e4m3`.
        for (format, of_dy) in [(Fp8Format::E5m2, E5M2), (Fp8Format::E4m3, E4M3)] {
            for &has_sum in if is_blockwise { &[false][..] } else { &[false, true] } {
                let call = call([E4M3, of_dy, BF16], [of_weight, of_tokens]);
                let want = Fp8Call { has_addend: i32::from(has_sum), ..call };
                check_fp8(&device, Matmul::GradX { format, has_sum }, is_blockwise, want);
            }
            for (dtype, data) in [(DType::F32, F32), (DType::BF16, BF16)] {
                for (accumulate, has_addend) in [(Accumulate::Overwrite, 0), (Accumulate::Add, 1)] {
                    let want = Fp8Call { has_addend, ..call([E4M3, of_dy, data], [of_tokens; 2]) };
                    check_fp8(&device, Matmul::GradW { format, dtype, accumulate }, is_blockwise, want);
                }
            }
        }
    }
}

/// Another call of the same key has other scales: their addresses are set for each call.
#[test]
fn scales_are_those_of_the_call() {
    let Some(_stand_in) = StandIn::open() else { return };
    let device = device();
    let Dims { t, n, k } = DIMS;
    let of = |factor: f64| {
        let [x, w] = [(t, k), (n, k)].map(|(outer, k)| matrix(outer, k, Fp8Format::E4m3, Scaling::Tensor, &device));
        let scale_inv = (x.scale_inv.to_device(&Device::Cpu).unwrap() * factor).unwrap().to_device(&device).unwrap();
        let x = Fp8Matrix::in_order_of_cublas_lt(x.codes, scale_inv, x.format, x.block);
        let y = layer::forward(&x, &w, None, DType::F32, DIMS).unwrap();
        y.to_device(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let (once, twice) = (of(1.0), of(2.0));
    assert!(once.iter().zip(&twice).all(|(once, twice)| 2.0 * once == *twice) && once != twice);
}

#[test]
fn a_refused_fp8_matmul_is_an_error_without_a_fallback() {
    let Some(stand_in) = StandIn::open() else { return };
    stand_in.refuse(Rules { heuristics: 1, ..NOTHING_REFUSED });
    let device = device();
    let x = matrix(48, 272, Fp8Format::E4m3, Scaling::Tensor, &device);
    let w = matrix(144, 272, Fp8Format::E4m3, Scaling::Tensor, &device);
    let error = layer::forward(&x, &w, None, DType::BF16, DIMS).unwrap_err().to_string();
    assert!(error.contains("cublasGemmEx: it has no FP8"), "{error}");
}
