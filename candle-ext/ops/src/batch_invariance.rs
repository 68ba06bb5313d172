//! Batch invariance: the bits of a row do not depend on the number of rows that are computed with it.
//!
//! The setting belongs to the process, because it selects kernels. It costs speed: single rows are multiplied as many rows are,
//! matmuls on a GPU do not split sums, and cuDNN does not compute attention.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Device, Result, bail};

use crate::gemm::cpu_gemm_kernel;

static IS_REQUIRED: AtomicBool = AtomicBool::new(false);

/// Selects kernels whose result for a row does not depend on the other rows, for the rest of the process. Call it before any
/// computation.
///
/// # Errors
///
/// If the device is a CPU whose only GEMM kernel is the `gemm` crate, which rounds by the number of rows.
pub fn require_batch_invariance(device: &Device) -> Result<()> {
    if device.is_cpu() && cpu_gemm_kernel() == "gemm" {
        bail!("batch_invariant: the matmuls of this processor depend on the number of rows; it needs AVX2 or AVX-512")
    }
    IS_REQUIRED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Returns true after [`require_batch_invariance`].
pub(crate) fn is_batch_invariant() -> bool {
    IS_REQUIRED.load(Ordering::Relaxed)
}

/// Runs `f` with batch invariance. One test at a time may call it, and no other test that multiplies may run.
#[cfg(all(test, feature = "cuda"))]
pub(crate) fn with_batch_invariance<T>(f: impl FnOnce() -> T) -> T {
    IS_REQUIRED.store(true, Ordering::Relaxed);
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
    IS_REQUIRED.store(false, Ordering::Relaxed);
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
