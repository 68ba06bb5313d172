//! Memory of parameters and their training state.

use candle_core::{Device, Tensor};
use candlewick_ops::FlatBuffer;

/// Bytes of parameters and training state on the computing device, by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreBytes {
    /// Weights that ops read: frozen ones and copies in the compute dtype.
    pub weights: u64,
    /// Master weights, if they are separate from the weights that ops read.
    pub masters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Optimizer states.
    pub optimizer_states: u64,
}

impl StoreBytes {
    /// Returns the sum of all categories.
    pub fn total(&self) -> u64 {
        self.weights + self.masters + self.gradients + self.optimizer_states
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            weights: self.weights + other.weights,
            masters: self.masters + other.masters,
            gradients: self.gradients + other.gradients,
            optimizer_states: self.optimizer_states + other.optimizer_states,
        }
    }
}

/// Returns the bytes of a buffer; zero while it is unallocated.
pub(super) fn of_buffer(buffer: &FlatBuffer) -> u64 {
    buffer.data().map_or(0, |flat| n_bytes(&flat))
}

/// Returns the bytes of a tensor on `device`; zero if it is elsewhere.
pub(super) fn of_tensor(flat: &Tensor, device: &Device) -> u64 {
    if flat.device().same_device(device) { n_bytes(flat) } else { 0 }
}

fn n_bytes(flat: &Tensor) -> u64 {
    (flat.elem_count() * flat.dtype().size_in_bytes()) as u64
}
