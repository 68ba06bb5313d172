//! [`Gemm`] by cublasGemmEx, the fallback for calls that cuBLASLt refuses.

use std::ffi::{c_int, c_void};

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublas::result;
use candle_core::cuda_backend::cudarc::cublas::sys;
use candle_core::cuda_backend::cudarc::driver::CudaStream;

use super::operands::{Gemm, GemmInputs, Matrix};
use super::search::GemmError;
use crate::cuda::{DeviceAddress, Gpu};

/// cuBLAS handle on one stream, with the caller's workspace. It lives as long as the process.
pub(super) struct Cublas(sys::cublasHandle_t);

// SAFETY: a handle may be used from any thread, one at a time; the lock of cublas_lt.rs ensures that.
unsafe impl Send for Cublas {}

impl Cublas {
    /// Creates a handle.
    ///
    /// # Safety
    ///
    /// The workspace must belong to this stream and live as long as the process.
    pub(super) unsafe fn open(
        stream: &CudaStream,
        workspace: DeviceAddress,
        n_bytes: usize,
    ) -> Result<Self, GemmError> {
        let handle = result::create_handle().map_err(|error| GemmError::of_status(error.0))?;
        // Keep partial sums in f32, as with cuBLASLt.
        let mode = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        // SAFETY: the handle is open; the caller guarantees a valid workspace.
        unsafe {
            result::set_stream(handle, stream.cu_stream().cast()).map_err(|error| GemmError::of_status(error.0))?;
            // Setting the stream drops the workspace, so it comes after.
            sys::cublasSetWorkspace_v2(handle, workspace as *mut c_void, n_bytes)
                .result()
                .map_err(|error| GemmError::of_status(error.0))?;
            sys::cublasSetMathMode(handle, mode).result().map_err(|error| GemmError::of_status(error.0))?;
        }
        Ok(Self(handle))
    }

    /// Computes c = addend + bias by a kernel, then adds the matmul to it. With both terms, 16-bit dtypes are rounded
    /// once more than by cuBLASLt.
    ///
    /// # Safety
    ///
    /// As for [`Gemm::run`].
    pub(super) unsafe fn run(&self, gemm: &Gemm, gpu: Gpu) -> Result<(), GemmError> {
        let Gemm { m, n, k, a, b, .. } = *gemm;
        let GemmInputs::Floats(dtype) = gemm.inputs else { return Err(GemmError::Refused("it has no FP8".into())) };
        let (data, c_data) = (data_type(dtype)?, data_type(gemm.c_dtype)?);
        let stride = |matrix: Matrix, sizes| int(matrix.in_memory(sizes)[2]);
        let (lda, ldb, ldc) = (stride(a, [m, k])?, stride(b, [k, n])?, stride(gemm.output(), [m, n])?);
        let (m, n, k) = (int(m)?, int(n)?, int(k)?);
        let is_added = gemm.plus.is_some() || gemm.bias.is_some();
        if is_added {
            // SAFETY: the caller guarantees valid addresses.
            unsafe { gemm.fill(gpu) }.map_err(|error| GemmError::Fatal(error.to_string()))?;
        }
        let (alpha, beta) = (gemm.factor, if is_added { 1.0f32 } else { 0.0 });
        // cuBLAS is column-major: a row-major c = a b is a column-major c^T = b^T a^T.
        // SAFETY: the handle is open, and the sizes and strides are those of the caller's matrices.
        let status = unsafe {
            sys::cublasGemmEx(
                self.0,
                operation(b),
                operation(a),
                n,
                m,
                k,
                (&raw const alpha).cast(),
                b.address as *const c_void,
                data,
                ldb,
                a.address as *const c_void,
                data,
                lda,
                (&raw const beta).cast(),
                gemm.c as *mut c_void,
                c_data,
                ldc,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DFALT,
            )
        };
        status.result().map_err(|error| GemmError::of_status(error.0))
    }
}

fn int(n: usize) -> Result<c_int, GemmError> {
    c_int::try_from(n).map_err(|_| GemmError::Refused(format!("it counts to 2^31 - 1, not to {n}")))
}

fn operation(matrix: Matrix) -> sys::cublasOperation_t {
    match matrix.is_transposed {
        true => sys::cublasOperation_t::CUBLAS_OP_T,
        false => sys::cublasOperation_t::CUBLAS_OP_N,
    }
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType, GemmError> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::BF16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        other => Err(GemmError::Refused(format!("it computes in f32, bf16 and f16, not {other:?}"))),
    }
}
