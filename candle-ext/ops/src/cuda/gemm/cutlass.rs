//! [`GroupedProblems`] by CUTLASS, through `cutlass/*.cu`. The host reads no size of a group.

use std::ffi::{CStr, c_char, c_int, c_void};

use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute;
use candle_core::{CudaDevice, DType, Error, Result};

use super::grouped::{GroupedOutput, GroupedProblems, ProblemArrays};
use crate::cuda::{DeviceAddress, Gpu, Out};
use crate::grouped_tile::GroupedTile;

/// Size of the error message buffer in bytes.
const MESSAGE: usize = 512;

/// A call. Same layout as in gemm.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct GroupedCall {
    sizes: DeviceAddress,
    addresses: [DeviceAddress; 3],
    strides: [DeviceAddress; 3],
    /// Zero in a call that only queries the workspace's size.
    workspace: DeviceAddress,
    stream: *mut c_void,
    n_groups: i32,
    n_multiprocessors: i32,
    beta: f32,
    is_wide: i32,
}

unsafe extern "C" {
    fn candlewick_cutlass_multiply(
        call: *const GroupedCall,
        right_is_transposed: c_int,
        workspace_bytes: *mut usize,
        error: *mut c_char,
        size: usize,
    ) -> c_int;
    fn candlewick_cutlass_grad_w(
        call: *const GroupedCall,
        is_f32: c_int,
        workspace_bytes: *mut usize,
        error: *mut c_char,
        size: usize,
    ) -> c_int;
}

/// Computes a grouped GEMM by CUTLASS; see [`GroupedProblems::run`].
///
/// # Safety
///
/// As for [`GroupedProblems::run`].
pub(super) unsafe fn run(problems: &GroupedProblems, device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    let failed = |error| Error::Msg(format!("experts: CUDA failed before CUTLASS ran: {error}"));
    // The CUDA runtime library uses the context of the thread.
    stream.context().bind_to_thread().map_err(failed)?;
    let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let n_multiprocessors = stream.context().attribute(count).map_err(failed)?;
    let ProblemArrays { sizes, addresses, strides } = problems.arrays;
    let call = GroupedCall {
        sizes,
        addresses,
        strides,
        workspace: 0,
        stream: stream.cu_stream().cast(),
        n_groups: problems.e as i32,
        n_multiprocessors,
        beta: if problems.adds { 1.0 } else { 0.0 },
        is_wide: i32::from(problems.tile == GroupedTile::Wide),
    };
    // SAFETY: the caller guarantees valid addresses. The workspace has the size that CUTLASS requires; it is freed in the
    // order of the stream.
    unsafe {
        let workspace_bytes = submit(problems, &call)?;
        let workspace = Out::new(Gpu::Device(device), DType::U8, workspace_bytes)?;
        submit(problems, &GroupedCall { workspace: workspace.address, ..call })?;
    }
    Ok(())
}

/// Launches the kernel if the call has a workspace. Returns the workspace's size.
///
/// # Safety
///
/// As for [`run`]; the workspace must have the returned size.
unsafe fn submit(problems: &GroupedProblems, call: &GroupedCall) -> Result<usize> {
    let (mut workspace_bytes, mut message) = (0, [0; MESSAGE]);
    let (bytes, text) = (&raw mut workspace_bytes, message.as_mut_ptr());
    // SAFETY: the caller guarantees valid addresses; the size and the message can be written.
    let status = unsafe {
        match problems.output {
            GroupedOutput::Y => candlewick_cutlass_multiply(call, 1, bytes, text, MESSAGE),
            GroupedOutput::X => candlewick_cutlass_multiply(call, 0, bytes, text, MESSAGE),
            GroupedOutput::W => {
                let is_f32 = c_int::from(problems.output_dtype == DType::F32);
                candlewick_cutlass_grad_w(call, is_f32, bytes, text, MESSAGE)
            }
        }
    };
    if status == 0 {
        return Ok(workspace_bytes);
    }
    // SAFETY: the message ends with a zero: the buffer was zeros, and snprintf ends with one.
    let why = unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy();
    Err(Error::Msg(format!("experts: CUTLASS failed: {why}; choose `experts_implementation: fused` ({problems:?})")))
}
