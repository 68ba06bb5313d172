//! LoRA with PEFT's configuration and files: y = x W^T + b + scaling * (x A^T) B^T, with W frozen.

mod base;
mod config;
mod folder;
mod layer;
mod model_names;
mod names;
mod target;

use candle_core::{DType, Result, Tensor};

use crate::{Dim, DimSize, Init, ParamScope, ParamSpec};

pub use base::{BASE_MODEL_RECORD, BaseModelRecord};
pub use config::LoraConfig;
pub use folder::AdapterFolder;
pub use layer::Lora;
pub use model_names::AdapterNames;
pub use target::LoraTargets;

pub(crate) use target::targeted_twice;

/// A LoRA adapter on one linear layer, router or matrix of the experts.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSpec {
    /// Name of the layer, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// LoRA rank.
    pub r: usize,
    /// Factor on B A: alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA.
    pub scaling: f64,
    /// Dropout probability of the adapter's input.
    pub dropout: f64,
}

impl AdapterSpec {
    /// Returns the name of A [r, in_features].
    pub fn a_name(&self) -> String {
        format!("{}.lora_A.weight", self.module)
    }

    /// Returns the name of B [out_features, r].
    pub fn b_name(&self) -> String {
        format!("{}.lora_B.weight", self.module)
    }

    /// Returns true if `name` is a LoRA factor's name.
    pub fn owns(name: &str) -> bool {
        name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight")
    }
}

/// Returns the factors A and B. A is initialized as by torch's `nn.Linear` (Kaiming uniform, a = sqrt(5)), B with
/// zeros.
pub(crate) fn factors(adapter: &AdapterSpec, [out, input]: [DimSize; 2], scope: ParamScope) -> [ParamSpec; 2] {
    let rank = DimSize { dim: Dim::Rank, len: adapter.r };
    let bound = (input.len as f64).powf(-0.5);
    [
        ParamSpec::matrix(adapter.a_name(), [rank, input], scope, Init::Uniform { bound }),
        ParamSpec::matrix(adapter.b_name(), [out, rank], scope, Init::Zeros),
    ]
}

/// Returns the merged weight W + scaling B A, in f32.
pub fn merge_lora(base: &Tensor, a: &Tensor, b: &Tensor, scaling: f64) -> Result<Tensor> {
    let delta = b.to_dtype(DType::F32)?.matmul(&a.to_dtype(DType::F32)?)?;
    base.to_dtype(DType::F32)? + delta.affine(scaling, 0.0)?
}
