//! [`Gemm`] by cuBLASLt: its plans are made once for each shape, format and alignment.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::DeviceId;
use candle_core::cuda_backend::cudarc::cublaslt::result::{self, CublasError};
use candle_core::cuda_backend::cudarc::cublaslt::sys::{self, cublasLtMatmulAlgo_t, cudaDataType};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{CudaDevice, DType, Error, Result};

use super::gemm::{Gemm, Matrix};

/// As NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// What a plan may do with sums of parts of k: add them in f32. The other ways round them to the output's format first.
const SUMS_IN_F32: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

/// The alignment that a plan may count on at most.
const MAX_ALIGNMENT: u64 = 256;

static LIBRARIES: LazyLock<Mutex<HashMap<DeviceId, Library>>> = LazyLock::new(Mutex::default);

struct Library {
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    algorithms: HashMap<Key, cublasLtMatmulAlgo_t>,
}

// SAFETY: cuBLASLt's handle may be used from any thread, and the lock lets one at a time.
unsafe impl Send for Library {}

/// What an algorithm is chosen for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 3],
    strides: [Option<usize>; 3],
    dtypes: [DType; 2],
    transposed: [bool; 2],
    /// Whether something is added, and whether that is c.
    plus: [bool; 2],
    has_bias: bool,
    alignments: [u32; 4],
}

/// See [`Gemm::run`].
///
/// # Safety
///
/// As there.
pub(super) unsafe fn run(gemm: &Gemm, device: &CudaDevice) -> Result<()> {
    let failed = |error: &dyn std::fmt::Display| Error::Msg(format!("cuBLASLt failed at {gemm:?}: {error}"));
    device.cuda_stream().context().bind_to_thread().map_err(|error| failed(&error))?;
    let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
    let library = match libraries.entry(device.id()) {
        std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
        std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Library::open(device)?),
    };
    // SAFETY: the caller answers for the addresses.
    unsafe { library.run(gemm, device) }.map_err(|error| failed(&error))
}

impl Library {
    fn open(device: &CudaDevice) -> Result<Self> {
        let handle = result::create_handle().map_err(|error| Error::Msg(format!("cuBLASLt cannot start: {error}")))?;
        // SAFETY: a workspace is written before it is read.
        let workspace = unsafe { device.alloc::<u8>(WORKSPACE_BYTES)? };
        Ok(Self { handle, workspace, algorithms: HashMap::new() })
    }

    /// cuBLASLt thinks in columns: a row-major c = a b is a column-major c^T = b^T a^T.
    ///
    /// # Safety
    ///
    /// As for [`Gemm::run`].
    unsafe fn run(&mut self, gemm: &Gemm, device: &CudaDevice) -> std::result::Result<(), CublasError> {
        let Gemm { m, n, k, a, b, .. } = *gemm;
        let (data, c_data) = (data_type(gemm.dtype)?, data_type(gemm.c_dtype)?);
        let first = Layout::of(b, [k, n], data)?;
        let second = Layout::of(a, [m, k], data)?;
        let output = Layout::of(gemm.output(), [m, n], c_data)?;
        let description = Description::new()?;
        // SAFETY: every attribute is set with a value of its type.
        unsafe {
            use sys::cublasLtMatmulDescAttributes_t as Attribute;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(b))?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(a))?;
            if let Some(bias) = gemm.bias {
                let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
                description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
                description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
            }
        }
        let key = key(gemm);
        let algorithm = match self.algorithms.get(&key) {
            Some(algorithm) => *algorithm,
            None => {
                let algorithm = self.choose(&description, [&first, &second, &output], &key)?;
                self.algorithms.insert(key, algorithm);
                algorithm
            }
        };
        let (alpha, beta) = (1.0f32, if gemm.plus.is_some() { 1.0f32 } else { 0.0 });
        let stream = device.cuda_stream();
        let (workspace, _guard) = self.workspace.device_ptr(&stream);
        // SAFETY: the layouts are those of the caller's matrices; the workspace belongs to this stream.
        unsafe {
            result::matmul(
                self.handle,
                description.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                b.address as *const c_void,
                first.0,
                a.address as *const c_void,
                second.0,
                gemm.plus.unwrap_or(gemm.c) as *const c_void,
                output.0,
                gemm.c as *mut c_void,
                output.0,
                &raw const algorithm,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream.cu_stream().cast(),
            )
        }
    }

    fn choose(
        &self,
        description: &Description,
        [first, second, output]: [&Layout; 3],
        key: &Key,
    ) -> std::result::Result<cublasLtMatmulAlgo_t, CublasError> {
        let preference = Preference::new()?;
        let [a, b, written, plus] = key.alignments;
        // SAFETY: every attribute is set with a value of its type; the descriptors live until the end.
        unsafe {
            use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
            preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES)?;
            preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &SUMS_IN_F32)?;
            preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &b)?;
            preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &a)?;
            preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &plus)?;
            preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &written)?;
            let (handle, description) = (self.handle, description.0);
            result::get_matmul_algo_heuristic(handle, description, first.0, second.0, output.0, output.0, preference.0)
                .map(|found| found.algo)
        }
    }
}

fn key(gemm: &Gemm) -> Key {
    let alignment = |address: u64| (1u64 << address.trailing_zeros().min(8)).min(MAX_ALIGNMENT) as u32;
    // There is no preference for the bias; it is read as the output is written.
    let output = gemm.bias.map_or(gemm.c, |bias| gemm.c | bias);
    Key {
        sizes: [gemm.m, gemm.n, gemm.k],
        strides: [gemm.a.stride, gemm.b.stride, gemm.c_stride],
        dtypes: [gemm.dtype, gemm.c_dtype],
        transposed: [gemm.a.is_transposed, gemm.b.is_transposed],
        plus: [gemm.plus.is_some(), gemm.plus == Some(gemm.c)],
        has_bias: gemm.bias.is_some(),
        alignments: [gemm.a.address, gemm.b.address, output, gemm.plus.unwrap_or(gemm.c)].map(alignment),
    }
}

/// cublasOperation_t: CUBLAS_OP_N is 0, CUBLAS_OP_T is 1.
fn operation(matrix: Matrix) -> i32 {
    i32::from(matrix.is_transposed)
}

fn data_type(dtype: DType) -> std::result::Result<cudaDataType, CublasError> {
    match dtype {
        DType::F32 => Ok(cudaDataType::CUDA_R_32F),
        DType::BF16 => Ok(cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(cudaDataType::CUDA_R_16F),
        _ => Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)),
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// A matrix that is [rows, columns] as the product reads it, as it lies in memory, in columns.
    fn of(matrix: Matrix, sizes: [usize; 2], data: cudaDataType) -> std::result::Result<Self, CublasError> {
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

struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new() -> std::result::Result<Self, CublasError> {
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        result::create_matmul_desc(compute, cudaDataType::CUDA_R_32F).map(Self)
    }

    /// # Safety
    ///
    /// `value` must have the attribute's type.
    unsafe fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> std::result::Result<(), CublasError> {
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

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> std::result::Result<Self, CublasError> {
        result::create_matmul_pref().map(Self)
    }

    /// # Safety
    ///
    /// `value` must have the attribute's type.
    unsafe fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> std::result::Result<(), CublasError> {
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
