//! The weights of one unit as values, found by name once.

use std::collections::HashMap;

use candle_core::{Result, Tensor, bail};
use candlewick_ops::{self as ops, Precision, Weight};

use crate::{
    FsdpUnit,
    block::Layer,
    norm::Norm,
    unit::{EMBEDDING, FINAL_NORM, FsdpUnitKind, LM_HEAD},
};

/// The weights of one unit. They are views: the engine gathers and releases the elements.
pub enum UnitWeights {
    /// The embedding.
    Embedding(EmbeddingTable),
    /// A decoder layer.
    Layer(Box<Layer>),
    /// The last norm and the output layer.
    Head(LmHead),
    /// Parameters that code outside of this crate finds by name.
    Named(HashMap<String, Weight>),
}

/// The embedding [v, d].
pub struct EmbeddingTable {
    pub(crate) table: Weight,
}

/// The last norm and the output layer.
pub struct LmHead {
    norm: Norm,
    lm_head: Weight,
}

impl UnitWeights {
    /// Builds the weights of `unit`; every parameter that it owns or shares must be among `weights`.
    pub fn new(unit: &FsdpUnit, weights: impl IntoIterator<Item = (String, Weight)>) -> Result<Self> {
        let weights: HashMap<_, _> = weights.into_iter().collect();
        let mut get = |name: &str| match weights.get(name) {
            Some(weight) => Ok(weight.clone()),
            None => bail!("the weights of {} lack `{name}`", unit.name),
        };
        Ok(match &unit.kind {
            FsdpUnitKind::Embedding => Self::Embedding(EmbeddingTable { table: get(EMBEDDING)? }),
            FsdpUnitKind::Layer(spec) => Self::Layer(Box::new(Layer::build(spec, &mut get)?)),
            FsdpUnitKind::Named => Self::Named(weights),
            FsdpUnitKind::Head { norm_eps } => {
                let lm_head = get(unit.tied.first().map_or(LM_HEAD, |tied| tied.name.as_str()))?;
                Self::Head(LmHead { norm: Norm { weight: get(FINAL_NORM)?, eps: *norm_eps }, lm_head })
            }
        })
    }

    pub(crate) fn embedding(&self) -> Result<&EmbeddingTable> {
        match self {
            Self::Embedding(embedding) => Ok(embedding),
            other => bail!("expected an embedding, found {}", other.kind()),
        }
    }

    pub(crate) fn layer(&self) -> Result<&Layer> {
        match self {
            Self::Layer(layer) => Ok(layer),
            other => bail!("expected a decoder layer, found {}", other.kind()),
        }
    }

    pub(crate) fn head(&self) -> Result<&LmHead> {
        match self {
            Self::Head(head) => Ok(head),
            other => bail!("expected an output layer, found {}", other.kind()),
        }
    }

    /// Returns a parameter of a unit of named parameters.
    pub fn named(&self, name: &str) -> Result<&Weight> {
        match self {
            Self::Named(weights) => match weights.get(name) {
                Some(weight) => Ok(weight),
                None => bail!("there is no parameter `{name}` in this unit"),
            },
            other => bail!("expected named parameters, found {}", other.kind()),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Embedding(_) => "an embedding",
            Self::Layer(_) => "a decoder layer",
            Self::Head(_) => "an output layer",
            Self::Named(_) => "named parameters",
        }
    }
}

impl LmHead {
    /// Computes the norm after the last layer: [t, d] -> [t, d].
    pub(crate) fn norm(&self, x_td: &Tensor) -> Result<Tensor> {
        self.norm.forward(x_td)
    }

    /// Returns the output layer's weight [v, d].
    pub(crate) fn lm_head(&self) -> &Weight {
        &self.lm_head
    }

    /// Computes f32 logits: normed [t, d] -> [t, v].
    pub(crate) fn logits(&self, normed_td: &Tensor) -> Result<Tensor> {
        ops::linear(normed_td, &self.lm_head, None, Precision::Full)
    }
}
