//! Selection of the implementation of a grouped matmul on a GPU.

use candle_core::{DType, Device, Result, bail};

use super::call::{GroupedGemmImpl, OP};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::operands::{GroupedKernel, GroupedLibrary, GroupedOperands};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::{tile, winners};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::batch_invariance::is_batch_invariant;
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::cuda::{DeviceAddress, Gpu};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::grouped_tile::GroupedTile;

impl GroupedGemmImpl {
    /// Describes the implementation that computes experts of this hidden size and width on a device; `None` if it is the only
    /// one, or not selected by [`GroupedGemmImpl::Auto`].
    ///
    /// # Errors
    ///
    /// If [`GroupedGemmImpl::Cutlass`] is unusable. The call may load CUTLASS's tiles, and multiply by them to check them.
    pub fn explain(self, device: &Device, dtype: DType, sizes: [usize; 2]) -> Result<Option<String>> {
        if !matches!(self, Self::Auto | Self::Cutlass) {
            return Ok(None);
        }
        match (explain_cutlass(self, device, dtype, sizes), self) {
            (Ok(what), _) => Ok(Some(format!("experts: {what}"))),
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

#[cfg(any(feature = "cuda", feature = "emulate"))]
type Supported = std::result::Result<(), String>;

#[cfg(feature = "cuda")]
fn explain_cutlass(
    by: GroupedGemmImpl,
    device: &Device,
    dtype: DType,
    sizes: [usize; 2],
) -> std::result::Result<String, String> {
    let Device::Cuda(cuda) = device else { return Err("it computes on GPUs only, and this is the CPU".into()) };
    let on = Gpu::Device(cuda);
    has_hopper(on)?;
    fit(&[DType::BF16], dtype, sizes, &[])?;
    if is_batch_invariant() {
        return Err("its rows depend on their number, and batch_invariant is on".into());
    }
    let (tiles, what) = match by {
        GroupedGemmImpl::Cutlass => (tile::selectable(), "CUTLASS"),
        _ => (winners::tiles(&gpu_name(on)?, sizes)?, "CUTLASS where it was measured to be faster, else fused"),
    };
    tiles.iter().try_for_each(|tile| usable(on, tile))?;
    let names: Vec<&str> = tiles.iter().map(|tile| tile.name).collect();
    Ok(format!("{what} ({}; tiles {})", crate::cuda::gemm::cutlass::object::object(tiles[0])?.build, names.join(", ")))
}

#[cfg(not(feature = "cuda"))]
fn explain_cutlass(_: GroupedGemmImpl, _: &Device, _: DType, _: [usize; 2]) -> std::result::Result<String, String> {
    Err("it computes on GPUs only, and this is the CPU".into())
}

/// Selects the implementation of a call.
///
/// # Errors
///
/// If the implementation chosen by name does not support the call.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(super) fn choose(implementation: GroupedGemmImpl, on: Gpu, operands: GroupedOperands<'_>) -> Result<GroupedKernel> {
    let GroupedOperands { output, dtype, e, dims, addresses, .. } = operands;
    let fits = |dtypes: &[DType]| fit(dtypes, dtype, [dims.k, dims.n], addresses);
    let by_cutlass = |tile| has_hopper(on).and_then(|()| fits(&[DType::BF16])).and_then(|()| usable(on, tile));
    let (name, library, supported) = match implementation {
        GroupedGemmImpl::Auto if is_batch_invariant() => return Ok(GroupedKernel::Fused),
        GroupedGemmImpl::Fused => return Ok(GroupedKernel::Fused),
        GroupedGemmImpl::Auto => {
            let winner = gpu_name(on).ok().and_then(|gpu| winners::of(&gpu, &operands));
            let usable = winner.filter(|tile| by_cutlass(tile).is_ok());
            return Ok(
                usable.map_or(GroupedKernel::Fused, |tile| GroupedKernel::Library(GroupedLibrary::Cutlass(tile)))
            );
        }
        GroupedGemmImpl::Cublas => ("cublas", GroupedLibrary::Cublas, fits(&[DType::BF16, DType::F16])),
        GroupedGemmImpl::Cutlass => {
            let tile = tile::of(output, e, dims);
            ("cutlass", GroupedLibrary::Cutlass(tile), by_cutlass(tile))
        }
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
fn has_hopper(on: Gpu) -> Supported {
    match on {
        // The kernels are compiled for sm_90a alone.
        #[cfg(feature = "cuda")]
        Gpu::Device(device) => match crate::cuda::capability(device)? {
            [9, 0] => Ok(()),
            [major, minor] => Err(format!("it needs Hopper (compute capability 9.0), not {major}.{minor}")),
        },
        #[cfg(feature = "emulate")]
        Gpu::Emulated(_) => Ok(()),
    }
}

/// Returns the reason why a tile cannot be used, if any: its object, or wrong results. The emulator has every tile.
#[cfg(any(feature = "cuda", feature = "emulate"))]
fn usable(on: Gpu, tile: &'static GroupedTile) -> Supported {
    match on {
        #[cfg(feature = "cuda")]
        Gpu::Device(device) => super::tile_check::of_device(device, tile),
        #[cfg(feature = "emulate")]
        Gpu::Emulated(_) => {
            let _ = tile;
            Ok(())
        }
    }
}

/// Returns the name of a GPU, as its driver spells it. The emulator is no GPU of any measurement.
#[cfg(any(feature = "cuda", feature = "emulate"))]
fn gpu_name(on: Gpu) -> std::result::Result<String, String> {
    match on {
        #[cfg(feature = "cuda")]
        Gpu::Device(device) => device.cuda_stream().context().name().map_err(|error| error.to_string()),
        #[cfg(feature = "emulate")]
        Gpu::Emulated(_) => Ok("the emulator".into()),
    }
}

/// Returns the reason why a library of these dtypes does not support operands, if any.
#[cfg(any(feature = "cuda", feature = "emulate"))]
fn fit(dtypes: &[DType], dtype: DType, sizes: [usize; 2], addresses: &[DeviceAddress]) -> Supported {
    let [n_in, n_out] = sizes;
    if !dtypes.contains(&dtype) {
        let names: Vec<&str> = dtypes.iter().map(DType::as_str).collect();
        return Err(format!("the dtype must be {}, not {dtype:?}", names.join(" or ")));
    }
    if sizes.iter().any(|size| *size == 0 || !size.is_multiple_of(8)) {
        return Err(format!("sizes must be multiples of 8, not {n_in} and {n_out}"));
    }
    if addresses.iter().any(|at| at % 16 != 0) {
        return Err("tensors must be aligned to 16 bytes".into());
    }
    Ok(())
}
