//! What ranks that see different data keep of what they have in common: all of it, or a share each (ZeRO).

use std::ops::Range;
use std::sync::Arc;

use candlewick_comm::{Collective, Solo};

use crate::pipeline::Layout;
use crate::placement::Norms;
use crate::tensor::TensorRanks;

/// Every parameter begins at a multiple of so many elements, and every share: of 256 bytes, as fast products on GPUs want it.
pub(crate) const ALIGNMENT: usize = 128;

/// Of what a rank keeps only its share. Each includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sharded {
    /// Masters and moments (ZeRO stage 1).
    Optimizer,
    /// And the summed gradients (stage 2): those of a unit are whole while it goes backward.
    Gradients,
    /// And the weights (stage 3): those of a unit are whole while it is computed.
    Weights,
}

/// Who keeps what. Gradients are summed over the ranks of `shards` and `replicas`.
#[derive(Clone)]
pub struct Sharing {
    /// What falls into shares.
    pub sharded: Sharded,
    /// The ranks that keep a share each, in their order.
    pub shards: Arc<dyn Collective>,
    /// The ranks that keep the same share.
    pub replicas: Arc<dyn Collective>,
    /// The ranks that have a part each of every matrix.
    pub tensor: TensorRanks,
    /// The ranks that have some of the units each.
    pub stages: Stages,
    /// All ranks that keep different things: those of shards, tensor and stages.
    pub all: Arc<dyn Collective>,
}

/// The stages of a pipeline, as those that keep parameters.
#[derive(Clone)]
pub struct Stages {
    /// The stages.
    pub ranks: Arc<dyn Collective>,
    /// Who has which blocks; one stage has all of them, however many, without being told.
    pub layout: Option<Layout>,
    /// The stages that have the same parameter, if one is tied: the first and the last one. Others are alone.
    pub ties: Arc<dyn Collective>,
}

impl Sharing {
    /// Returns the sharing of a rank that has all to itself.
    pub fn alone() -> Self {
        let solo = || Arc::new(Solo) as Arc<dyn Collective>;
        Self {
            sharded: Sharded::Optimizer,
            shards: solo(),
            replicas: solo(),
            tensor: TensorRanks { ranks: solo(), norms: Norms::Whole },
            stages: Stages { ranks: solo(), layout: None, ties: solo() },
            all: solo(),
        }
    }

    /// The length of a flat run of `n` elements with what makes its shares even.
    pub(crate) fn padded(&self, n: usize) -> usize {
        n.next_multiple_of(ALIGNMENT * self.shards.size())
    }

    /// This rank's share of a flat run of `n` elements, padded.
    pub(crate) fn own(&self, n: usize) -> Range<usize> {
        let share = n / self.shards.size();
        self.shards.rank() * share..(self.shards.rank() + 1) * share
    }
}

impl Stages {
    /// Returns the stage that has a unit to itself, or that of the owner of one that several have.
    pub(crate) fn owner(&self, unit_idx: usize) -> usize {
        self.layout.as_ref().map_or(0, |layout| layout.stage_of(unit_idx))
    }

    /// Tells whether this stage has a unit to itself.
    pub(crate) fn owns(&self, unit_idx: usize) -> bool {
        self.owner(unit_idx) == self.ranks.rank()
    }
}
