//! Packing buffers of CPU matmuls. Threads keep them for the next matmul.

/// Elements of the shared operand that are packed at once with AVX-512 or AMX, approximately.
pub(super) const MAX_PACKED: usize = 1 << 21;
/// Cache lines of a thread's block on these processors: 768 KiB of an L2 cache of 1 or 2 MiB.
pub(super) const BLOCK_LINES: usize = 12 << 10;
/// Bytes of a cache line.
pub(super) const CACHE_LINE_BYTES: usize = 64;
/// bf16 summands of a packed f32 with AMX.
pub(super) const AMX_PARTS: usize = 3;

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

/// Returns the bytes of packing buffers that stay allocated after these f32 matmuls, on the processor that needs most.
///
/// All threads share the packed smaller operand; each packs blocks of the other.
pub fn cpu_gemm_buffer_bytes(matmuls: &[GemmSize]) -> u64 {
    let shared = matmuls.iter().map(|size| size.m.min(size.n) * size.k).max().unwrap_or(0);
    let (element, block) = ((AMX_PARTS * size_of::<u16>()) as u64, (BLOCK_LINES * CACHE_LINE_BYTES) as u64);
    element * shared.min(MAX_PACKED as u64) + block * rayon::current_num_threads() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_larger_shared_factor_counts_up_to_a_bound() {
        let blocks = cpu_gemm_buffer_bytes(&[]);
        let shared = |sizes: &[(u64, u64, u64)]| {
            let sizes: Vec<_> = sizes.iter().map(|&(m, n, k)| GemmSize { m, n, k }).collect();
            cpu_gemm_buffer_bytes(&sizes) - blocks
        };
        assert_eq!(shared(&[(10, 20, 3)]), 6 * 30);
        assert_eq!(shared(&[(10, 20, 3), (9, 8, 7)]), 6 * 56);
        assert_eq!(shared(&[(1 << 20, 1 << 20, 5)]), 6 << 21);
    }
}
