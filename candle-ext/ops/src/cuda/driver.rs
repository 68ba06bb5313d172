//! Kernels on a GPU, launched through candle's cudarc.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::sys::{self, CUdevice_attribute, CUfunction_attribute};
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaModule, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDType, DeviceId};
use candle_core::{CudaDevice, CudaStorage, DType, Error, Result, bail};
use half::{bf16, f16};

use super::arg::{Arg, Blocks, DeviceAddress};
use super::check::Signature;
use super::class::Class;
use super::compiled::Kernels;
use crate::accelerator::driver_has;
use crate::replaced;

/// Shared memory per block that needs no opt-in.
const UNASKED_SHARED_BYTES: usize = 48 << 10;

type Modules = HashMap<(DeviceId, &'static str), Arc<CudaModule>>;

static MODULES: LazyLock<Mutex<Modules>> = LazyLock::new(Mutex::default);

/// Launches the kernel at a position in the signatures; see [`Kernels::launch`].
///
/// # Safety
///
/// As for [`Kernels::launch`].
pub(super) unsafe fn launch(
    kernels: &Kernels,
    device: &CudaDevice,
    position: usize,
    blocks: Blocks,
    args: &[Arg],
) -> Result<()> {
    let name = kernels.signatures[position].name;
    let failed = |error: &dyn Display| Error::Msg(format!("{}: CUDA failed at {name}: {error}", kernels.op));
    let Blocks { grid, threads, shared_bytes } = blocks;
    let stream = device.cuda_stream();
    stream.context().bind_to_thread().map_err(|error| failed(&error))?;
    let function = function(kernels, device, position)?;
    if shared_bytes > UNASKED_SHARED_BYTES {
        let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(most, shared_bytes as i32).map_err(|error| failed(&error))?;
    }
    let [x, y, z] = grid.map(|n| n as u32);
    let config =
        LaunchConfig { grid_dim: (x, y, z), block_dim: (threads as u32, 1, 1), shared_mem_bytes: shared_bytes as u32 };
    let mut builder = stream.launch_builder(function);
    for arg in args {
        match arg {
            Arg::Address(value) | Arg::U64(value) => builder.arg(value),
            Arg::I32(value) => builder.arg(value),
            Arg::I64(value) => builder.arg(value),
            Arg::F32(value) => builder.arg(value),
            Arg::F64(value) => builder.arg(value),
        };
    }
    // SAFETY: the caller guarantees valid arguments.
    unsafe { builder.launch(config) }.map_err(|error| failed(&error))?;
    Ok(())
}

/// Returns a kernel; loads it on first use.
fn function<'a>(kernels: &'a Kernels, device: &CudaDevice, position: usize) -> Result<&'a CudaFunction> {
    let ordinal = device.cuda_stream().context().ordinal();
    kernels.functions.get_or_load(ordinal, position, kernels.signatures.len(), || {
        let name = kernels.signatures[position].name;
        let function = module(kernels, device)?.load_function(name);
        function.map_err(|error| Error::Msg(format!("{}: CUDA has no kernel {name}: {error}", kernels.op)))
    })
}

fn module(kernels: &Kernels, device: &CudaDevice) -> Result<Arc<CudaModule>> {
    let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(module) = modules.get(&(device.id(), kernels.op)) {
        return Ok(module.clone());
    }
    let replaced = replaced::fatbin(kernels.op)?;
    let is_replaced = replaced.is_some();
    let fatbin = replaced.unwrap_or_else(|| kernels.fatbin.to_vec());
    let loaded = device.cuda_stream().context().load_module(Ptx::from_binary(fatbin));
    let module =
        loaded.map_err(|error| Error::Msg(format!("{}: CUDA cannot load its kernels: {error}", kernels.op)))?;
    // Check all kernels in tests, and those that replace built-in ones. A stand-in for the driver does not know
    // parameters.
    if (is_replaced || cfg!(feature = "emulate")) && driver_has("cuFuncGetParamInfo") {
        for signature in kernels.signatures {
            check_sizes(kernels.op, signature, &module)?;
        }
    }
    modules.insert((device.id(), kernels.op), module.clone());
    Ok(module)
}

/// Fails unless the compiled kernel's parameters have the declared sizes.
fn check_sizes(op: &str, signature: &Signature, module: &Arc<CudaModule>) -> Result<()> {
    let Signature { name, parameters, .. } = signature;
    let failed = |error: &dyn Display| Error::Msg(format!("{op}: CUDA failed to query {name}: {error}"));
    let function = module.load_function(name).map_err(|error| failed(&error))?;
    let mut sizes = Vec::new();
    for index in 0.. {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded, and both numbers can be written.
        let result = unsafe { sys::cuFuncGetParamInfo(function.cu_function(), index, &raw mut offset, &raw mut size) };
        match result {
            sys::CUresult::CUDA_SUCCESS => sizes.push(size),
            // Past the last parameter.
            sys::CUresult::CUDA_ERROR_INVALID_VALUE => break,
            error => return Err(failed(&format!("{error:?}"))),
        }
    }
    let wanted: Vec<usize> = parameters.iter().map(|class| bytes_of(*class)).collect();
    if sizes != wanted {
        bail!(
            "{op}: {name} was compiled with parameters of {sizes:?} bytes, and this program passes {wanted:?}: compile it \
               from the program's own commit with scripts/build-kernels"
        )
    }
    Ok(())
}

/// Returns the compute capability of a device, such as [9, 0].
pub(super) fn capability(device: &CudaDevice) -> std::result::Result<[i32; 2], String> {
    let attribute = |attribute| device.cuda_stream().context().attribute(attribute).map_err(|error| error.to_string());
    Ok([
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ])
}

fn bytes_of(class: Class) -> usize {
    match class {
        Class::Int32 | Class::Float32 => 4,
        Class::Pointer | Class::Int64 | Class::Float64 => 8,
    }
}

/// Returns the address of a storage's first element.
pub(super) fn base(op: &str, storage: &CudaStorage) -> Result<DeviceAddress> {
    match storage.dtype() {
        DType::F32 => typed::<f32>(storage),
        DType::BF16 => typed::<bf16>(storage),
        DType::F16 => typed::<f16>(storage),
        DType::U32 => typed::<u32>(storage),
        DType::I64 => typed::<i64>(storage),
        DType::F64 => typed::<f64>(storage),
        DType::U8 => typed::<u8>(storage),
        other => bail!("{op}: there is no kernel for {other:?}"),
    }
}

fn typed<T: CudaDType + DeviceRepr>(storage: &CudaStorage) -> Result<DeviceAddress> {
    let slice = storage.as_cuda_slice::<T>()?;
    let (address, _guard) = slice.device_ptr(slice.stream());
    Ok(address)
}

/// Allocates elements without initialising them.
pub(super) fn alloc(device: &CudaDevice, dtype: DType, len: usize) -> Result<CudaStorage> {
    fn typed<T: CudaDType + DeviceRepr>(device: &CudaDevice, len: usize) -> Result<CudaStorage> {
        // SAFETY: nothing reads the elements before a kernel has written them, as `Out::new` demands.
        let slice = unsafe { device.alloc::<T>(len.max(1)) };
        let slice = slice.map_err(|error| Error::Msg(format!("allocate {} bytes: {error}", len * size_of::<T>())))?;
        #[cfg(feature = "emulate")]
        super::poison::fill(device, &slice)?;
        Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
    }
    match dtype {
        DType::F32 => typed::<f32>(device, len),
        DType::BF16 => typed::<bf16>(device, len),
        DType::F16 => typed::<f16>(device, len),
        DType::F64 => typed::<f64>(device, len),
        DType::I64 => typed::<i64>(device, len),
        DType::U32 => typed::<u32>(device, len),
        DType::U8 => typed::<u8>(device, len),
        other => bail!("there is no kernel that writes {other:?}"),
    }
}
