//! Gradients on their way to being summed over the ranks, while backward goes on.

use std::collections::VecDeque;

use candle_core::{Result, Tensor};
use candlewick_comm::{Pending, Reduce};

use super::ParamStore;

/// Units whose gradients are under way, oldest first. How far each is depends on the number of those behind it alone: all
/// ranks call the groups in one order.
#[derive(Default)]
pub(crate) struct Reductions {
    /// Being summed over the shards.
    scattering: VecDeque<(usize, Pending)>,
    /// Being summed over the replicas of a share.
    summing: VecDeque<(usize, Pending)>,
}

/// Units that may be on one leg of the way at once.
const AT_ONCE: usize = 1;

impl Reductions {
    /// Starts with the gradients of one more unit.
    pub(crate) fn begin(&mut self, unit_idx: usize, grads: &Tensor, store: &ParamStore) -> Result<()> {
        self.scattering.push_back((unit_idx, store.sharing.shards.start_reduce_scatter(grads)?));
        self.advance(AT_ONCE, store)
    }

    /// Waits for all of them.
    pub(crate) fn finish(&mut self, store: &ParamStore) -> Result<()> {
        self.advance(0, store)
    }

    fn advance(&mut self, at_once: usize, store: &ParamStore) -> Result<()> {
        while self.scattering.len() > at_once {
            let Some((unit_idx, share)) = self.scattering.pop_front() else { break };
            let sum = store.sharing.replicas.start_all_reduce(&share.wait()?, Reduce::Sum)?;
            self.summing.push_back((unit_idx, sum));
        }
        while self.summing.len() > at_once {
            let Some((unit_idx, sum)) = self.summing.pop_front() else { break };
            if let Some(flat) = store.units[unit_idx].as_ref().and_then(|unit| unit.trainable.as_ref()) {
                flat.grads.settle(sum.wait()?)?;
            }
        }
        Ok(())
    }
}
