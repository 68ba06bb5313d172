//! Memory and FLOPs of `linear`.

use candle_core::DType;

use super::cpu::block_rows;
use crate::cost::{Cost, DeviceKind, F32_BYTES, LinearInput, bytes};
use crate::quantized::WeightStorage;
use crate::weight_matmul::PANEL;

/// Sizes of a linear layer, for its cost: x [t, k] and w [n, k].
#[derive(Clone, Copy, Debug)]
pub struct LinearCost {
    /// t, the number of tokens.
    pub n_tokens: u64,
    /// k, the number of input features.
    pub n_in: u64,
    /// n, the number of output features.
    pub n_out: u64,
    /// Dtype of activations, and of a dense weight.
    pub dtype: DType,
    /// Kind of the device.
    pub device: DeviceKind,
    /// Source of x in backward.
    pub input: LinearInput,
    /// Dtype of the weight's gradient; `None` for a frozen weight.
    pub grad: Option<DType>,
    /// Storage of the weight.
    pub storage: WeightStorage,
    /// FP8 copies of the gradient of the output on a CPU, for a layer that multiplies in FP8: 2 if the gradients of weight and
    /// input read other blocks, else 1. `None` without FP8. The FP8 copy of the weight is not counted.
    pub fp8: Option<u64>,
}

impl LinearCost {
    /// FLOPs of y = x w^T, per token and weight element.
    pub const FORWARD_FLOPS: u64 = 2;
    /// FLOPs of dx = dy w, per token and weight element.
    pub const GRAD_INPUT_FLOPS: u64 = 2;
    /// FLOPs of dw = dy^T x, per token and weight element.
    pub const GRAD_WEIGHT_FLOPS: u64 = 2;

    /// Returns the cost of the forward.
    pub fn forward(&self) -> Cost {
        Cost {
            saved_bytes: if self.input == LinearInput::Saved { self.input_bytes() } else { 0 },
            scratch_bytes: self.codes(self.n_in) + self.operand_bytes(self.n_tokens * self.n_in + self.n_weights()),
            flops: Self::FORWARD_FLOPS * self.n_tokens * self.n_weights(),
        }
    }

    /// Returns the cost of the backward, including the gradient of x.
    pub fn backward(&self) -> Cost {
        let recomputed = if self.input == LinearInput::Recomputed { self.input_bytes() } else { 0 };
        let of_weight = if self.grad.is_some() { Self::GRAD_WEIGHT_FLOPS } else { 0 };
        // The gradient of the weight and then that of the input read dy.
        let for_weight = if self.grad.is_some() { self.n_tokens * self.n_in } else { 0 };
        let operands = self.operand_bytes(self.n_tokens * self.n_out + self.n_weights().max(for_weight));
        Cost {
            saved_bytes: 0,
            // In FP8 a recomputed input is quantized and freed before the matmuls.
            scratch_bytes: if self.fp8.is_some() { recomputed.max(operands) } else { recomputed + operands }
                + self.codes_of_backward()
                + self.rounded_grad_bytes(),
            flops: (Self::GRAD_INPUT_FLOPS + of_weight) * self.n_tokens * self.n_weights(),
        }
    }

    fn n_weights(&self) -> u64 {
        self.n_in * self.n_out
    }

    /// Returns the bytes of FP8 codes of `n` elements a token.
    fn codes(&self, n: u64) -> u64 {
        if self.fp8.is_some() { self.n_tokens * n } else { 0 }
    }

    /// Returns the bytes of the FP8 codes of dy, and of x if the weight is trained. For the weight's gradient a GPU transposes
    /// those of dy.
    fn codes_of_backward(&self) -> u64 {
        let n_grads = if self.device == DeviceKind::Gpu { 2 } else { self.fp8.unwrap_or(0) };
        self.codes(if self.grad.is_some() { self.n_in + n_grads * self.n_out } else { self.n_out })
    }

    /// Returns the bytes of converted operands. In FP8 a CPU multiplies `n` values in bf16. With f16 it widens them in blocks.
    /// Operands whose blocks have other scales than powers of two are widened, too, but count as the others.
    fn operand_bytes(&self, n: u64) -> u64 {
        match self.fp8.is_some() && self.device == DeviceKind::Cpu && self.dtype != DType::F16 {
            true => bytes(n, DType::BF16),
            false => self.widened_bytes(),
        }
    }

    fn input_bytes(&self) -> u64 {
        bytes(self.n_tokens * self.n_in, self.dtype)
    }

    /// Returns true if the CPU kernel converts operands to f32. bf16 is read as it is if all operands are bf16.
    fn widens(&self) -> bool {
        let is_mixed = self.storage != WeightStorage::Dense && self.dtype != DType::F32;
        self.device.widens(self.dtype) || (self.device == DeviceKind::Cpu && is_mixed)
    }

    /// Returns the bytes of a weight gradient's f32 sums that are rounded later.
    fn rounded_grad_bytes(&self) -> u64 {
        if self.widens() && self.grad == Some(DType::BF16) { self.n_weights() * F32_BYTES } else { 0 }
    }

    /// Returns the bytes of a token block and of a weight panel in f32, where the CPU kernel converts them.
    ///
    /// On a GPU a quantized weight is dequantized as a whole.
    fn widened_bytes(&self) -> u64 {
        let widens = self.widens();
        let n_rows = (block_rows(self.n_out as usize, self.n_in as usize) as u64).min(self.n_tokens);
        let of_tokens = if widens { n_rows * (self.n_in + self.n_out) * F32_BYTES } else { 0 };
        let panel = self.n_weights().min(PANEL as u64) * F32_BYTES;
        of_tokens
            + match (self.device, self.storage) {
                (_, WeightStorage::Dense | WeightStorage::F32) => {
                    if widens {
                        panel
                    } else {
                        0
                    }
                }
                (DeviceKind::Cpu, WeightStorage::Quantized(_)) => panel,
                (DeviceKind::Gpu, WeightStorage::Quantized(_)) => bytes(self.n_weights(), self.dtype),
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::packs_bf16;

    fn layer(dtype: DType, device: DeviceKind, input: LinearInput, grad: Option<DType>) -> LinearCost {
        let storage = WeightStorage::Dense;
        LinearCost { n_tokens: 10, n_in: 3, n_out: 4, dtype, device, input, grad, storage, fp8: None }
    }

    #[test]
    fn only_a_cpu_widens_and_only_sixteen_bits() {
        let scratch = |dtype, device| {
            let cost = layer(dtype, device, LinearInput::Unused, None);
            assert_eq!(cost.forward().scratch_bytes, cost.backward().scratch_bytes);
            cost.forward().scratch_bytes
        };
        assert_eq!(scratch(DType::F32, DeviceKind::Cpu), 0);
        assert_eq!(scratch(DType::BF16, DeviceKind::Gpu), 0);
        // Ten rows of input and output, and the weight.
        let widened = (10 * (3 + 4) + 12) * 4;
        assert_eq!(scratch(DType::F16, DeviceKind::Cpu), widened);
        assert_eq!(scratch(DType::BF16, DeviceKind::Cpu), if packs_bf16() { 0 } else { widened });
    }

    #[test]
    fn a_bf16_input_of_an_f32_weight_is_widened() {
        let cost = LinearCost {
            storage: WeightStorage::F32,
            ..layer(DType::BF16, DeviceKind::Cpu, LinearInput::Unused, None)
        };
        assert_eq!(cost.forward().scratch_bytes, (10 * (3 + 4) + 12) * 4);
    }

    #[test]
    fn a_saved_input_is_on_the_tape_and_a_recomputed_one_in_backward() {
        let of = |input| {
            let cost = layer(DType::F32, DeviceKind::Cpu, input, Some(DType::F32));
            (cost.forward().saved_bytes, cost.backward().scratch_bytes)
        };
        assert_eq!(of(LinearInput::Unused), (0, 0));
        assert_eq!(of(LinearInput::Saved), (120, 0));
        assert_eq!(of(LinearInput::Recomputed), (0, 120));
    }

    #[test]
    fn fp8_costs_codes_and_on_a_cpu_operands_in_bf16() {
        let of = |device| {
            let dense = layer(DType::F16, device, LinearInput::Unused, Some(DType::F32));
            let fp8 = LinearCost { fp8: Some(2), ..dense };
            [(fp8.forward(), dense.forward()), (fp8.backward(), dense.backward())]
                .map(|(fp8, dense)| fp8.scratch_bytes - dense.scratch_bytes)
        };
        assert_eq!(of(DeviceKind::Gpu), [30, 110]);
        assert_eq!(of(DeviceKind::Cpu), [30, 110], "fp16 is widened with and without FP8");
        let f32 = layer(DType::F32, DeviceKind::Cpu, LinearInput::Unused, None);
        assert_eq!(LinearCost { fp8: Some(1), ..f32 }.forward().scratch_bytes, 30 + (10 * 3 + 12) * 2);
        let large = LinearCost { n_tokens: 1, n_in: 4096, n_out: 4096, fp8: Some(1), ..f32 };
        assert_eq!(large.forward().scratch_bytes, 4096 + 2 * (4096 + 4096 * 4096));
    }

    #[test]
    fn fp8_frees_a_recomputed_input_before_the_matmuls() {
        let of = |fp8| {
            let dense = layer(DType::F32, DeviceKind::Cpu, LinearInput::Recomputed, Some(DType::F32));
            LinearCost { n_tokens: 100, n_in: 30, n_out: 5, fp8, ..dense }.backward().scratch_bytes
        };
        assert_eq!(of(None), 100 * 30 * 4);
        // Codes, and the recomputed input.
        assert_eq!(of(Some(1)), 100 * (30 + 5) + 100 * 30 * 4);
        assert_eq!(of(Some(2)), 100 * (30 + 2 * 5) + 100 * 30 * 4);
    }

    #[test]
    fn a_frozen_weight_in_fp8_has_one_copy_of_the_gradient_and_none_of_the_input() {
        let frozen = LinearCost { fp8: Some(2), ..layer(DType::F16, DeviceKind::Gpu, LinearInput::Unused, None) };
        assert_eq!(frozen.backward().scratch_bytes, 10 * 4);
    }

    #[test]
    fn a_trained_weight_costs_another_matmul_and_a_rounded_gradient_a_sum() {
        let of = |grad| layer(DType::F16, DeviceKind::Cpu, LinearInput::Unused, grad).backward();
        let widened = of(None).scratch_bytes;
        assert_eq!(of(None), Cost { flops: 240, scratch_bytes: widened, ..Cost::default() });
        assert_eq!(of(Some(DType::F32)), Cost { flops: 480, scratch_bytes: widened, ..Cost::default() });
        assert_eq!(of(Some(DType::BF16)), Cost { flops: 480, scratch_bytes: widened + 48, ..Cost::default() });
    }
}
