//! Selection of the implementation of a grouped matmul on a GPU.

use candle_core::{DType, Device, Result, bail};

use super::call::{GroupedGemmImpl, OP};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::batch_invariance::is_batch_invariant;
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::cuda::{DeviceAddress, Gpu};

/// Implementation that computes one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(super) enum GroupedKernel {
    Fused,
    Library(GroupedLibrary),
}

/// Library with a grouped GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(super) enum GroupedLibrary {
    Cublas,
    Cutlass,
}

/// Dtypes and sizes of a grouped matmul, and addresses of its operands.
#[derive(Clone, Copy, Debug)]
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(super) struct GroupedOperands<'a> {
    /// Dtype of x and y.
    pub(super) dtype: DType,
    /// Inputs and outputs of a group.
    pub(super) sizes: [usize; 2],
    pub(super) addresses: &'a [DeviceAddress],
}

impl GroupedGemmImpl {
    /// Describes the implementation that computes experts of these inputs and outputs on a device; `None` if it is the only
    /// one, or not selected by [`GroupedGemmImpl::Auto`].
    ///
    /// # Errors
    ///
    /// If [`GroupedGemmImpl::Cutlass`] is unusable.
    pub fn explain(self, device: &Device, dtype: DType, sizes: [usize; 2]) -> Result<Option<String>> {
        if !matches!(self, Self::Auto | Self::Cutlass) {
            return Ok(None);
        }
        match (explain_cutlass(device, dtype, sizes), self) {
            (Ok(()), _) => Ok(Some("experts: CUTLASS".into())),
            (Err(why), Self::Cutlass) => {
                bail!("experts: CUTLASS is requested but unusable: {why}; choose `fused` or `auto`")
            }
            (Err(why), _) => Ok(device.is_cuda().then(|| format!("experts: fused; not CUTLASS: {why}"))),
        }
    }
}

impl GroupedGemmImpl {
    /// Fails for an implementation by name that does not compute on a CPU.
    pub(super) fn check_cpu(self) -> Result<()> {
        let name = match self {
            Self::Auto | Self::Fused => return Ok(()),
            Self::Cublas => "cublas",
            Self::Cutlass => "cutlass",
        };
        bail!(
            "{OP}: {name} is requested but unusable: the tensors are on the CPU; choose `experts_implementation: fused`"
        )
    }
}

type Supported = std::result::Result<(), String>;

#[cfg(feature = "cuda")]
fn explain_cutlass(device: &Device, dtype: DType, sizes: [usize; 2]) -> Supported {
    match device {
        Device::Cuda(device) => has_cutlass(Gpu::Device(device))
            .and_then(|()| GroupedOperands { dtype, sizes, addresses: &[] }.fit(GroupedLibrary::Cutlass)),
        _ => Err("it computes on GPUs only, and this is the CPU".into()),
    }
}

#[cfg(not(feature = "cuda"))]
fn explain_cutlass(_: &Device, _: DType, _: [usize; 2]) -> Supported {
    Err("it computes on GPUs only, and this is the CPU".into())
}

/// Selects the implementation of a call.
///
/// # Errors
///
/// If the implementation chosen by name does not support the call.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(super) fn choose(implementation: GroupedGemmImpl, on: Gpu, operands: GroupedOperands<'_>) -> Result<GroupedKernel> {
    let by_cutlass = || has_cutlass(on).and_then(|()| operands.fit(GroupedLibrary::Cutlass));
    let (name, library, supported) = match implementation {
        GroupedGemmImpl::Auto if is_batch_invariant() => return Ok(GroupedKernel::Fused),
        GroupedGemmImpl::Fused => return Ok(GroupedKernel::Fused),
        GroupedGemmImpl::Auto if is_emulated(on) || by_cutlass().is_err() => return Ok(GroupedKernel::Fused),
        GroupedGemmImpl::Auto => return Ok(GroupedKernel::Library(GroupedLibrary::Cutlass)),
        GroupedGemmImpl::Cublas => ("cublas", GroupedLibrary::Cublas, operands.fit(GroupedLibrary::Cublas)),
        GroupedGemmImpl::Cutlass => ("cutlass", GroupedLibrary::Cutlass, by_cutlass()),
    };
    match supported {
        Ok(()) if is_batch_invariant() => {
            bail!(
                "{OP}: {name} is requested, but its rows depend on their number; choose `experts_implementation: fused`"
            )
        }
        Ok(()) => Ok(GroupedKernel::Library(library)),
        Err(why) => {
            bail!("{OP}: {name} is requested but unusable: {why}; choose `experts_implementation: fused`")
        }
    }
}

/// Returns the reason why a device does not run CUTLASS's kernels, if any. The emulator does.
#[cfg(any(feature = "cuda", feature = "emulate"))]
fn has_cutlass(on: Gpu) -> Supported {
    match on {
        #[cfg(feature = "cuda")]
        Gpu::Device(_) if !cfg!(feature = "cutlass") => {
            Err("this program was built without the cutlass feature; scripts/build-gpu builds one with it".into())
        }
        // The kernels are compiled for sm_90a alone.
        #[cfg(feature = "cuda")]
        Gpu::Device(device) => match crate::cuda::capability(device).map_err(|error| error.to_string())? {
            [9, 0] => Ok(()),
            [major, minor] => Err(format!("it needs Hopper (compute capability 9.0), not {major}.{minor}")),
        },
        #[cfg(feature = "emulate")]
        Gpu::Emulated(_) => Ok(()),
    }
}

#[cfg(any(feature = "cuda", feature = "emulate"))]
fn is_emulated(on: Gpu) -> bool {
    match on {
        #[cfg(feature = "cuda")]
        Gpu::Device(_) => false,
        #[cfg(feature = "emulate")]
        Gpu::Emulated(_) => true,
    }
}

#[cfg(any(feature = "cuda", feature = "emulate"))]
impl GroupedOperands<'_> {
    /// Returns the reason why a library does not support the operands, if any.
    fn fit(&self, library: GroupedLibrary) -> Supported {
        let (dtypes, names): (&[DType], _) = match library {
            GroupedLibrary::Cublas => (&[DType::BF16, DType::F16], "bf16 or f16"),
            GroupedLibrary::Cutlass => (&[DType::BF16], "bf16"),
        };
        let [n_in, n_out] = self.sizes;
        if !dtypes.contains(&self.dtype) {
            return Err(format!("the dtype must be {names}, not {:?}", self.dtype));
        }
        if self.sizes.iter().any(|size| *size == 0 || !size.is_multiple_of(8)) {
            return Err(format!("sizes must be multiples of 8, not {n_in} and {n_out}"));
        }
        if self.addresses.iter().any(|at| at % 16 != 0) {
            return Err("tensors must be aligned to 16 bytes".into());
        }
        Ok(())
    }
}
