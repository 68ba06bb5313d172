//! Settings of a parameter store: mode, dtypes and CPU offload.

use candle_core::DType;
use candlewick_model::ParamSpec;

use super::offload::CpuOffload;
use crate::optimizer::OptimizerGroups;

/// Mode of a parameter store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreMode {
    /// Training: trainable parameters have master weights, gradients and optimizer states.
    Train,
    /// Inference: all parameters are read-only.
    Infer,
}

impl StoreMode {
    /// Returns true if the parameter is trained in this mode.
    pub(crate) fn trains(self, spec: &ParamSpec) -> bool {
        self == Self::Train && spec.trainable
    }
}

/// Dtypes of the parameters and their state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamDtypes {
    /// Dtype of the weights that ops read, and of frozen ones: f32, bf16 or f16.
    pub compute: DType,
    /// Dtype of master weights and gradients: f32, or bf16 if `compute` is bf16. bf16 master weights lose small updates
    /// to rounding, unless it is stochastic ([`MasterRounding`]).
    pub masters: DType,
    /// Dtype of optimizer states: f32 or bf16. A slot of the optimizer may insist on f32.
    pub optimizer_states: DType,
}

impl ParamDtypes {
    /// Returns dtypes with weights in `compute` and all else in f32.
    pub fn computing_in(compute: DType) -> Self {
        Self { compute, masters: DType::F32, optimizer_states: DType::F32 }
    }
}

/// Rounding of updated master weights in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MasterRounding {
    /// To the nearest number.
    #[default]
    Nearest,
    /// Up or down with a probability by the distance, for masters in bf16. The result does not depend on the mesh.
    Stochastic {
        /// Seed of the step's random numbers.
        key: u64,
    },
}

/// Settings of a [`ParamStore`].
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Dtypes of the parameters and their state.
    pub dtypes: ParamDtypes,
    /// Training or inference.
    pub mode: StoreMode,
    /// CPU offload settings.
    pub cpu_offload: CpuOffload,
    /// True if ZeRO stage 3 gathers weights that multiply in FP8 as codes of a byte. Experts are gathered in their dtype.
    pub fp8_param_gather: bool,
    /// Optimizer of the trainable parameters.
    pub optimizer: OptimizerGroups,
}

impl StoreOptions {
    /// Returns the options of a store without CPU offload, whose parameters the default optimizer updates.
    pub fn new(dtypes: ParamDtypes, mode: StoreMode) -> Self {
        let (cpu_offload, optimizer) = (CpuOffload::default(), OptimizerGroups::default());
        Self { dtypes, mode, cpu_offload, fp8_param_gather: false, optimizer }
    }
}
