//! Bytes that the parameters and their training state take on the device.

use candle_core::{Device, Tensor};
use candlewick_ops::Buffer;

use super::flat::{Grads, Weights};
use super::trainable::Trainable;

/// Bytes of the parameters on the device that computes, by class. Bytes on the host are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreBytes {
    /// Weights that ops read: frozen ones and compute copies.
    pub weights: u64,
    /// Master weights, where they are not the compute copies.
    pub masters: u64,
    /// Gradients.
    pub gradients: u64,
    /// AdamW's moments.
    pub moments: u64,
}

impl StoreBytes {
    /// Returns the bytes of all classes.
    pub fn total(&self) -> u64 {
        self.weights + self.masters + self.gradients + self.moments
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            weights: self.weights + other.weights,
            masters: self.masters + other.masters,
            gradients: self.gradients + other.gradients,
            moments: self.moments + other.moments,
        }
    }

    pub(super) fn of_weights(weights: &Weights, device: &Device) -> Self {
        let apart = if weights.stays() { 0 } else { of_tensor(&weights.own, device) };
        Self { weights: of_buffer(&weights.all) + apart, ..Self::default() }
    }

    pub(super) fn of_trainable(flat: &Trainable, device: &Device) -> Self {
        let masters = if flat.has_one_copy() { 0 } else { of_tensor(&flat.master, device) };
        let moments = of_tensor(&flat.exp_avg, device) + of_tensor(&flat.exp_avg_sq, device);
        Self { masters, moments, gradients: of_grads(&flat.grads), ..Self::of_weights(&flat.weights, device) }
    }
}

fn of_grads(grads: &Grads) -> u64 {
    // A share that stays is a view of all.
    of_buffer(&grads.all) + if grads.stay() { 0 } else { of_buffer(&grads.own) }
}

fn of_buffer(buffer: &Buffer) -> u64 {
    buffer.get().map_or(0, |flat| n_bytes(&flat))
}

fn of_tensor(flat: &Tensor, device: &Device) -> u64 {
    if flat.device().same_device(device) { n_bytes(flat) } else { 0 }
}

fn n_bytes(flat: &Tensor) -> u64 {
    (flat.elem_count() * flat.dtype().size_in_bytes()) as u64
}
