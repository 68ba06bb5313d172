//! Descriptors of cuBLASLt: of a GEMM and of the algorithms requested for it.

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublaslt::result::{self, CublasError};
use candle_core::cuda_backend::cudarc::cublaslt::sys::{self, cudaDataType};

use super::operands::{Fp8Accumulation, Fp8Inputs, Gemm, GemmInputs, Matrix, Scaling};
use super::search::{GemmError, Limits, Reductions};
use crate::fp8::Fp8Format;

/// Workspace size in bytes that NVIDIA recommends for Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// Reduction mask: split-K sums in f32. The other schemes round partial sums to the output's dtype.
const SUMS_IN_F32: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

/// Reduction mask: no split-K.
const NO_PARTIAL_SUMS: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;

/// Descriptors of a GEMM. cuBLASLt is column-major: a row-major c = a b is a column-major c^T = b^T a^T.
pub(super) struct Problem {
    pub(super) description: Description,
    /// Layout of b.
    pub(super) first: Layout,
    /// Layout of a.
    pub(super) second: Layout,
    /// Layout of c and the addend.
    pub(super) output: Layout,
}

impl Problem {
    pub(super) fn new(gemm: &Gemm) -> Result<Self, GemmError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let Gemm { m, n, k, a, b, .. } = *gemm;
        let ([of_a, of_b], c_data) = (input_types(gemm.inputs)?, data_type(gemm.c_dtype)?);
        let description = Description::new().map_err(|error| GemmError::of_status(error.0))?;
        // SAFETY: every attribute is set with a value of its type.
        unsafe {
            description
                .set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(b))
                .map_err(|error| GemmError::of_status(error.0))?;
            description
                .set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(a))
                .map_err(|error| GemmError::of_status(error.0))?;
            if gemm.bias.is_some() {
                let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
                description
                    .set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)
                    .map_err(|error| GemmError::of_status(error.0))?;
            }
            if let GemmInputs::Fp8(inputs) = gemm.inputs {
                description.set_fp8(inputs).map_err(|error| GemmError::of_status(error.0))?;
            }
        }
        Ok(Self {
            description,
            first: Layout::of(b, [k, n], of_b).map_err(|error| GemmError::of_status(error.0))?,
            second: Layout::of(a, [m, k], of_a).map_err(|error| GemmError::of_status(error.0))?,
            output: Layout::of(gemm.output(), [m, n], c_data).map_err(|error| GemmError::of_status(error.0))?,
        })
    }

    /// Sets the addresses of bias and inverse scales, which differ from call to call.
    pub(super) fn set_addresses(&self, gemm: &Gemm) -> Result<(), GemmError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let mut addresses = Vec::new();
        addresses.extend(gemm.bias.map(|bias| (Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)));
        if let GemmInputs::Fp8(Fp8Inputs { a, b, .. }) = gemm.inputs {
            addresses.push((Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b.scale_inv));
            addresses.push((Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a.scale_inv));
        }
        for (attribute, address) in addresses {
            // SAFETY: the attribute is an address.
            unsafe { self.description.set(attribute, &address) }.map_err(|error| GemmError::of_status(error.0))?;
        }
        Ok(())
    }
}

/// Returns the cublasOperation_t: CUBLAS_OP_N is 0, CUBLAS_OP_T is 1.
fn operation(matrix: Matrix) -> i32 {
    i32::from(matrix.is_transposed)
}

/// Returns the types of a and b.
fn input_types(inputs: GemmInputs) -> Result<[cudaDataType; 2], GemmError> {
    match inputs {
        GemmInputs::Floats(dtype) => Ok([data_type(dtype)?; 2]),
        GemmInputs::Fp8(Fp8Inputs { a, b, .. }) => Ok([a, b].map(|input| match input.format {
            Fp8Format::E4m3 => cudaDataType::CUDA_R_8F_E4M3,
            Fp8Format::E5m2 => cudaDataType::CUDA_R_8F_E5M2,
        })),
    }
}

pub(super) fn data_type(dtype: DType) -> Result<cudaDataType, GemmError> {
    match dtype {
        DType::F32 => Ok(cudaDataType::CUDA_R_32F),
        DType::BF16 => Ok(cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(cudaDataType::CUDA_R_16F),
        other => Err(GemmError::Refused(format!("it computes in f32, bf16 and f16, not {other:?}"))),
    }
}

pub(super) struct Layout(pub(super) sys::cublasLtMatrixLayout_t);

impl Layout {
    /// Describes a matrix of [rows, columns] operand size as a column-major layout.
    fn of(matrix: Matrix, sizes: [usize; 2], data: cudaDataType) -> Result<Self, CublasError> {
        let [rows, columns, stride] = matrix.in_memory(sizes);
        result::create_matrix_layout(data, columns as u64, rows as u64, stride as i64).map(Self)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it was created once and is destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

pub(super) struct Description(pub(super) sys::cublasLtMatmulDesc_t);

impl Description {
    pub(super) fn new() -> Result<Self, CublasError> {
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        result::create_matmul_desc(compute, cudaDataType::CUDA_R_32F).map(Self)
    }

    /// Sets the accumulation and the scaling modes of FP8 operands.
    ///
    /// Libraries before 12.8 have no scaling modes: one scale per operand is their default, so it is not set.
    fn set_fp8(&self, Fp8Inputs { a, b, accumulation }: Fp8Inputs) -> Result<(), CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let is_fast = i8::from(accumulation == Fp8Accumulation::Fast);
        // SAFETY: the attribute is an int8_t.
        unsafe { self.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &is_fast)? };
        for (attribute, scaling) in [
            (Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, b.scaling),
            (Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, a.scaling),
        ] {
            let mode = match scaling {
                Scaling::Tensor => continue,
                Scaling::Vector128 => sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                Scaling::Block128 => sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
            };
            // SAFETY: the attribute is an int32_t.
            unsafe { self.set(attribute, &(mode as i32))? };
        }
        Ok(())
    }

    /// Sets an attribute.
    ///
    /// # Safety
    ///
    /// `value` must have the attribute's type.
    pub(super) unsafe fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), CublasError> {
        // SAFETY: the value is read during the call.
        unsafe {
            result::set_matmul_desc_attribute(self.0, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
        }
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: it was created once and is destroyed once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

pub(super) struct Preference(pub(super) sys::cublasLtMatmulPreference_t);

impl Preference {
    pub(super) fn of(limits: &Limits) -> Result<Self, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self::of_workspace()?;
        let [a, b, written, plus] = limits.alignments;
        // SAFETY: every attribute is set with a value of its type.
        unsafe {
            preference.limit_reductions(limits.reductions)?;
            preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &b)?;
            preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &a)?;
            preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &plus)?;
            preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &written)?;
        }
        Ok(preference)
    }

    /// Limits the reduction schemes of split-K sums.
    pub(super) fn limit_reductions(&self, reductions: Reductions) -> Result<(), CublasError> {
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        match reductions {
            // SAFETY: the attribute is a mask of 32 bits.
            Reductions::InF32 => unsafe { self.set(attribute, &SUMS_IN_F32) },
            // SAFETY: as above.
            Reductions::Unsplit => unsafe { self.set(attribute, &NO_PARTIAL_SUMS) },
            Reductions::Any => Ok(()),
        }
    }

    /// Limits algorithms to [`WORKSPACE_BYTES`] alone.
    pub(super) fn of_workspace() -> Result<Self, CublasError> {
        let preference = result::create_matmul_pref().map(Self)?;
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: the attribute is a size.
        unsafe { preference.set(attribute, &WORKSPACE_BYTES)? };
        Ok(preference)
    }

    /// Sets an attribute.
    ///
    /// # Safety
    ///
    /// `value` must have the attribute's type.
    unsafe fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), CublasError> {
        // SAFETY: the value is read during the call.
        unsafe {
            result::set_matmul_pref_attribute(self.0, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
        }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: it was created once and is destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
