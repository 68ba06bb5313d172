//! CUDA side of the ops: tensor addresses, output buffers and kernel launches.
//!
//! All work of a device runs on candle's one stream, in call order, and memory is freed in that order. No two kernels
//! run concurrently, so kernels get plain addresses, even of their outputs.
//!
//! The feature `emulate` also runs the kernels on the CPU, over CPU tensors: see [`emulator`].

mod arg;
mod check;
mod class;
pub(crate) mod columns;
mod compiled;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "emulate")]
pub(crate) mod emulator;
pub(crate) mod gemm;
#[cfg(feature = "cuda")]
pub(crate) mod offload;
#[cfg(all(feature = "cuda", feature = "emulate"))]
pub(crate) mod poison;
#[cfg(feature = "cuda")]
pub(crate) mod transfer;

use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Layout, Result, Shape, Storage, Tensor, bail};

pub(crate) use arg::{Arg, Blocks, DeviceAddress};
pub(crate) use check::Signature;
pub(crate) use class::Class;
pub(crate) use compiled::Kernels;
#[cfg(feature = "cuda")]
pub(crate) use compiled::LoadedFunctions;

/// Threads of a block in kernels over flat buffers.
pub(crate) const FLAT_THREADS: usize = 256;

/// Device that runs kernels.
#[derive(Clone, Copy)]
pub(crate) enum Gpu<'a> {
    #[cfg(feature = "cuda")]
    Device(&'a candle_core::CudaDevice),
    #[cfg(feature = "emulate")]
    Emulated(std::marker::PhantomData<&'a ()>),
}

/// Declares `KERNELS`, compiled from the `kernel.cu` in the same folder.
macro_rules! kernels {
    ($op:literal) => {
        static KERNELS: $crate::cuda::Kernels = $crate::cuda::Kernels {
            op: $op,
            signatures: {
                #[allow(unused_imports, reason = "no op has parameters of every class")]
                use $crate::cuda::{Class::*, Signature};
                include!(concat!(env!("OUT_DIR"), "/", $op, ".rs"))
            },
            #[cfg(feature = "cuda")]
            fatbin: include_bytes!(concat!(env!("OUT_DIR"), "/", $op, ".fatbin")),
            #[cfg(feature = "cuda")]
            functions: $crate::cuda::LoadedFunctions::new(),
            #[cfg(feature = "emulate")]
            library: concat!(env!("OUT_DIR"), "/lib", $op, ".so"),
        };
    };
}
pub(crate) use kernels;

impl Kernels {
    /// Launches `name` on a grid of blocks of `threads` threads, a multiple of 32.
    ///
    /// # Safety
    ///
    /// `args` must be the kernel's parameters in order, with addresses valid for the kernel's reads and writes. Number
    /// and classes of the arguments are checked.
    pub(crate) unsafe fn launch(
        &self,
        gpu: Gpu,
        name: &str,
        grid: [usize; 3],
        threads: usize,
        args: &[Arg],
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.launch_blocks(gpu, name, Blocks { grid, threads, shared_bytes: 0 }, args) }
    }

    /// Launches `name` with this configuration.
    ///
    /// # Safety
    ///
    /// As for [`Kernels::launch`]; the kernel must not need more shared memory.
    pub(crate) unsafe fn launch_blocks(&self, gpu: Gpu, name: &str, blocks: Blocks, args: &[Arg]) -> Result<()> {
        let Blocks { grid, threads, .. } = blocks;
        let position = self.position(name)?;
        self.signatures[position].check(self.op, threads, args)?;
        if grid.contains(&0) {
            return Ok(());
        }
        if grid[0] > i32::MAX as usize || grid[1..].iter().any(|n| *n > 65_535) {
            bail!("{}: a grid of {grid:?} blocks is too large", self.op)
        }
        match gpu {
            // SAFETY: the caller guarantees valid arguments.
            #[cfg(feature = "cuda")]
            Gpu::Device(device) => unsafe { driver::launch(self, device, position, blocks, args) },
            // SAFETY: as above.
            #[cfg(feature = "emulate")]
            Gpu::Emulated(_) => unsafe { emulator::launch(self, name, blocks, args) },
        }
    }

    /// Launches `name` over n elements, about `per_thread` of them per thread.
    ///
    /// # Safety
    ///
    /// As for [`Kernels::launch`].
    pub(crate) unsafe fn launch_flat(
        &self,
        gpu: Gpu,
        name: &str,
        n: usize,
        per_thread: usize,
        args: &[Arg],
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.launch(gpu, name, [n.div_ceil(per_thread * FLAT_THREADS), 1, 1], FLAT_THREADS, args) }
    }
}

/// Returns the device on which a tensor's kernels run.
pub(crate) fn gpu<'a>(op: &str, tensor: &'a Tensor) -> Result<Gpu<'a>> {
    match tensor.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => Ok(Gpu::Device(device)),
        #[cfg(feature = "emulate")]
        Device::Cpu => Ok(Gpu::Emulated(std::marker::PhantomData)),
        #[allow(unreachable_patterns, reason = "not in every build")]
        other => bail!("{op}: want a tensor on CUDA, got one on {:?}", other.location()),
    }
}

/// Returns the address of a contiguous tensor's first element.
pub(crate) fn address(op: &str, tensor: &Tensor) -> Result<DeviceAddress> {
    let (storage, layout) = tensor.storage_and_layout();
    address_of(op, &storage, layout)
}

fn address_of(op: &str, storage: &Storage, layout: &Layout) -> Result<DeviceAddress> {
    let Some((start, _)) = layout.contiguous_offsets() else {
        bail!("{op}: want a contiguous tensor, got shape {:?} with strides {:?}", layout.dims(), layout.stride())
    };
    let base = match storage {
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => driver::base(op, storage)?,
        #[cfg(feature = "emulate")]
        Storage::Cpu(storage) => emulator::base(op, storage)?,
        #[allow(unreachable_patterns, reason = "not in every build")]
        _ => bail!("{op}: the tensors are on different devices"),
    };
    Ok(base + (start * storage.dtype().size_in_bytes()) as u64)
}

/// Returns the compute capability of a device, such as [9, 0].
#[cfg(feature = "cuda")]
pub(crate) fn capability(device: &candle_core::CudaDevice) -> std::result::Result<[i32; 2], String> {
    driver::capability(device)
}

/// Output buffer of a kernel.
pub(crate) struct Out {
    storage: Storage,
    /// Address of the first element.
    pub(crate) address: DeviceAddress,
}

impl Out {
    /// Allocates `len` uninitialised elements. Each must be written before it is read.
    pub(crate) fn new(gpu: Gpu, dtype: DType, len: usize) -> Result<Self> {
        let storage = match gpu {
            #[cfg(feature = "cuda")]
            Gpu::Device(device) => Storage::Cuda(driver::alloc(device, dtype, len)?),
            #[cfg(feature = "emulate")]
            Gpu::Emulated(_) => Storage::Cpu(emulator::alloc(dtype, len)?),
        };
        let address = address_of("output", &storage, &Layout::contiguous(len))?;
        Ok(Self { storage, address })
    }

    /// Returns the finished output as a storage.
    pub(crate) fn into_storage(self) -> Storage {
        self.storage
    }

    /// Returns the finished output as an untracked tensor.
    pub(crate) fn into_tensor(self, shape: impl Into<Shape>) -> Tensor {
        Tensor::from_storage(self.storage, shape, BackpropOp::none(), false)
    }
}

/// Returns the suffix of a kernel's name for a dtype.
pub(crate) fn suffix(op: &str, dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        other => bail!("{op}: there is no kernel for {other:?}"),
    })
}

/// Fails unless the weight has the input's dtype: kernels read both as one type.
pub(crate) fn same_dtype(op: &str, x: &Tensor, w: &Tensor) -> Result<()> {
    if x.dtype() != w.dtype() {
        bail!("{op}: on CUDA the weight must have the input's dtype {:?}, not {:?}", x.dtype(), w.dtype())
    }
    Ok(())
}

#[cfg(test)]
#[path = "../../build/parse.rs"]
mod parse;
