//! Operands of a GEMM on CUDA.

use candle_core::DType;

use crate::cuda::arg::DeviceAddress;
use crate::fp8::Fp8Format;

/// Row-major operand of a GEMM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) address: DeviceAddress,
    /// True if the operand is the transpose of the matrix in memory.
    pub(crate) is_transposed: bool,
    /// Row stride in elements; `None` if rows are contiguous.
    pub(crate) stride: Option<usize>,
}

/// Elements of a and b.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GemmInputs {
    /// Floats of one dtype.
    Floats(DType),
    /// FP8 codes with inverse scales. a is not transposed and b is: cuBLASLt reads both along the sum.
    Fp8(Fp8Inputs),
}

/// FP8 operands a and b.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fp8Inputs {
    pub(crate) a: ScaledInput,
    pub(crate) b: ScaledInput,
    pub(crate) accumulation: Fp8Accumulation,
}

/// FP8 operand with f32 inverse scales: element = code value * inverse scale of its block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScaledInput {
    pub(crate) format: Fp8Format,
    pub(crate) scale_inv: DeviceAddress,
    pub(crate) scaling: Scaling,
}

/// Elements of an operand [outer, k] that share a scale, and the order of the inverse scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Scaling {
    /// All elements: [1].
    Tensor,
    /// 1x128 elements: [k / 128 rounded up, outer rounded up to a multiple of 4].
    Vector128,
    /// 128x128 elements: [outer / 128 rounded up, k / 128 rounded up, then up to a multiple of 4].
    Block128,
}

/// Accumulation of FP8 matmuls on tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fp8Accumulation {
    /// Sums stay in the tensor cores, which keep fewer bits than f32 has.
    Fast,
    /// Partial sums are added in f32.
    Split,
}

/// c [m, n] = factor * a [m, k] b [k, n] plus an optional matrix and bias, summed in f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gemm {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    pub(crate) inputs: GemmInputs,
    /// Factor on the matmul (alpha).
    pub(crate) factor: f32,
    pub(crate) c: DeviceAddress,
    /// Row stride of c and of the addend, as [`Matrix::stride`].
    pub(crate) c_stride: Option<usize>,
    /// Dtype of c: that of a and b, or f32; any float with FP8 operands.
    pub(crate) c_dtype: DType,
    /// Addend in c's dtype: c itself, or a matrix that does not overlap c.
    pub(crate) plus: Option<DeviceAddress>,
    /// Bias row [n] in c's dtype, added to every row of c.
    pub(crate) bias: Option<DeviceAddress>,
}

impl Matrix {
    pub(crate) fn plain(address: DeviceAddress) -> Self {
        Self { address, is_transposed: false, stride: None }
    }

    pub(crate) fn transposed(address: DeviceAddress) -> Self {
        Self { address, is_transposed: true, stride: None }
    }

    pub(crate) fn with_row_stride(self, stride: usize) -> Self {
        Self { stride: Some(stride), ..self }
    }

    /// Returns rows, columns and row stride in memory of an operand of size `rows` by `columns`.
    pub(crate) fn in_memory(&self, [rows, columns]: [usize; 2]) -> [usize; 3] {
        let (rows, columns) = if self.is_transposed { (columns, rows) } else { (rows, columns) };
        [rows, columns, self.stride.unwrap_or(columns)]
    }
}

impl Scaling {
    /// Returns the number of inverse scales of an operand [outer, k], and their strides between blocks of both dims.
    pub(crate) fn layout(self, outer: usize, k: usize) -> (usize, [usize; 2]) {
        const BLOCK: usize = 128;
        const MULTIPLE: usize = 4;
        let n_along_k = k.div_ceil(BLOCK);
        match self {
            Self::Tensor => (1, [0, 0]),
            Self::Vector128 => {
                let padded = outer.next_multiple_of(MULTIPLE);
                (n_along_k * padded, [1, padded])
            }
            Self::Block128 => {
                let padded = n_along_k.next_multiple_of(MULTIPLE);
                (outer.div_ceil(BLOCK) * padded, [padded, 1])
            }
        }
    }

    /// Returns the rows of a block.
    #[cfg(feature = "emulate")]
    pub(crate) fn block_rows(self) -> usize {
        if self == Self::Vector128 { 1 } else { 128 }
    }
}

impl Gemm {
    /// Creates a GEMM of sizes m, n and k without an addend. The addresses are filled in later.
    pub(crate) fn new([m, n, k]: [usize; 3], dtype: DType) -> Self {
        let nowhere = Matrix::plain(0);
        let inputs = GemmInputs::Floats(dtype);
        let (c_stride, plus, bias) = (None, None, None);
        Self { m, n, k, a: nowhere, b: nowhere, inputs, factor: 1.0, c: 0, c_stride, c_dtype: dtype, plus, bias }
    }

    /// Returns c as a matrix.
    pub(crate) fn output(&self) -> Matrix {
        Matrix { stride: self.c_stride, ..Matrix::plain(self.c) }
    }
}
