//! Compute device of a run: selected by name, opened once.

use std::fmt;
use std::str::FromStr;

use candle_core::{Device, Result, bail};

#[cfg(feature = "cuda")]
use crate::nvidia;

/// Compute device by name: `auto`, `cpu`, `cuda` or `cuda:1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU if the build has the `cuda` feature and a GPU is usable; else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU with this ordinal among the visible ones.
    Cuda(usize),
}

impl DeviceChoice {
    /// Opens the device. A GPU gets one stream; its memory pool keeps freed memory for reuse.
    pub fn open(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Auto => match gpu_unavailable_reason() {
                Some(why) => {
                    if is_gpu_there() {
                        tracing::warn!("the CPU computes: {why}");
                    }
                    Ok(Device::Cpu)
                }
                None => gpu(0),
            },
            Self::Cuda(ordinal) => match gpu_unavailable_reason() {
                Some(why) => bail!("open {self}: {why}"),
                None => gpu(ordinal),
            },
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let ordinal = || text.strip_prefix("cuda:")?.parse().ok().map(Self::Cuda);
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => ordinal().ok_or_else(|| format!("expected auto, cpu, cuda or cuda:N, found `{text}`")),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Returns the reason why no GPU is usable; `None` if one is.
#[cfg(not(feature = "cuda"))]
pub fn gpu_unavailable_reason() -> Option<String> {
    Some("this program was built without the cuda feature; scripts/build-gpu builds one with it".into())
}

/// Returns the reason why no GPU is usable; `None` if one is.
#[cfg(feature = "cuda")]
pub fn gpu_unavailable_reason() -> Option<String> {
    why_none_is_there().or_else(|| too_old(driver_release()?, COMPILED_FOR)).or_else(nvidia::missing)
}

/// Returns true if the machine has a GPU, usable or not.
#[cfg(not(feature = "cuda"))]
fn is_gpu_there() -> bool {
    false
}

/// Returns true if the machine has a GPU, usable or not.
#[cfg(feature = "cuda")]
fn is_gpu_there() -> bool {
    why_none_is_there().is_none()
}

#[cfg(feature = "cuda")]
fn why_none_is_there() -> Option<String> {
    use candle_core::cuda_backend::cudarc::driver::CudaContext;
    // cudarc panics if the driver's library is missing, so look for the library first.
    if driver().is_none() {
        return Some("there is no NVIDIA driver here (libcuda.so.1 cannot be loaded)".into());
    }
    match CudaContext::device_count() {
        Ok(0) => Some("the NVIDIA driver sees no GPU; look at CUDA_VISIBLE_DEVICES".into()),
        Ok(_) => None,
        Err(error) => Some(format!("the NVIDIA driver does not start: {error}")),
    }
}

/// CUDA release of the compiler that built the kernels: 13000 is 13.0.
#[cfg(feature = "cuda")]
const COMPILED_FOR: i32 = match i32::from_str_radix(env!("CANDLEWICK_CUDA_RELEASE"), 10) {
    Ok(release) => release,
    Err(_) => panic!("build.rs sets a number"),
};

#[cfg(feature = "cuda")]
fn driver() -> Option<libloading::Library> {
    // SAFETY: the driver's library may be loaded by any program.
    ["libcuda.so.1", "libcuda.so"].iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok())
}

/// Returns true if the driver has a function of this name. cudarc panics where one is missing.
#[cfg(feature = "cuda")]
pub(crate) fn driver_has(function: &str) -> bool {
    // SAFETY: the address is not used.
    driver().is_some_and(|driver| unsafe { driver.get::<*const ()>(function.as_bytes()) }.is_ok())
}

/// Returns the latest CUDA release that the driver supports: 13000 is 13.0.
#[cfg(feature = "cuda")]
fn driver_release() -> Option<i32> {
    let (driver, mut release) = (driver()?, 0);
    // SAFETY: the function has this type, and writes a number.
    let status =
        unsafe { driver.get::<unsafe extern "C" fn(*mut i32) -> i32>(b"cuDriverGetVersion").ok()?(&raw mut release) };
    (status == 0).then_some(release)
}

/// Returns an error message if the driver's CUDA release is too old to load the kernels.
#[cfg(any(feature = "cuda", test))]
fn too_old(driver: i32, kernels: i32) -> Option<String> {
    let name = |release: i32| format!("{}.{}", release / 1000, release % 1000 / 10);
    (driver < kernels).then(|| {
        format!(
            "the NVIDIA driver is one for CUDA {}, and this program's kernels are of CUDA {}: install a newer driver (580 or \
             later knows CUDA 13.0)",
            name(driver),
            name(kernels)
        )
    })
}

#[cfg(not(feature = "cuda"))]
fn gpu(ordinal: usize) -> Result<Device> {
    bail!("open cuda:{ordinal}: this program was built without the cuda feature")
}

#[cfg(feature = "cuda")]
fn gpu(ordinal: usize) -> Result<Device> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    let device = Device::new_cuda_with_stream(ordinal)?;
    if let Device::Cuda(cuda) = &device {
        // SAFETY: compute runs on this one stream, in order. The copies of offload and NCCL's calls have streams of their
        // own. Events order these streams, and the callers keep the tensors until then.
        unsafe { cuda.disable_event_tracking() };
        let mut keep = u64::MAX;
        // SAFETY: the device is open, and the attribute is a u64.
        let set = unsafe {
            result::device::get_default_mem_pool(cuda.cuda_stream().context().cu_device()).and_then(|pool| {
                let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
                result::mem_pool::set_attribute(pool, attribute, (&raw mut keep).cast())
            })
        };
        set.map_err(|error| candle_core::Error::Msg(format!("open cuda:{ordinal}: {error}")))?;
    }
    Ok(device)
}

/// A GPU as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GpuInfo {
    /// CUDA ordinal among the visible GPUs.
    pub ordinal: usize,
    /// Marketing name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Compute capability: 90 is Hopper.
    pub capability: i32,
    /// Total memory in bytes.
    pub memory_bytes: u64,
}

/// Lists the usable GPUs.
pub fn gpus() -> Vec<GpuInfo> {
    #[cfg(feature = "cuda")]
    if gpu_unavailable_reason().is_none() {
        return (0..).map_while(gpu_info).collect();
    }
    Vec::new()
}

#[cfg(feature = "cuda")]
fn gpu_info(ordinal: usize) -> Option<GpuInfo> {
    use candle_core::cuda_backend::cudarc::driver::{CudaContext, result, sys::CUdevice_attribute};
    let context = CudaContext::new(ordinal).ok()?;
    let attribute = |which| context.attribute(which).unwrap_or(0);
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    // SAFETY: the device is there, its context is open.
    let memory_bytes = unsafe { result::device::total_mem(context.cu_device()) }.unwrap_or(0) as u64;
    Some(GpuInfo { ordinal, name: context.name().ok()?, capability: 10 * major + minor, memory_bytes })
}

/// Returns the total memory of the GPU `device` in bytes; `None` for the CPU.
pub fn gpu_memory(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        use candle_core::cuda_backend::cudarc::driver::result;
        // SAFETY: the device is open.
        let bytes = unsafe { result::device::total_mem(cuda.cuda_stream().context().cu_device()) };
        return bytes.ok().map(|bytes| bytes as u64);
    }
    let _ = device;
    None
}

/// Returns a GPU's UUID as nvidia-smi prints it: `GPU-8932f937-d72c-4106-c12f-20bd9faed9f6`.
///
/// The UUID identifies a GPU independently of CUDA's numbering. Returns `None` if there is no such GPU.
pub fn gpu_uuid(ordinal: usize) -> Option<String> {
    #[cfg(feature = "cuda")]
    if gpu_unavailable_reason().is_none() {
        use candle_core::cuda_backend::cudarc::driver::result;
        let device = result::device::get(i32::try_from(ordinal).ok()?).ok()?;
        return Some(uuid_text(result::device::get_uuid(device).ok()?.bytes.map(|byte| byte as u8)));
    }
    let _ = ordinal;
    None
}

#[cfg(any(feature = "cuda", test))]
fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for choice in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Cuda(0), DeviceChoice::Cuda(3)] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for wrong in ["gpu", "cuda:", "cuda:x", "CPU", ""] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_driver_that_does_not_know_the_kernels_release_is_too_old() {
        assert_eq!(
            [(13000, 13000), (13010, 13000), (14000, 13020)].map(|(driver, kernels)| too_old(driver, kernels)),
            [None, None, None]
        );
        let said = too_old(12080, 13000).expect("it is too old");
        assert!(said.contains("one for CUDA 12.8") && said.contains("are of CUDA 13.0"), "{said}");
    }

    #[test]
    fn a_gpu_is_named_as_its_tools_name_it() {
        let bytes = std::array::from_fn(|i| 16 * i as u8 + 15 - i as u8);
        assert_eq!(uuid_text(bytes), "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0");
        assert_eq!(gpu_uuid(usize::MAX), None);
    }

    #[test]
    fn without_a_gpu_auto_is_the_cpu_and_cuda_an_error_that_says_why() {
        if let Some(why) = gpu_unavailable_reason() {
            assert!(DeviceChoice::Auto.open().is_ok_and(|device| device.is_cpu()));
            let error = DeviceChoice::Cuda(0).open().err().map(|error| error.to_string());
            assert!(error.is_some_and(|error| error.contains("open cuda:0") && error.contains(&why)));
        }
    }
}
