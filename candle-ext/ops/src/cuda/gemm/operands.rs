//! Operands of a GEMM on CUDA.

use candle_core::DType;

use crate::cuda::arg::DeviceAddress;

/// Row-major operand of a GEMM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) address: DeviceAddress,
    /// True if the operand is the transpose of the matrix in memory.
    pub(crate) is_transposed: bool,
    /// Row stride in elements; `None` if rows are contiguous.
    pub(crate) stride: Option<usize>,
}

/// c [m, n] = a [m, k] b [k, n] plus an optional matrix and bias, summed in f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gemm {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    /// Dtype of a and b.
    pub(crate) dtype: DType,
    pub(crate) c: DeviceAddress,
    /// Row stride of c and of the addend, as [`Matrix::stride`].
    pub(crate) c_stride: Option<usize>,
    /// Dtype of c: that of a and b, or f32.
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

impl Gemm {
    /// Creates a GEMM of sizes m, n and k without an addend. The addresses are filled in later.
    pub(crate) fn new([m, n, k]: [usize; 3], dtype: DType) -> Self {
        let nowhere = Matrix::plain(0);
        Self { m, n, k, a: nowhere, b: nowhere, dtype, c: 0, c_stride: None, c_dtype: dtype, plus: None, bias: None }
    }

    /// Returns c as a matrix.
    pub(crate) fn output(&self) -> Matrix {
        Matrix { stride: self.c_stride, ..Matrix::plain(self.c) }
    }
}
