//! Memory and FLOPs of `linear_cross_entropy`.
//!
//! t tokens, v vocabulary (local rows of w), d model

use candle_core::DType;

use super::chunk::{max_logit_rows, rows_per_chunk};
use crate::cost::{Cost, DeviceKind, F32_BYTES, bytes};

/// Sizes of the LM head and its loss, for their cost.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyCost {
    /// t, the number of tokens; none is ignored.
    pub n_tokens: u64,
    /// v, the number of vocabulary entries on this rank.
    pub n_vocab: u64,
    /// d, the hidden size.
    pub n_in: u64,
    /// Most bytes of f32 logits that exist at once.
    pub logits_bytes: u64,
    /// Dtype of x and w.
    pub dtype: DType,
    /// Kind of the device.
    pub device: DeviceKind,
    /// Dtype of w's gradient; `None` for a frozen weight.
    pub grad: Option<DType>,
}

impl CrossEntropyCost {
    /// Returns the most rows of logits that exist at once.
    pub fn rows_per_chunk(&self) -> u64 {
        let chunk = max_logit_rows(self.logits_bytes, self.n_vocab) as usize;
        let rows = rows_per_chunk(self.device, self.n_tokens as usize, self.n_vocab as usize, chunk);
        (rows as u64).clamp(1, self.n_tokens.max(1))
    }

    /// Returns the cost of losses without gradients: logits and inputs of a chunk.
    pub fn forward(&self) -> Cost {
        let n = self.rows_per_chunk();
        Cost {
            saved_bytes: 0,
            scratch_bytes: n * self.n_vocab * F32_BYTES + bytes(n * self.n_in, self.operands()),
            flops: 2 * self.n_products(),
        }
    }

    /// Returns the cost of losses with gradients, in one pass: logits, their gradients, inputs and dx of a chunk.
    pub fn forward_backward(&self) -> Cost {
        let Self { n_vocab: v, n_in: d, dtype, device, .. } = *self;
        let n = self.rows_per_chunk();
        let d_logits = if device == DeviceKind::Gpu && dtype != DType::F32 { bytes(n * v, dtype) } else { 0 };
        let dx = if device == DeviceKind::Cpu { DType::F32 } else { dtype };
        let rows = n * v * F32_BYTES + d_logits + bytes(n * d, self.operands()) + bytes(n * d, dx);
        let sums_grad = self.device == DeviceKind::Cpu && self.operands() == DType::F32;
        let rounded_grad = if sums_grad && self.grad == Some(DType::BF16) { v * d * F32_BYTES } else { 0 };
        let n_matmuls = if self.grad.is_some() { 3 } else { 2 };
        Cost { saved_bytes: 0, scratch_bytes: rows + rounded_grad, flops: 2 * n_matmuls * self.n_products() }
    }

    /// Returns the dtype of the matmuls' operands.
    fn operands(&self) -> DType {
        if self.device.widens_without_unit(self.dtype) { DType::F32 } else { self.dtype }
    }

    fn n_products(&self) -> u64 {
        self.n_tokens * self.n_vocab * self.n_in
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::has_bf16_unit;

    fn cost(n_tokens: u64, dtype: DType, device: DeviceKind) -> CrossEntropyCost {
        CrossEntropyCost { n_tokens, n_vocab: 100, n_in: 8, logits_bytes: 400 * 300, dtype, device, grad: None }
    }

    #[test]
    fn chunks_are_even_whole_tiles_on_a_gpu_and_full_on_a_cpu() {
        let rows = |n, device| cost(n, DType::F32, device).rows_per_chunk();
        assert_eq!([1, 299, 300, 301, 1000].map(|n| rows(n, DeviceKind::Cpu)), [1, 299, 300, 300, 300]);
        assert_eq!([1, 299, 300, 301, 1000].map(|n| rows(n, DeviceKind::Gpu)), [1, 299, 300, 256, 256]);
    }

    #[test]
    fn gradients_of_sixteen_bit_logits_have_memory_of_their_own_on_a_gpu() {
        let bytes = |dtype, device| cost(10, dtype, device).forward_backward().scratch_bytes;
        for (dtype, device) in
            [(DType::F32, DeviceKind::Cpu), (DType::F16, DeviceKind::Cpu), (DType::F32, DeviceKind::Gpu)]
        {
            assert_eq!(bytes(dtype, device), 10 * (100 + 2 * 8) * 4);
        }
        assert_eq!(bytes(DType::BF16, DeviceKind::Gpu), 10 * (100 * (4 + 2) + 2 * 8 * 2));
        let x = if has_bf16_unit() { 2 } else { 4 };
        assert_eq!(bytes(DType::BF16, DeviceKind::Cpu), 10 * (100 * 4 + 8 * (x + 4)));
    }

    #[test]
    fn a_trained_head_costs_a_third_matmul_and_a_rounded_gradient_a_sum() {
        let of = |grad| CrossEntropyCost { grad, ..cost(10, DType::F32, DeviceKind::Cpu) }.forward_backward();
        assert_eq!(of(None).flops, 2 * 2 * 10 * 100 * 8);
        assert_eq!(of(Some(DType::F32)).flops, 3 * 2 * 10 * 100 * 8);
        assert_eq!(of(Some(DType::BF16)).scratch_bytes - of(Some(DType::F32)).scratch_bytes, 100 * 8 * 4);
    }
}
