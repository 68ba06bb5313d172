//! Matrix products on CUDA, by cuBLASLt.

use candle_core::{DType, Result};

use super::{Address, Gpu};

/// A row-major matrix as a product reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) address: Address,
    /// Whether its transpose is meant.
    pub(crate) is_transposed: bool,
}

/// c [m, n] = a [m, k] b [k, n], or c += a b; sums in f32.
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
    /// The format of c: that of a and b, or f32.
    pub(crate) c_dtype: DType,
    /// Whether the product is added to c.
    pub(crate) accumulate: bool,
    /// A row [n] in c's format that is added to every row of c.
    pub(crate) bias: Option<Address>,
}

impl Matrix {
    pub(crate) fn plain(address: Address) -> Self {
        Self { address, is_transposed: false }
    }

    pub(crate) fn transposed(address: Address) -> Self {
        Self { address, is_transposed: true }
    }
}

impl Gemm {
    /// A product of these sizes, m, n and k, that is not added and has no bias. Its matrices are still to be named.
    pub(crate) fn new([m, n, k]: [usize; 3], dtype: DType) -> Self {
        let nowhere = Matrix::plain(0);
        Self { m, n, k, a: nowhere, b: nowhere, dtype, c: 0, c_dtype: dtype, accumulate: false, bias: None }
    }

    /// Computes the product.
    ///
    /// # Safety
    ///
    /// Every address must be good for a matrix of its size and format, and c must overlap neither a nor b.
    pub(crate) unsafe fn run(&self, gpu: Gpu) -> Result<()> {
        if self.m == 0 || self.n == 0 {
            return Ok(());
        }
        match gpu {
            // SAFETY: the caller answers for the addresses.
            #[cfg(feature = "cuda")]
            Gpu::Device(device) => unsafe { super::cublas_lt::run(self, device) },
            // SAFETY: as above.
            #[cfg(feature = "emulate")]
            Gpu::Emulated(_) => unsafe { super::emulator::gemm(self) },
        }
    }
}
