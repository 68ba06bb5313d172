//! Packing buffers of CPU matmuls. Threads keep them for the next matmul.

use candle_core::DType;

/// Elements of the shared f32 operand that are packed at once with AVX-512 or AMX, approximately.
pub(super) const MAX_PACKED: usize = 1 << 21;
/// Cache lines of a thread's block on these processors: 768 KiB of an L2 cache of 1 or 2 MiB.
pub(super) const BLOCK_LINES: usize = 12 << 10;
/// f32 sums of a thread's block that are rounded later, approximately: 512 KiB.
pub(super) const SUMS: usize = 1 << 17;
/// Bytes of a cache line.
pub(super) const CACHE_LINE_BYTES: usize = 64;
/// bf16 summands of a packed f32 with AMX.
pub(super) const AMX_PARTS: usize = 3;

/// Returns the bytes of packed operands of `n_elements`, on the processor that needs most.
pub(crate) fn packed_operand_bytes(n_elements: u64, dtype: DType) -> u64 {
    // Widened to f32, or in three parts.
    n_elements * if dtype == DType::BF16 { size_of::<f32>() } else { AMX_PARTS * size_of::<u16>() } as u64
}

/// Sizes of a matmul [m, k] x [k, n].
#[derive(Clone, Copy, Debug)]
pub struct GemmSize {
    /// Rows of the output.
    pub m: u64,
    /// Columns of the output.
    pub n: u64,
    /// Length of the sums (inner dimension).
    pub k: u64,
}

/// Returns the bytes of packing buffers that stay allocated after these matmuls with operands in `dtype`, on the
/// processor that needs most.
///
/// All threads share the packed smaller operand; each packs blocks of the other, and keeps sums that are rounded later.
pub fn cpu_gemm_buffer_bytes(matmuls: &[GemmSize], dtype: DType) -> u64 {
    let shared = matmuls.iter().map(|size| size.m.min(size.n) * size.k).max().unwrap_or(0);
    let packed = |element: usize, most: usize| element as u64 * shared.min(most as u64);
    let (shared, sums) = match dtype {
        // Widened to f32, or as they are.
        DType::BF16 => (packed(4, MAX_PACKED).max(packed(2, AMX_PARTS * MAX_PACKED)), SUMS * size_of::<f32>()),
        _ => (packed(AMX_PARTS * size_of::<u16>(), MAX_PACKED), 0),
    };
    shared + (BLOCK_LINES * CACHE_LINE_BYTES + sums) as u64 * rayon::current_num_threads() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_larger_shared_factor_counts_up_to_a_bound() {
        let of = |sizes: &[(u64, u64, u64)], dtype| {
            let sizes: Vec<_> = sizes.iter().map(|&(m, n, k)| GemmSize { m, n, k }).collect();
            cpu_gemm_buffer_bytes(&sizes, dtype) - cpu_gemm_buffer_bytes(&[], dtype)
        };
        let shared = |sizes: &[(u64, u64, u64)]| of(sizes, DType::F32);
        assert_eq!(of(&[(10, 20, 3)], DType::BF16), 4 * 30);
        assert_eq!(shared(&[(10, 20, 3)]), 6 * 30);
        assert_eq!(shared(&[(10, 20, 3), (9, 8, 7)]), 6 * 56);
        assert_eq!(shared(&[(1 << 20, 1 << 20, 5)]), 6 << 21);
    }
}
