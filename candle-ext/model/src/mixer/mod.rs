//! Kinds of the sublayer that mixes tokens: a module each, and the choice of a model's config.
//!
//! Code outside of this folder uses the two traits, and names no kind. docs/adding-a-mixer.md adds one.

mod attention;

use std::fmt::Debug;

use candle_core::{Result, Tensor};
use candlewick_ops::NormCall;

use crate::lora::LoraTargets;
use crate::spec_object::spec_object;
use crate::{
    AdapterSpec, Config, ForwardContext, LayerSizes, LinearGroup, LinearSpec, ModelError, ParamScope, ParamSpec,
    WeightLookup,
};

pub use attention::SelfAttentionSpec;

/// Specification of the sublayer that mixes tokens: parameters, adapters, cost, and the layer itself.
pub trait MixerSpec: MixerSpecObject + Debug + Send + Sync {
    /// Returns the name of the kind in messages, such as `attention`.
    fn kind(&self) -> &'static str;

    /// Returns the linear layers in forward order. Adapters may target them.
    fn linears(&self) -> Vec<&LinearSpec>;

    /// Returns the linear layers in forward order.
    fn linears_mut(&mut self) -> Vec<&mut LinearSpec>;

    /// Returns the parameters other than those of the linear layers. Matrices are initialized with standard deviation
    /// `std`.
    fn own_params(&self, _std: f64) -> Vec<ParamSpec> {
        Vec::new()
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

    /// Returns all linear layers, in groups that share work.
    fn linear_groups(&self) -> Vec<LinearGroup<'_>> {
        self.linears().into_iter().map(LinearGroup::single).collect()
    }

    /// Returns the sizes of attention over pairs of tokens; `None` for a mixer without.
    fn attention_shape(&self) -> Option<AttentionShape> {
        None
    }

    /// Returns the reason for which ranks cannot split the sublayer so; `None` if they can.
    fn refusal(&self, split: MixerSplit) -> Option<String>;

    /// Returns the memory of the sublayer.
    fn cost(&self, sizes: &LayerSizes) -> MixerCost;

    /// Builds the sublayer of layer `layer_idx` from the parameters that `get` returns by name.
    fn build(&self, layer_idx: usize, get: &mut WeightLookup) -> Result<Box<dyn Mixer>>;
}

spec_object!(MixerSpecObject, MixerSpec);

/// A sublayer that mixes tokens.
pub trait Mixer: Send + Sync {
    /// Computes [t, d] -> [t, d] from the output of the norm, which the caller does not keep.
    fn forward(&self, normed_td: Tensor, context: &ForwardContext) -> Result<Tensor>;

    /// Computes the sublayer with the norm before it. Returns `None` if the norm must be computed first.
    fn forward_of_norm(&self, _norm: NormCall<'_>, _context: &ForwardContext) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

/// Way to split a mixer over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixerSplit {
    /// Tensor parallelism: ranks have heads or channels of all tokens.
    Tensor,
    /// Context parallelism: ranks have tokens, and pass what later tokens read around a ring.
    Context,
    /// Ulysses: ranks have tokens, and exchange them for heads.
    Ulysses,
}

/// Sizes of attention over pairs of tokens, of the unsharded layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of KV heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The sliding window: query i attends to key j while i - j < window.
    pub window: Option<usize>,
}

/// Memory of a mixer on one rank, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MixerCost {
    /// Activations saved for backward, without the sublayer's output.
    pub saved: u64,
    /// Activations that selective activation checkpointing saves.
    pub saved_by_selective: u64,
    /// Peak of a forward without autograd, without the layer's input.
    pub forward: u64,
    /// Bytes that exist until the layer's forward ends.
    pub until_forward_ends: u64,
    /// Peak of the backward with the saved activations, the layer's output and the gradient of the residual sum.
    pub backward: u64,
    /// RoPE tables, which all layers share.
    pub rope: u64,
    /// Elements of a token that are kept between forwards, such as keys and values.
    pub state_elements: u64,
}

impl Config {
    /// Returns the mixer of layer `layer_idx`. `like` is the layer of the config whose shape it has.
    pub(crate) fn mixer(&self, layer_idx: usize, like: usize) -> Box<dyn MixerSpec> {
        Box::new(self.self_attention(layer_idx, self.window(like)))
    }
}
