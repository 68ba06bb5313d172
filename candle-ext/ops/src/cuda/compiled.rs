//! Compiled kernels of an op.

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
    /// Path of the shared library compiled for the CPU.
    #[cfg(feature = "emulate")]
    pub(crate) library: &'static str,
}

impl Kernels {
    /// Returns the signature of a kernel. Fails if there is no kernel of this name.
    pub(super) fn signature(&self, name: &str) -> Result<&'static Signature> {
        match self.signatures.binary_search_by(|known| known.name.cmp(name)) {
            Ok(at) => Ok(&self.signatures[at]),
            Err(_) => bail!("{0}: there is no kernel {name} in {0}/kernel.cu", self.op),
        }
    }
}
