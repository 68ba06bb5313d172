//! What ranks that see different data keep of what they have in common: all of it, or a share each (ZeRO).

use std::ops::Range;
use std::sync::Arc;

use candlewick_comm::{Collective, Solo};

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

/// Who keeps what. Gradients are summed over the ranks of both groups.
#[derive(Clone)]
pub struct Sharing {
    /// What falls into shares.
    pub sharded: Sharded,
    /// The ranks that keep a share each, in their order.
    pub shards: Arc<dyn Collective>,
    /// The ranks that keep the same share.
    pub replicas: Arc<dyn Collective>,
}

impl Sharing {
    /// Returns the sharing of a rank that has all to itself.
    pub fn alone() -> Self {
        Self { sharded: Sharded::Optimizer, shards: Arc::new(Solo), replicas: Arc::new(Solo) }
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
