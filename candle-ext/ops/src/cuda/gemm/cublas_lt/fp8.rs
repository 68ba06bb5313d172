//! Requirements of FP8 matmuls on the GPU and on cuBLASLt.

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::cublaslt::sys;

use crate::cuda::capability;
use crate::cuda::gemm::operands::{Fp8Inputs, GemmInputs, Scaling};

/// First compute capability with FP8 tensor cores.
const MIN_CAPABILITY: [i32; 2] = [8, 9];

/// Compute capability whose cuBLASLt matmuls have scales per block of 128 elements.
const BLOCK_CAPABILITY: [i32; 2] = [9, 0];

/// First release of cuBLASLt with scales per block of 128 elements.
const MIN_BLOCK_VERSION: usize = 12_09_00;

/// Fails unless the device and its library can multiply these operands.
pub(super) fn check(inputs: GemmInputs, device: &CudaDevice) -> Result<(), String> {
    let GemmInputs::Fp8(Fp8Inputs { a, b, .. }) = inputs else { return Ok(()) };
    // SAFETY: the library is loaded.
    let version = unsafe { sys::cublasLtGetVersion() };
    check_for([a.scaling, b.scaling], capability(device)?, version)
}

fn check_for(scalings: [Scaling; 2], capability: [i32; 2], version: usize) -> Result<(), String> {
    let [major, minor] = capability;
    if capability < MIN_CAPABILITY {
        return Err(format!(
            "FP8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell), not {major}.{minor}; \
             remove the section `precision`"
        ));
    }
    if scalings == [Scaling::Tensor; 2] {
        return Ok(());
    }
    if capability != BLOCK_CAPABILITY {
        return Err(format!(
            "FP8 with blockwise scaling needs a Hopper GPU (compute capability 9.0), not {major}.{minor}; \
             choose `precision.recipe: delayed` or `current`"
        ));
    }
    if version < MIN_BLOCK_VERSION {
        return Err(format!(
            "FP8 with blockwise scaling needs cuBLAS 12.9 or newer, not {}.{}; install a newer one, or choose \
             `precision.recipe: delayed` or `current`",
            version / 10_000,
            version / 100 % 100
        ));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_libraries_that_cannot_are_named_with_the_remedy() {
        let blocks = [Scaling::Vector128, Scaling::Block128];
        for (scalings, capability, version, want) in [
            ([Scaling::Tensor; 2], [8, 0], 130_100, "not 8.0; remove the section `precision`"),
            (blocks, [8, 9], 130_100, "not 8.9; choose `precision.recipe: delayed` or `current`"),
            (blocks, [10, 0], 130_100, "not 10.0; choose `precision.recipe: delayed` or `current`"),
            (blocks, [9, 0], 120_804, "not 12.8; install a newer one"),
        ] {
            let error = check_for(scalings, capability, version).unwrap_err();
            assert!(error.contains(want), "{error}");
        }
        for (scalings, capability, version) in [
            ([Scaling::Tensor; 2], [8, 9], 120_100),
            ([Scaling::Tensor; 2], [10, 0], 130_100),
            (blocks, [9, 0], 120_900),
        ] {
            check_for(scalings, capability, version).unwrap();
        }
    }
}
