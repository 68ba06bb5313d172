//! Cached descriptors and algorithms of GEMMs on a GPU.

/// Drops the descriptors and algorithms of all GEMM shapes that a GPU has computed. The next GEMM of each shape makes them anew:
/// benchmarks measure the host's time with and without them.
pub fn forget_gemms() {
    #[cfg(feature = "cuda")]
    crate::cuda::gemm::forget_plans();
}
