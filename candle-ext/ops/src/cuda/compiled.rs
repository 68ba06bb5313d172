//! The compiled kernels of an op.

use candle_core::{Result, bail};

use super::check::Signature;

/// The kernels of one op.
pub(crate) struct Kernels {
    /// The op's name.
    pub(crate) op: &'static str,
    /// The parameters and threads of each kernel, by its name in ascending order. build.rs reads them from the source.
    pub(crate) signatures: &'static [Signature],
    /// Compiled for GPUs.
    #[cfg(feature = "cuda")]
    pub(crate) fatbin: &'static [u8],
    /// Compiled for the CPU: the path of a shared library.
    #[cfg(feature = "emulate")]
    pub(crate) library: &'static str,
}

impl Kernels {
    /// Returns the signature of a kernel.
    pub(super) fn signature(&self, name: &str) -> Result<&'static Signature> {
        match self.signatures.binary_search_by(|known| known.name.cmp(name)) {
            Ok(at) => Ok(&self.signatures[at]),
            Err(_) => bail!("{0}: there is no kernel {name} in {0}/kernel.cu", self.op),
        }
    }
}
