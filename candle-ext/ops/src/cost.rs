//! Memory and FLOPs that ops declare, computed from shapes, dtype and kind of device.
//!
//! Bytes cover large tensors. One number per row is ignored, except for attention's log-sum-exp.

use candle_core::DType;

use crate::gemm::{has_bf16_unit, packs_bf16};

/// Bytes of an f32.
pub(crate) const F32_BYTES: u64 = size_of::<f32>() as u64;

/// Cost of one pass of an op, forward or backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes that the forward saves on the tape until its backward.
    pub saved_bytes: u64,
    /// Bytes allocated during the pass, without inputs, outputs and saved tensors.
    pub scratch_bytes: u64,
    /// FLOPs of matmuls. Elementwise operations are not counted.
    pub flops: u64,
}

/// Kind of the compute device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// CPU, whose kernels sum in f32.
    Cpu,
    /// An NVIDIA GPU.
    Gpu,
}

/// Source of a linear layer's input during backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearInput {
    /// No source: the weight is frozen, so the input is not needed.
    Unused,
    /// The tape, which saved the input.
    Saved,
    /// Recomputation, for the output of a norm, a gated activation or dropout.
    Recomputed,
}

impl DeviceKind {
    /// Returns true if matmuls convert operands of this dtype to f32.
    pub(crate) fn widens(self, dtype: DType) -> bool {
        self == Self::Cpu && dtype != DType::F32 && !(dtype == DType::BF16 && packs_bf16())
    }

    /// Returns true if kernels around matmuls, such as attention, convert tensors of this dtype to f32.
    pub(crate) fn widens_without_unit(self, dtype: DType) -> bool {
        self == Self::Cpu && dtype != DType::F32 && !(dtype == DType::BF16 && has_bf16_unit())
    }
}

/// Returns the bytes of `numel` elements.
pub(crate) fn bytes(numel: u64, dtype: DType) -> u64 {
    numel * dtype.size_in_bytes() as u64
}
