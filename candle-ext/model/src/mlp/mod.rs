//! Kinds of the sublayer that acts on each token: a module each, and the choice of a model's config.
//!
//! Code outside of this folder uses the two traits, and names no kind. docs/adding-a-mixer.md adds one.

mod moe;
mod swiglu;

use std::fmt::Debug;

use candle_core::{Result, Tensor};
use candlewick_ops::{GemmSize, NormCall};

use crate::linear_spec::layer_name;
use crate::lora::{AdapterNames, LoraTargets};
use crate::spec_object::spec_object;
use crate::{
    AdapterSpec, Config, ForwardContext, LayerSizes, LinearGroup, LinearSpec, ModelError, ParamScope, ParamSpec,
    WeightLookup,
};

pub use moe::{
    ExpertAdapterSpec, ExpertCall, ExpertExchange, ExpertMatrixSpec, ExpertPadding, ExpertTokens, Experts, MoeSpec,
    SharedExpertSpec,
};
pub use swiglu::{SwiGluSpec, swiglu_mlp};

/// Specification of the sublayer that acts on each token: parameters, adapters, cost, and the layer itself.
pub trait MlpSpec: MlpSpecObject + Debug + Send + Sync {
    /// Returns the name of the kind in messages, such as `SwiGLU`.
    fn kind(&self) -> &'static str;

    /// Returns the linear layers between the collectives of the sublayer, in forward order. Adapters may target them.
    fn linears(&self) -> Vec<&LinearSpec>;

    /// Returns the linear layers between the collectives of the sublayer, in forward order.
    fn linears_mut(&mut self) -> Vec<&mut LinearSpec>;

    /// Returns the parameters other than those of [`Self::linears`]. Matrices are initialized with standard deviation
    /// `std`.
    fn own_params(&self, _std: f64) -> Vec<ParamSpec> {
        Vec::new()
    }

    /// Returns the matrices of routed experts; none by default.
    fn expert_matrices(&self) -> Vec<&ExpertMatrixSpec> {
        Vec::new()
    }

    /// Returns the matrices of routed experts; none by default.
    fn expert_matrices_mut(&mut self) -> Vec<&mut ExpertMatrixSpec> {
        Vec::new()
    }

    /// Returns the router of experts; none by default.
    fn router(&self) -> Option<&LinearSpec> {
        None
    }

    /// Returns the name of the router's expert bias; `None` without one.
    fn expert_bias_name(&self) -> Option<String> {
        None
    }

    /// Returns the LoRA adapters.
    fn adapters(&self) -> Vec<&AdapterSpec> {
        self.linears().into_iter().filter_map(|linear| linear.adapter.as_ref()).collect()
    }

    /// Adds the adapters that `targets` select in this layer. Returns their factors.
    ///
    /// # Errors
    /// If the rules contradict each other.
    fn attach(&mut self, targets: &LoraTargets, layer_idx: usize) -> std::result::Result<Vec<ParamSpec>, ModelError> {
        targets.attach_linears(self.linears_mut(), layer_idx, ParamScope::Sublayer)
    }

    /// Returns the names that adapters may target.
    fn adapter_names(&self) -> AdapterNames {
        AdapterNames::of_linears(&self.linears())
    }

    /// Returns the number of weight elements that a token is multiplied with.
    fn n_active_weights(&self) -> usize {
        self.linears().into_iter().map(LinearSpec::n_weights).sum()
    }

    /// Returns [`Self::linears`] in groups that share work.
    fn linear_groups(&self) -> Vec<LinearGroup<'_>> {
        self.linears().into_iter().map(LinearGroup::single).collect()
    }

    /// Returns the memory of the sublayer.
    fn cost(&self, sizes: &LayerSizes) -> MlpCost;

    /// Builds the sublayer of layer `layer_idx` from the parameters that `get` returns by name.
    fn build(&self, layer_idx: usize, get: &mut WeightLookup) -> Result<Box<dyn Mlp>>;
}

spec_object!(MlpSpecObject, MlpSpec);

/// A sublayer that acts on each token.
pub trait Mlp: Send + Sync {
    /// Computes [t, d] -> [t, d] from the output of the norm.
    fn forward(&self, normed_td: &Tensor, context: &ForwardContext) -> Result<Tensor>;

    /// Computes the sublayer with the norm before it: norm input [t, d] -> the stream that the sublayer is added to, and
    /// [t, d]. Returns `None` if the norm must be computed first.
    fn forward_of_norm(&self, _norm: NormCall<'_>, _context: &ForwardContext) -> Result<Option<[Tensor; 2]>> {
        Ok(None)
    }
}

/// Memory of an MLP on one rank, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct MlpCost {
    /// Activations saved for backward, without input and output.
    pub saved: u64,
    /// Activations that every activation checkpointing saves.
    pub saved_by_all: u64,
    /// Peak of a forward without autograd, without input and output.
    pub forward: u64,
    /// Peak of a recorded forward, without input and output.
    pub recorded_forward: u64,
    /// Peak of the backward with the saved activations, without the gradients of input and output.
    pub backward: u64,
    /// Peak of the end of the backward, when the saved activations are free.
    pub end_of_backward: u64,
    /// Copies of rows and weights that the CPU's threads make, and keep.
    pub kept_by_threads: u64,
    /// GEMM sizes, forward and backward.
    pub matmuls: [GemmSize; 3],
}

impl Config {
    /// Returns the MLP of layer `layer_idx`. `like` is the layer of the config whose shape it has.
    pub(crate) fn mlp(&self, layer_idx: usize, like: usize) -> Box<dyn MlpSpec> {
        match self.moe_of_layer(like) {
            Some(moe) => Box::new(self.moe_spec(moe, layer_idx)),
            None => Box::new(self.dense_mlp(layer_idx)),
        }
    }

    /// Returns the MLP of layer `layer_idx` without experts.
    pub(crate) fn dense_mlp(&self, layer_idx: usize) -> SwiGluSpec {
        self.swiglu(&format!("{}.mlp", layer_name(layer_idx)), self.typed.intermediate_size)
    }
}
