//! [`GroupedGemm`] by cuBLASLt's grouped layouts, whose sizes and addresses are arrays on the device.
//!
//! The functions and attributes are newer than the CUDA release that this crate is compiled for. They are looked up in
//! the loaded library.

use std::ffi::{c_int, c_void};
use std::sync::LazyLock;

use candle_core::cuda_backend::cudarc::cublaslt::result;
use candle_core::cuda_backend::cudarc::cublaslt::sys::{self, cublasLtMatmulAlgo_t};
use candle_core::{CudaDevice, DType, Error, Result};

use super::{Algorithm, CublasLt};
use crate::cuda::gemm::descriptors::{Description, Preference, WORKSPACE_BYTES, data_type};
use crate::cuda::gemm::grouped::{GroupedArrays, GroupedGemm, GroupedKey, GroupedOutput};
use crate::cuda::gemm::search::Reductions;
use crate::cuda::{DeviceAddress, capability};
use crate::nvidia;

/// First releases with grouped GEMMs that allow empty groups: on Hopper, and on Blackwell.
const MIN_VERSION: [usize; 2] = [13_04_00, 13_03_00];

/// CUBLASLT_MATMUL_PREF_GROUPED_AVERAGE_REDUCTION_DIM, _DESC_D_AVERAGE_ROWS and _DESC_D_AVERAGE_COLS. The header says
/// uint32_t; cuBLASLt 13.4.1 accepts 8 bytes only.
const AVERAGES: [c_int; 3] = [13, 14, 15];

type Status = c_int;

/// Functions of the library, as in cublasLt.h.
struct Functions {
    create_layout:
        unsafe extern "C" fn(*mut *mut c_void, c_int, c_int, *const c_void, *const c_void, *const c_void) -> Status,
    destroy_layout: unsafe extern "C" fn(*mut c_void) -> Status,
    set_preference: unsafe extern "C" fn(*mut c_void, c_int, *const c_void, usize) -> Status,
}

/// The functions; `None` if the library lacks one.
static FUNCTIONS: LazyLock<Option<Functions>> = LazyLock::new(|| {
    let library = nvidia::load("libcublasLt.so")?;
    // SAFETY: the types are those of cublasLt.h. The library stays loaded.
    unsafe {
        let functions = Functions {
            create_layout: *library.get(b"cublasLtGroupedMatrixLayoutCreate").ok()?,
            destroy_layout: *library.get(b"cublasLtMatrixLayoutDestroy").ok()?,
            set_preference: *library.get(b"cublasLtMatmulPreferenceSetAttribute").ok()?,
        };
        std::mem::forget(library);
        Some(functions)
    }
});

/// Computes a grouped GEMM by cuBLASLt; see [`GroupedGemm::run`].
///
/// # Safety
///
/// As for [`GroupedGemm::run`].
pub(in crate::cuda::gemm) unsafe fn run_grouped(gemm: &GroupedGemm, device: &CudaDevice) -> Result<()> {
    CublasLt::with(device, |library| {
        // SAFETY: the caller guarantees valid addresses.
        let ran = usable(device).and_then(|functions| unsafe { library.run_grouped(gemm, device, functions) });
        ran.map_err(|why| {
            Error::Msg(format!(
                "experts: cublas is requested but failed: {why}; choose `experts_implementation: fused` ({gemm:?})"
            ))
        })
    })
}

/// Returns the library's functions, or why it has no grouped GEMM for the device.
fn usable(device: &CudaDevice) -> std::result::Result<&'static Functions, String> {
    let [major, _] = capability(device)?;
    let least = match major {
        9 => MIN_VERSION[0],
        10 | 11 => MIN_VERSION[1],
        _ => return Err(format!("it needs Hopper or Blackwell, not compute capability {major}.x")),
    };
    // SAFETY: the library is loaded.
    let version = unsafe { sys::cublasLtGetVersion() };
    let [[wanted_major, wanted_minor], [has_major, has_minor]] = [least, version].map(|v| [v / 10_000, v / 100 % 100]);
    match &*FUNCTIONS {
        Some(functions) if version >= least => Ok(functions),
        _ => Err(format!("it needs cuBLAS {wanted_major}.{wanted_minor} or newer, not {has_major}.{has_minor}")),
    }
}

/// Layouts of all groups' matrices, column-major: a row-major matrix is its transpose.
struct GroupedLayout<'f> {
    layout: *mut c_void,
    functions: &'f Functions,
}

impl<'f> GroupedLayout<'f> {
    /// Describes row-major matrices with these arrays of rows and columns.
    fn new(
        functions: &'f Functions,
        dtype: DType,
        e: usize,
        [rows, columns]: [DeviceAddress; 2],
    ) -> std::result::Result<Self, String> {
        let data = data_type(dtype).map_err(|error| error.to_string())?;
        let mut layout = std::ptr::null_mut();
        let [rows, columns] = [rows, columns].map(|at| at as *const c_void);
        // SAFETY: the arrays have e elements; the library reads them when it computes.
        let status =
            unsafe { (functions.create_layout)(&raw mut layout, data as c_int, e as c_int, columns, rows, columns) };
        match status {
            0 => Ok(Self { layout, functions }),
            status => Err(format!("its layout: status {status}")),
        }
    }

    fn handle(&self) -> sys::cublasLtMatrixLayout_t {
        self.layout.cast()
    }
}

impl Drop for GroupedLayout<'_> {
    fn drop(&mut self) {
        // SAFETY: it was created once and is destroyed once.
        let _ = unsafe { (self.functions.destroy_layout)(self.layout) };
    }
}

/// Descriptors of a grouped GEMM. cuBLASLt is column-major, so it computes the transposed output.
struct Problem<'f> {
    description: Description,
    layouts: [GroupedLayout<'f>; 3],
    /// Arrays of addresses: of left operand, right operand and output.
    operands: [DeviceAddress; 3],
    /// Average number of terms, and of rows and columns of the transposed output.
    averages: [i64; 3],
}

impl<'f> Problem<'f> {
    fn new(gemm: &GroupedGemm, functions: &'f Functions) -> std::result::Result<Self, String> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let GroupedGemm { output, dtype, output_dtype, e, n_in, n_out, .. } = *gemm;
        let GroupedArrays { x, y, w, n_in: ins, n_out: outs, n_rows, .. } = gemm.arrays;
        let layout = |dtype, sizes| GroupedLayout::new(functions, dtype, e, sizes);
        let (of_x, of_y, of_w) = ([n_rows, ins], [n_rows, outs], [outs, ins]);
        let average = GroupedKey::of(gemm).n_average;
        let [average, n_in, n_out] = [average, n_in, n_out].map(|n| n as i64);
        let (transposed, sizes, operands, averages) = match output {
            GroupedOutput::Y => ([1, 0], [of_w, of_x, of_y], [w, x, y], [n_in, n_out, average]),
            GroupedOutput::X => ([0, 0], [of_w, of_y, of_x], [w, y, x], [n_out, n_in, average]),
            GroupedOutput::W => ([0, 1], [of_x, of_y, of_w], [x, y, w], [average, n_in, n_out]),
        };
        let description = Description::new().map_err(|error| format!("{error:?}"))?;
        let on_device = sys::cublasLtPointerMode_t::CUBLASLT_POINTER_MODE_DEVICE;
        // SAFETY: every attribute is set with a value of its type.
        unsafe {
            description
                .set::<i32>(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposed[0])
                .and_then(|()| description.set::<i32>(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &transposed[1]))
                .and_then(|()| description.set(Attribute::CUBLASLT_MATMUL_DESC_POINTER_MODE, &on_device))
                .map_err(|error| format!("{error:?}"))?;
        }
        let layouts = [layout(dtype, sizes[0])?, layout(dtype, sizes[1])?, layout(output_dtype, sizes[2])?];
        Ok(Self { description, layouts, operands, averages })
    }

    /// Returns the algorithm that the heuristic expects to be fastest; if possible, one that sums in f32.
    fn algorithm(
        &self,
        handle: sys::cublasLtHandle_t,
        functions: &Functions,
    ) -> std::result::Result<Algorithm, String> {
        let within = |reductions| self.algorithm_within(handle, functions, reductions);
        within(Reductions::InF32).or_else(|_| within(Reductions::Any))
    }

    fn algorithm_within(
        &self,
        handle: sys::cublasLtHandle_t,
        functions: &Functions,
        reductions: Reductions,
    ) -> std::result::Result<Algorithm, String> {
        let preference = Preference::of_workspace().map_err(|error| format!("{error:?}"))?;
        preference.limit_reductions(reductions).map_err(|error| format!("{error:?}"))?;
        for (attribute, average) in AVERAGES.iter().zip(&self.averages) {
            let value = std::ptr::from_ref(average).cast();
            // SAFETY: the attributes are i64.
            let status =
                unsafe { (functions.set_preference)(preference.0.cast(), *attribute, value, size_of::<i64>()) };
            if status != 0 {
                return Err(format!("an average size: status {status}"));
            }
        }
        let [first, second, output] = self.layouts.each_ref().map(GroupedLayout::handle);
        let mut found = std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut n_found = 0;
        // SAFETY: the descriptors outlive the call, and there is memory for one result.
        let (status, found) = unsafe {
            let (description, result) = (self.description.0, found.as_mut_ptr());
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                description,
                first,
                second,
                output,
                output,
                preference.0,
                1,
                result,
                &raw mut n_found,
            );
            (status, found.assume_init())
        };
        status.result().map_err(|error| format!("its heuristic: {:?}", error.0))?;
        match n_found {
            1 => Ok(Algorithm(found.algo.data)),
            _ => Err("its heuristic has no algorithm".to_string()),
        }
    }
}

impl CublasLt {
    /// Computes a grouped GEMM with the algorithm of its key, which is looked up on first use.
    ///
    /// # Safety
    ///
    /// As for [`GroupedGemm::run`].
    unsafe fn run_grouped(
        &mut self,
        gemm: &GroupedGemm,
        device: &CudaDevice,
        functions: &Functions,
    ) -> std::result::Result<(), String> {
        let (handle, key) = (self.handle, GroupedKey::of(gemm));
        let problem = Problem::new(gemm, functions)?;
        let algorithm = match self.grouped.get(&key) {
            Some(algorithm) => *algorithm,
            None => {
                let algorithm = problem.algorithm(handle, functions)?;
                self.grouped.insert(key, algorithm);
                algorithm
            }
        };
        let workspace = Self::stream_of(&mut self.streams, device)?.workspace(device);
        let algorithm = cublasLtMatmulAlgo_t { data: algorithm.0 };
        let [first, second, output] = problem.layouts.each_ref().map(GroupedLayout::handle);
        let [a, b, c] = problem.operands;
        // SAFETY: the layouts are those of the caller's matrices; the workspace belongs to this stream.
        let status = unsafe {
            result::matmul(
                handle,
                problem.description.0,
                gemm.arrays.alpha as *const c_void,
                gemm.arrays.beta as *const c_void,
                a as *const c_void,
                first,
                b as *const c_void,
                second,
                c as *const c_void,
                output,
                c as *mut c_void,
                output,
                &raw const algorithm,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                device.cuda_stream().cu_stream().cast(),
            )
        };
        status.map_err(|error| format!("{:?}", error.0))
    }
}
