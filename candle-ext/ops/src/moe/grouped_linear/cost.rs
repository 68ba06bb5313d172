//! Memory and FLOPs of `grouped_linear`.

use candle_core::DType;

use super::tasks::MAX_COPIED_ROWS;
use crate::cost::{Cost, DeviceKind, F32_BYTES, LinearInput, bytes};
use crate::gemm::prefetches_f32;
use crate::linear::LinearCost;
use crate::quantized::WeightStorage;
use crate::weight_matmul::PANEL;

/// Sizes of a grouped linear layer, for its cost: x [n, in] and w [e * out, in].
#[derive(Clone, Copy, Debug)]
pub struct GroupedLinearCost {
    /// n, the number of rows of all groups.
    pub n_rows: u64,
    /// e, the number of groups.
    pub n_groups: u64,
    /// Number of input features.
    pub n_in: u64,
    /// Number of output features of a group.
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
}

impl GroupedLinearCost {
    /// Returns the cost of the forward.
    pub fn forward(&self) -> Cost {
        Cost {
            saved_bytes: if self.input == LinearInput::Saved { self.input_bytes() } else { 0 },
            scratch_bytes: self.copied_bytes(),
            flops: LinearCost::FORWARD_FLOPS * self.n_rows * self.n_in * self.n_out,
        }
    }

    /// Returns the cost of the backward, including the gradient of x. It does not depend on the groups' sizes.
    pub fn backward(&self) -> Cost {
        let recomputed = if self.input == LinearInput::Recomputed { self.input_bytes() } else { 0 };
        let of_weight = if self.grad.is_some() { LinearCost::GRAD_WEIGHT_FLOPS } else { 0 };
        Cost {
            saved_bytes: 0,
            scratch_bytes: recomputed + self.copied_bytes(),
            flops: (LinearCost::GRAD_INPUT_FLOPS + of_weight) * self.n_rows * self.n_in * self.n_out,
        }
    }

    fn input_bytes(&self) -> u64 {
        bytes(self.n_rows * self.n_in, self.dtype)
    }

    /// Returns the bytes of the f32 copies of all threads on a CPU: a panel of weights, and a task's rows. bf16 is read as
    /// it is, and so are f32 weights by AMX.
    ///
    /// On a GPU a quantized weight is dequantized as a whole.
    fn copied_bytes(&self) -> u64 {
        let n_weights = self.n_in * self.n_out;
        match (self.device, self.storage) {
            (DeviceKind::Gpu, WeightStorage::Dense | WeightStorage::F32) => 0,
            (DeviceKind::Gpu, WeightStorage::Quantized(_)) => bytes(self.n_groups * n_weights, self.dtype),
            (DeviceKind::Cpu, WeightStorage::Dense) if self.dtype == DType::BF16 && !self.device.widens(self.dtype) => {
                0
            }
            (DeviceKind::Cpu, WeightStorage::Dense) if self.dtype == DType::F32 && prefetches_f32() => 0,
            (DeviceKind::Cpu, _) => {
                let n_rows = self.n_rows.min(MAX_COPIED_ROWS as u64);
                let of_rows = if self.dtype != DType::F32 { n_rows * (self.n_in + self.n_out) } else { 0 };
                let panel = n_weights.min(PANEL as u64);
                rayon::current_num_threads() as u64 * (of_rows + panel) * F32_BYTES
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(n_groups: u64, input: LinearInput, grad: Option<DType>) -> GroupedLinearCost {
        let (dtype, device, storage) = (DType::BF16, DeviceKind::Gpu, WeightStorage::Dense);
        GroupedLinearCost { n_rows: 10, n_groups, n_in: 3, n_out: 4, dtype, device, input, grad, storage }
    }

    #[test]
    fn neither_flops_nor_saved_bytes_depend_on_the_number_of_groups() {
        for n_groups in [1, 64] {
            let cost = layer(n_groups, LinearInput::Saved, Some(DType::F32));
            assert_eq!(cost.forward(), Cost { saved_bytes: 60, scratch_bytes: 0, flops: 240 });
            assert_eq!(cost.backward(), Cost { saved_bytes: 0, scratch_bytes: 0, flops: 480 });
        }
    }

    #[test]
    fn a_permuted_input_is_recomputed_in_backward() {
        let cost = layer(2, LinearInput::Recomputed, None);
        assert_eq!(cost.forward().saved_bytes, 0);
        assert_eq!(cost.backward(), Cost { saved_bytes: 0, scratch_bytes: 60, flops: 240 });
    }

    #[test]
    fn a_cpu_copies_a_panel_and_a_tasks_rows_per_thread() {
        let bf16 = GroupedLinearCost { device: DeviceKind::Cpu, ..layer(2, LinearInput::Unused, None) };
        assert!(bf16.device.widens(bf16.dtype) || bf16.forward().scratch_bytes == 0);
        let cost = GroupedLinearCost { dtype: DType::F16, ..bf16 };
        let n_threads = rayon::current_num_threads() as u64;
        assert_eq!(cost.forward().scratch_bytes, n_threads * (10 * 7 + 12) * 4);
        let dense = GroupedLinearCost { dtype: DType::F32, ..cost };
        assert_eq!(dense.forward().scratch_bytes, if prefetches_f32() { 0 } else { n_threads * 12 * 4 });
    }
}
