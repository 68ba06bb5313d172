//! Operands of a matrix product on CUDA.

use candle_core::DType;

use crate::cuda::arg::Address;

/// A row-major matrix as a product reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) address: Address,
    /// True if its transpose is meant.
    pub(crate) is_transposed: bool,
    /// Elements from one row in memory to the next, where that is more than a row has.
    pub(crate) stride: Option<usize>,
}

/// c [m, n] = a [m, k] b [k, n], perhaps plus another matrix; sums in f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gemm {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    /// The format of a and b.
    pub(crate) dtype: DType,
    pub(crate) c: Address,
    /// Rows of c and of the addend, as [`Matrix::stride`].
    pub(crate) c_stride: Option<usize>,
    /// The format of c: that of a and b, or f32.
    pub(crate) c_dtype: DType,
    /// A matrix in c's format that the product is added to: c itself, or one that does not overlap it.
    pub(crate) plus: Option<Address>,
    /// A row [n] in c's format that is added to every row of c.
    pub(crate) bias: Option<Address>,
}

impl Matrix {
    pub(crate) fn plain(address: Address) -> Self {
        Self { address, is_transposed: false, stride: None }
    }

    pub(crate) fn transposed(address: Address) -> Self {
        Self { address, is_transposed: true, stride: None }
    }

    pub(crate) fn with_stride(self, stride: usize) -> Self {
        Self { stride: Some(stride), ..self }
    }

    /// Rows and columns in memory of what is `rows` by `columns` in the product, and elements from one row to the next.
    pub(crate) fn in_memory(&self, [rows, columns]: [usize; 2]) -> [usize; 3] {
        let (rows, columns) = if self.is_transposed { (columns, rows) } else { (rows, columns) };
        [rows, columns, self.stride.unwrap_or(columns)]
    }
}

impl Gemm {
    /// A product of these sizes, m, n and k, to which nothing is added. Its matrices are still to be named.
    pub(crate) fn new([m, n, k]: [usize; 3], dtype: DType) -> Self {
        let nowhere = Matrix::plain(0);
        Self { m, n, k, a: nowhere, b: nowhere, dtype, c: 0, c_stride: None, c_dtype: dtype, plus: None, bias: None }
    }

    /// c, as a matrix.
    pub(crate) fn output(&self) -> Matrix {
        Matrix { stride: self.c_stride, ..Matrix::plain(self.c) }
    }
}
