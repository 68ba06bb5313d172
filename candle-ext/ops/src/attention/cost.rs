//! Memory and FLOPs of `attention`.
//!
//! t tokens, hq query heads, hkv KV heads, k head dim

use candle_core::DType;

use super::spec::{AttentionHeads, AttentionImpl};
use super::tile::{QUERIES, tiles_per_block};
use crate::cost::{Cost, DeviceKind, F32_BYTES, bytes};
use crate::gemm::packed_operand_bytes;

/// Score matrices that the reference implementation holds at once in a forward without a tape.
const REFERENCE_FORWARD: u64 = 3;
/// Score matrices that the reference implementation saves for backward.
const REFERENCE_SAVED: u64 = 7;
/// Score matrices that the reference implementation's backward allocates.
const REFERENCE_BACKWARD: u64 = 10;

/// Shape of an attention call over packed sequences, for its cost. Each sequence has as many keys as queries.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCost {
    /// t, the number of tokens in all sequences.
    pub n_tokens: u64,
    /// Number of tokens of the longest sequence.
    pub longest: u64,
    /// Heads: hq, hkv and k.
    pub heads: AttentionHeads,
    /// Dtype of q, k and v.
    pub dtype: DType,
    /// Implementation.
    pub implementation: AttentionImpl,
    /// Kind of the device.
    pub device: DeviceKind,
}

impl AttentionCost {
    /// FLOPs of q k^T and p v, per query-key pair, query head and element of a head.
    pub const FORWARD_FLOPS: u64 = 4;
    /// FLOPs of dp, dv, dq and dk, per query-key pair, query head and element of a head. Recomputed scores are not
    /// counted.
    pub const BACKWARD_FLOPS: u64 = 8;

    /// Returns the cost of the forward. It saves q, k and v, which no other op saves.
    pub fn forward(&self) -> Cost {
        let (q, kv) = (self.q(), self.kv());
        let saved = self.replay_bytes() + bytes(self.n_tokens * (q + 2 * kv), self.dtype);
        Cost {
            saved_bytes: saved + self.reference_bytes(REFERENCE_SAVED),
            scratch_bytes: self.kernel_scratch_bytes(q, q + 2 * kv) + self.packed_bytes(1, 2),
            flops: Self::FORWARD_FLOPS * self.n_products(),
        }
    }

    /// Returns the cost of the backward. Each query head sums dk and dv of its own.
    pub fn backward(&self) -> Cost {
        let (q, kv) = (self.q(), self.kv());
        Cost {
            saved_bytes: 0,
            scratch_bytes: self.kernel_scratch_bytes(3 * q, 3 * q + 2 * kv)
                + self.packed_bytes(4, 3)
                + self.reference_bytes(REFERENCE_BACKWARD),
            flops: Self::BACKWARD_FLOPS * self.n_products(),
        }
    }

    /// Returns the bytes of the output and log-sum-exp that [`save_outputs`](crate::save_outputs) keeps for a replay.
    pub fn replay_bytes(&self) -> u64 {
        bytes(self.n_tokens * self.q(), self.dtype) + self.n_tokens * self.heads.n_query as u64 * F32_BYTES
    }

    /// Returns the bytes of scores in a forward of the reference implementation without a tape; 0 for other
    /// implementations.
    pub fn reference_forward_bytes(&self) -> u64 {
        self.reference_bytes(REFERENCE_FORWARD)
    }

    /// Returns the elements of one token's queries.
    fn q(&self) -> u64 {
        (self.heads.n_query * self.heads.dim) as u64
    }

    /// Returns the elements of one token's keys.
    fn kv(&self) -> u64 {
        (self.heads.n_kv * self.heads.dim) as u64
    }

    /// Returns the query-key pairs times the elements of a token's queries. Every query counts the longest sequence's
    /// keys.
    fn n_products(&self) -> u64 {
        self.n_tokens * self.longest * self.q()
    }

    /// Returns the bytes of the kernel's f32 copies, for elements written and read per token.
    ///
    /// The CPU converts inputs that its matmuls do not read, and writes outputs head by head in f32. On a GPU cuDNN sums dq in f32.
    fn kernel_scratch_bytes(&self, written: u64, read: u64) -> u64 {
        let n_elements = match self.device {
            DeviceKind::Cpu if self.device.widens_without_unit(self.dtype) => written + read,
            DeviceKind::Cpu => written,
            DeviceKind::Gpu => self.q(),
        };
        self.n_tokens * n_elements * F32_BYTES
    }

    /// Returns the bytes of a CPU's packed operands and scores on all threads. Each packs a block of queries in `of_queries` layouts,
    /// and a tile of keys in `of_keys`.
    fn packed_bytes(&self, of_queries: u64, of_keys: u64) -> u64 {
        if self.device == DeviceKind::Gpu || self.implementation == AttentionImpl::Reference {
            return 0;
        }
        let dim = self.heads.dim;
        let n_tasks = self.heads.n_query as u64 * self.n_tokens.div_ceil(self.longest.max(1));
        let n_threads = n_tasks.min(rayon::current_num_threads() as u64);
        let queries = (tiles_per_block(dim) * QUERIES) as u64;
        let (queries, tile) = (self.longest.min(queries), self.longest.min(QUERIES as u64));
        let packed =
            packed_operand_bytes((of_queries * queries + of_keys * tile) * dim as u64 + tile * tile, self.dtype);
        n_threads * (packed + 2 * tile * tile * F32_BYTES)
    }

    /// Returns the bytes of the longest sequence's score matrices, and of inputs and outputs in several layouts.
    fn reference_bytes(&self, n_matrices: u64) -> u64 {
        match self.implementation {
            AttentionImpl::Reference => {
                let scores = n_matrices * self.heads.n_query as u64 * self.longest;
                self.n_tokens * F32_BYTES * (scores + 4 * self.q() + 5 * self.kv())
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::gemm::has_bf16_unit;

    fn cost(dtype: DType, implementation: AttentionImpl, device: DeviceKind) -> AttentionCost {
        let heads = AttentionHeads { n_query: 4, n_kv: 2, dim: 8 };
        AttentionCost { n_tokens: 10, longest: 5, heads, dtype, implementation, device }
    }

    #[test]
    fn a_cpu_reads_sixteen_bits_through_copies_in_f32() {
        let of = |dtype| cost(dtype, AttentionImpl::Fused, DeviceKind::Cpu);
        let forward = |dtype| of(dtype).forward().scratch_bytes - of(dtype).packed_bytes(1, 2);
        let backward = |dtype| of(dtype).backward().scratch_bytes - of(dtype).packed_bytes(4, 3);
        let (q, kv) = (32, 16);
        assert_eq!(forward(DType::F32), 10 * q * 4);
        assert_eq!(forward(DType::F16), 10 * (2 * q + 2 * kv) * 4);
        assert_eq!(backward(DType::F32), 10 * 3 * q * 4);
        assert_eq!(backward(DType::F16), 10 * (6 * q + 2 * kv) * 4);
        let read = if has_bf16_unit() { 0 } else { q + 2 * kv };
        assert_eq!(forward(DType::BF16), 10 * (q + read) * 4);
    }

    #[test]
    fn each_thread_packs_a_block_of_queries_and_a_tile_of_keys() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let heads = AttentionHeads { n_query: 4, n_kv: 2, dim: 64 };
        let of = |n_tokens, longest| AttentionCost {
            n_tokens,
            longest,
            heads,
            ..cost(DType::F32, AttentionImpl::Fused, DeviceKind::Cpu)
        };
        pool.install(|| {
            // Three threads, six bytes an element, and two tiles of scores in f32.
            let scores = 2 * 128 * 128 * 4;
            let (block, tile) = (512 * 64, 128 * 64);
            assert_eq!(of(4096, 4096).packed_bytes(4, 3), 3 * (6 * (4 * block + 3 * tile + 128 * 128) + scores));
            assert_eq!(of(10, 10).packed_bytes(1, 2), 3 * (6 * (3 * 10 * 64 + 10 * 10) + 2 * 10 * 10 * 4));
        });
        let gpu = AttentionCost { device: DeviceKind::Gpu, ..of(4096, 4096) };
        assert_eq!(gpu.packed_bytes(4, 3), 0);
    }

    #[test]
    fn scores_are_held_by_the_reference_alone() {
        let of = |implementation| cost(DType::F32, implementation, DeviceKind::Gpu);
        let (fused, reference) = (of(AttentionImpl::Auto), of(AttentionImpl::Reference));
        let matrices = |n: u64| 10 * 4 * (n * 4 * 5 + 4 * 32 + 5 * 16);
        assert_eq!(fused.reference_forward_bytes(), 0);
        assert_eq!(reference.reference_forward_bytes(), matrices(3));
        assert_eq!(reference.forward().saved_bytes - fused.forward().saved_bytes, matrices(7));
        assert_eq!(reference.backward().scratch_bytes - fused.backward().scratch_bytes, matrices(10));
    }

    #[test]
    fn a_backward_has_twice_the_matmuls_of_its_forward() {
        let cost = cost(DType::BF16, AttentionImpl::Auto, DeviceKind::Gpu);
        // Two matmuls of [10, 8] by [8, 5] for each of 4 heads.
        assert_eq!((cost.forward().flops, cost.backward().flops), (2 * 4 * 2 * 10 * 8 * 5, 4 * 4 * 2 * 10 * 8 * 5));
    }
}
