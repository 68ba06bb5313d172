//! Selection of the CUDA kernels that quantize.

use std::str::FromStr;
use std::sync::atomic::{AtomicU8, Ordering};

/// CUDA kernels that quantize. All give the same bits; benchmarks compare their times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fp8Kernels {
    /// Patches of 8 x 8 elements per thread, transposed in registers. SwiGLU and its gradients are quantized where they are computed.
    #[default]
    Fused,
    /// Patches that are transposed in registers, and activations in memory.
    Registers,
    /// Tiles of 64 x 64 elements that pass through shared memory, and activations in memory.
    SharedMemory,
}

static SELECTED: AtomicU8 = AtomicU8::new(Fp8Kernels::Fused as u8);

impl Fp8Kernels {
    const ALL: [(&'static str, Self); 3] =
        [("fused", Self::Fused), ("registers", Self::Registers), ("shared_memory", Self::SharedMemory)];

    /// Returns the name that selects the kernels.
    pub fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(_, kernels)| *kernels == self).map_or("", |(name, _)| name)
    }

    /// Selects the kernels of this process.
    pub fn select(self) {
        SELECTED.store(self as u8, Ordering::Relaxed);
    }

    /// Returns the selected kernels.
    pub fn selected() -> Self {
        let selected = SELECTED.load(Ordering::Relaxed);
        Self::ALL.into_iter().map(|(_, kernels)| kernels).find(|kernels| *kernels as u8 == selected).unwrap_or_default()
    }
}

impl FromStr for Fp8Kernels {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let named = Self::ALL.into_iter().find(|(known, _)| *known == name);
        named.map(|(_, kernels)| kernels).ok_or_else(|| format!("`{name}`: want fused, registers or shared_memory"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_select_kernels_and_others_are_errors() {
        for (name, kernels) in Fp8Kernels::ALL {
            assert_eq!(name.parse(), Ok(kernels));
        }
        assert_eq!("tile".parse::<Fp8Kernels>(), Err("`tile`: want fused, registers or shared_memory".to_owned()));
    }
}
