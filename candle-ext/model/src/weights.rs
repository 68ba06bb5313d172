//! Weights of one FSDP unit, looked up by name once.

use std::collections::HashMap;

use candle_core::{Result, Tensor, bail};
use candlewick_ops::{self as ops, OutputDtype, Weight};

use crate::{
    FsdpUnit,
    layer::Layer,
    mtp::MtpLayer,
    norm::Norm,
    unit::{EMBEDDING, FINAL_NORM, FsdpUnitKind, LM_HEAD},
};

/// Weights of one FSDP unit: views of buffers that the engine all-gathers and frees.
pub enum UnitWeights {
    /// Token embedding.
    Embedding(EmbeddingTable),
    /// A decoder layer.
    Layer(Box<Layer>),
    /// A layer for multi-token prediction.
    Mtp(Box<MtpLayer>),
    /// Final norm and output layer (`lm_head`).
    Head(Box<LmHead>),
    /// Parameters that a caller outside of this crate reads by name.
    Named(HashMap<String, Weight>),
}

/// Token embedding [v, d].
pub struct EmbeddingTable {
    pub(crate) table: Weight,
}

/// Final norm and output layer (`lm_head`).
pub struct LmHead {
    norm: Norm,
    lm_head: Weight,
}

impl UnitWeights {
    /// Builds the weights of `unit`. `weights` must contain all parameters that it owns or [reads](FsdpUnit::read_ties).
    pub fn new(unit: &FsdpUnit, weights: impl IntoIterator<Item = (String, Weight)>) -> Result<Self> {
        let weights: HashMap<_, _> = weights.into_iter().collect();
        let mut get = |name: &str| match weights.get(name) {
            Some(weight) => Ok(weight.clone()),
            None => bail!("the weights of {} lack `{name}`", unit.name),
        };
        Ok(match &unit.kind {
            FsdpUnitKind::Embedding => Self::Embedding(EmbeddingTable { table: get(EMBEDDING)? }),
            FsdpUnitKind::Layer(spec) => Self::Layer(Box::new(Layer::build(spec, &mut get)?)),
            FsdpUnitKind::Mtp(spec) => Self::Mtp(Box::new(MtpLayer::build(spec, &mut get)?)),
            FsdpUnitKind::Named => Self::Named(weights),
            FsdpUnitKind::Head { norm_eps } => {
                let lm_head = get(if unit.has_own_output() { LM_HEAD } else { EMBEDDING })?;
                Self::Head(Box::new(LmHead { norm: Norm { weight: get(FINAL_NORM)?, eps: *norm_eps }, lm_head }))
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

    pub(crate) fn mtp_layer(&self) -> Result<&MtpLayer> {
        match self {
            Self::Mtp(layer) => Ok(layer),
            other => bail!("expected an MTP layer, found {}", other.kind()),
        }
    }

    pub(crate) fn head(&self) -> Result<&LmHead> {
        match self {
            Self::Head(head) => Ok(head),
            other => bail!("expected an output layer, found {}", other.kind()),
        }
    }

    /// Returns parameter `name` of a [`UnitWeights::Named`].
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
            Self::Mtp(_) => "an MTP layer",
            Self::Head(_) => "an output layer",
            Self::Named(_) => "named parameters",
        }
    }
}

impl LmHead {
    /// Applies the final norm: [t, d] -> [t, d].
    pub(crate) fn norm(&self, x_td: &Tensor) -> Result<Tensor> {
        self.norm.forward(x_td)
    }

    /// Returns the output layer's weight [v, d].
    pub(crate) fn lm_head(&self) -> &Weight {
        &self.lm_head
    }

    /// Computes f32 logits: hidden states after the final norm [t, d] -> [t, v].
    pub(crate) fn logits(&self, normed_td: &Tensor) -> Result<Tensor> {
        ops::linear(normed_td, &self.lm_head, None, OutputDtype::F32)
    }
}
