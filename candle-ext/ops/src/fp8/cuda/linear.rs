//! Matmuls of linear layers in FP8 on CUDA, by cuBLASLt.
//!
//! The sum runs over the last dim of both operands: y = x [t, k] w [n, k]^T, dx = dy [t, n] (w^T [k, n])^T, dw = dy^T [n, t] (x^T [k, t])^T.
//! Tokens are padded by zeros to a multiple of 16.

use candle_core::{DType, Result, Tensor, bail};

use super::MULTIPLE;
use crate::cuda::gemm::{Fp8Accumulation, Fp8Inputs, Gemm, GemmInputs, Matrix, ScaledInput, Scaling};
use crate::cuda::{DeviceAddress, Out, address, gpu};
use crate::fp8::matrix::Fp8Matrix;
use crate::gemm::Accumulate;
use crate::quantized::ScaleBlock;
use crate::weight_matmul::Dims;

const OP: &str = "linear";

/// Fails unless cuBLASLt can multiply a weight of these sizes in FP8.
pub(crate) fn check_sizes(module: &str, Dims { n, k, .. }: Dims) -> Result<()> {
    if !n.is_multiple_of(MULTIPLE) || !k.is_multiple_of(MULTIPLE) {
        bail!(
            "{module}: FP8 on a GPU needs a weight whose rows and columns are multiples of {MULTIPLE}, not [{n}, {k}]; \
               exclude this layer from FP8 (precision.exclude_modules)"
        )
    }
    Ok(())
}

/// Returns y = x w^T + b [t, n] in `out_dtype`.
pub(crate) fn forward(
    x: &Fp8Matrix,
    w: &Fp8Matrix,
    bias: Option<&Tensor>,
    out_dtype: DType,
    dims: Dims,
) -> Result<Tensor> {
    if let Some(bias) = bias.filter(|bias| bias.dtype() != out_dtype) {
        bail!("{OP}: on CUDA the bias must have the output's dtype {out_dtype:?}, not {:?}", bias.dtype())
    }
    let bias = bias.map(|bias| address(OP, bias)).transpose()?;
    let addends = Addends { bias, sum: None };
    let y = multiply_rows([x, w], dims.n, (out_dtype, Fp8Accumulation::Fast), addends)?;
    y.narrow(0, 0, dims.t)
}

/// Returns true if [`grad_x`] can add to a sum. Padded rows have no sum, and no GPU has run sums with scales per block.
pub(crate) fn adds_to_sum(dy: &Fp8Matrix, dims: Dims) -> bool {
    dims.t.is_multiple_of(MULTIPLE) && dy.block == ScaleBlock::Tensor
}

/// Returns dx = dy w [t, k], from the transposed w, plus a `sum` of the same shape and dtype if [`adds_to_sum`].
pub(crate) fn grad_x(dy: &Fp8Matrix, w: &Fp8Matrix, sum: Option<&Tensor>, dtype: DType, dims: Dims) -> Result<Tensor> {
    let addends = Addends { bias: None, sum: sum.map(|sum| address(OP, sum)).transpose()? };
    multiply_rows([dy, w], dims.k, (dtype, Fp8Accumulation::Split), addends)?.narrow(0, 0, dims.t)
}

/// Computes dw = [dw +] dy^T x, from the transposed dy and x.
pub(crate) fn grad_w(dy: &Fp8Matrix, x: &Fp8Matrix, (dw, accumulate): (&Tensor, Accumulate), dims: Dims) -> Result<()> {
    let c = address(OP, dw)?;
    let gemm = Gemm {
        c,
        c_dtype: dw.dtype(),
        plus: (accumulate == Accumulate::Add).then_some(c),
        ..product([dy, x], Fp8Accumulation::Split)?
    };
    debug_assert_eq!([gemm.m, gemm.n], [dims.n, dims.k]);
    // SAFETY: dy^T is [n, t], x^T [k, t], dw a gradient [n, k].
    unsafe { gemm.run(gpu(OP, &dy.codes)?) }
}

/// Addresses of what is added to a matmul before it is rounded: a bias [width] and a matrix [rows, width].
struct Addends {
    bias: Option<DeviceAddress>,
    sum: Option<DeviceAddress>,
}

/// Returns left right^T [rows, width] plus the addends. Rows are padded.
fn multiply_rows(
    operands: [&Fp8Matrix; 2],
    width: usize,
    (dtype, accumulation): (DType, Fp8Accumulation),
    Addends { bias, sum }: Addends,
) -> Result<Tensor> {
    let on = gpu(OP, &operands[0].codes)?;
    let product = product(operands, accumulation)?;
    let out = Out::new(on, dtype, product.m * width)?;
    let gemm = Gemm { c: out.address, c_dtype: dtype, bias, plus: sum, ..product };
    // SAFETY: the operands are [m, k] and [width, k], output and sum [m, width], the bias [width].
    unsafe { gemm.run(on)? };
    Ok(out.into_tensor((gemm.m, width)))
}

/// Describes left right^T, with codes [m, k] and [n, k].
fn product([left, right]: [&Fp8Matrix; 2], accumulation: Fp8Accumulation) -> Result<Gemm> {
    let ((m, k), (n, of_right)) = (left.codes.dims2()?, right.codes.dims2()?);
    if k != of_right {
        bail!("{OP}: FP8 operands {:?} and {:?} do not share their last dim", left.codes.dims(), right.codes.dims())
    }
    let (a, b) = (scaled(left)?, scaled(right)?);
    let accumulation = match (a.scaling, b.scaling) {
        (Scaling::Tensor, Scaling::Tensor) => accumulation,
        _ => Fp8Accumulation::Split,
    };
    Ok(Gemm {
        a: Matrix::plain(address(OP, &left.codes)?),
        b: Matrix::transposed(address(OP, &right.codes)?),
        inputs: GemmInputs::Fp8(Fp8Inputs { a, b, accumulation }),
        ..Gemm::new([m, n, k], DType::BF16)
    })
}

fn scaled(matrix: &Fp8Matrix) -> Result<ScaledInput> {
    let scaling = match matrix.block {
        ScaleBlock::Tensor => Scaling::Tensor,
        ScaleBlock::Tile { rows: 1, .. } => Scaling::Vector128,
        _ => Scaling::Block128,
    };
    Ok(ScaledInput { format: matrix.format, scale_inv: address(OP, &matrix.scale_inv)?, scaling })
}
