//! Low-rank adapters, with PEFT's configuration and files: y = x W^T + b + scaling * (x A^T) B^T, W frozen.

mod base;
mod config;
mod folder;
mod layer;
mod merge;
mod names;
mod target;

use candle_core::{DType, Result, Tensor};

use crate::{Dim, DimSize, Init, ParamScope, ParamSpec};

pub use base::{BASE_MODEL_RECORD, BaseModelRecord};
pub use config::LoraConfig;
pub use folder::AdapterFolder;
pub use layer::Lora;
pub use merge::{AdapterMerge, MergeReport};

/// An adapter on one linear layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSpec {
    /// The linear layer, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// The rank.
    pub r: usize,
    /// What B A is multiplied by: alpha / r, or alpha / sqrt(r).
    pub scaling: f64,
    /// The probability with which each input of A is dropped in training.
    pub dropout: f64,
}

impl AdapterSpec {
    /// Returns the name of A [r, inputs].
    pub fn a_name(&self) -> String {
        format!("{}.lora_A.weight", self.module)
    }

    /// Returns the name of B [outputs, r].
    pub fn b_name(&self) -> String {
        format!("{}.lora_B.weight", self.module)
    }

    /// Returns whether a parameter of this name is a factor of an adapter.
    pub fn owns(name: &str) -> bool {
        name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight")
    }
}

/// A as torch initialises a linear layer (kaiming uniform with a = sqrt(5)), B zero: the adapter begins as nothing.
pub(crate) fn factors(adapter: &AdapterSpec, [out, input]: [DimSize; 2]) -> [ParamSpec; 2] {
    let rank = DimSize { dim: Dim::Rank, len: adapter.r };
    let bound = (input.len as f64).powf(-0.5);
    [
        ParamSpec::matrix(adapter.a_name(), [rank, input], ParamScope::Sublayer, Init::Uniform { bound }),
        ParamSpec::matrix(adapter.b_name(), [out, rank], ParamScope::Sublayer, Init::Zeros),
    ]
}

/// W + scaling B A in f32.
pub fn merge_lora(base: &Tensor, a: &Tensor, b: &Tensor, scaling: f64) -> Result<Tensor> {
    let delta = b.to_dtype(DType::F32)?.matmul(&a.to_dtype(DType::F32)?)?;
    base.to_dtype(DType::F32)? + delta.affine(scaling, 0.0)?
}
