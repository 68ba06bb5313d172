//! Compiled kernels of an op.

#[cfg(any(feature = "cuda", test))]
use std::sync::OnceLock;

use candle_core::{Result, bail};

use super::check::Signature;

/// Compiled kernels of one op.
pub(crate) struct Kernels {
    /// Name of the op.
    pub(crate) op: &'static str,
    /// Signatures of the kernels, sorted by name. build.rs reads them from the source.
    pub(crate) signatures: &'static [Signature],
    /// Binary for GPUs.
    #[cfg(feature = "cuda")]
    pub(crate) fatbin: &'static [u8],
    /// Functions that GPUs have loaded.
    #[cfg(feature = "cuda")]
    pub(crate) functions: LoadedFunctions<candle_core::cuda_backend::cudarc::driver::CudaFunction>,
    /// Path of the shared library compiled for the CPU.
    #[cfg(feature = "emulate")]
    pub(crate) library: &'static str,
}

impl Kernels {
    /// Returns the position of a kernel in the signatures. Fails if there is no kernel of this name.
    pub(super) fn position(&self, name: &str) -> Result<usize> {
        match self.signatures.binary_search_by(|known| known.name.cmp(name)) {
            Ok(at) => Ok(at),
            Err(_) => bail!("{0}: there is no kernel {name} in {0}/kernel.cu", self.op),
        }
    }
}

/// Most GPUs of a process.
#[cfg(any(feature = "cuda", test))]
const MAX_GPUS: usize = 64;

/// Functions of an op's kernels that GPUs have loaded, by ordinal of the GPU and position of the kernel. A later launch takes no
/// lock and hashes no name.
#[cfg(any(feature = "cuda", test))]
pub(crate) struct LoadedFunctions<T>([OnceLock<Box<[OnceLock<T>]>>; MAX_GPUS]);

#[cfg(any(feature = "cuda", test))]
impl<T> LoadedFunctions<T> {
    pub(crate) const fn new() -> Self {
        Self([const { OnceLock::new() }; MAX_GPUS])
    }

    /// Returns the function of one of `n_kernels` kernels on a GPU. Loads it on first use.
    pub(super) fn get_or_load(
        &self,
        ordinal: usize,
        position: usize,
        n_kernels: usize,
        load: impl FnOnce() -> Result<T>,
    ) -> Result<&T> {
        let Some(of_gpu) = self.0.get(ordinal) else { bail!("GPU {ordinal}: at most {MAX_GPUS} are supported") };
        let functions = of_gpu.get_or_init(|| (0..n_kernels).map(|_| OnceLock::new()).collect());
        if let Some(function) = functions[position].get() {
            return Ok(function);
        }
        let loaded = load()?;
        Ok(functions[position].get_or_init(|| loaded))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_loaded_once_per_gpu() {
        let functions = LoadedFunctions::new();
        let mut loads = Vec::new();
        for _ in 0..2 {
            for (ordinal, position) in [(0, 2), (0, 0), (3, 2)] {
                let load = || {
                    loads.push((ordinal, position));
                    Ok((ordinal, position))
                };
                assert_eq!(*functions.get_or_load(ordinal, position, 3, load).unwrap(), (ordinal, position));
            }
        }
        assert_eq!(loads, [(0, 2), (0, 0), (3, 2)]);
    }

    #[test]
    fn a_kernel_that_fails_to_load_is_loaded_again() {
        let functions = LoadedFunctions::new();
        assert!(functions.get_or_load(0, 0, 1, || bail!("no memory")).is_err());
        assert_eq!(*functions.get_or_load(0, 0, 1, || Ok(5)).unwrap(), 5);
        assert!(functions.get_or_load(MAX_GPUS, 0, 1, || Ok(5)).is_err());
    }
}
