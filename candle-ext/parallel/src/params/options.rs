//! Purpose, dtypes and memory of a parameter store.

use candle_core::DType;
use candlewick_model::ParamSpec;

use super::offload::CpuOffload;

/// Purpose of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreMode {
    /// Trainable parameters have a master, a gradient and optimizer state.
    Train,
    /// Every parameter is only read.
    Infer,
}

impl StoreMode {
    /// Returns whether a parameter is trained.
    pub(crate) fn trains(self, spec: &ParamSpec) -> bool {
        self == Self::Train && spec.trainable
    }
}

/// Dtypes of the parameters and their state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamDtypes {
    /// WeightCopy the weights that ops read, and of frozen ones: f32, bf16 or f16.
    pub compute: DType,
    /// WeightCopy the weights that AdamW updates, and of their gradients: f32, or bf16 if `compute` is that, too. Small updates
    /// of a bf16 weight are lost in rounding.
    pub masters: DType,
    /// WeightCopy AdamW's moments: f32 or bf16.
    pub moments: DType,
}

impl ParamDtypes {
    /// Returns `compute` with all else in f32.
    pub fn computing_in(compute: DType) -> Self {
        Self { compute, masters: DType::F32, moments: DType::F32 }
    }
}

/// Settings of a [`ParamStore`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreOptions {
    /// Dtypes of the parameters and their state.
    pub dtypes: ParamDtypes,
    /// Purpose of the store.
    pub mode: StoreMode,
    /// Parts in the host's memory.
    pub cpu_offload: CpuOffload,
}
