//! Agreement before each forward, among ranks that share experts or a model replica.
//!
//! Every rank takes part in every exchange of tokens. A rank without requests therefore computes a filler until all ranks
//! are done. Its tokens do not change the results of the others.

use anyhow::Result;
use candle_core::{Device, Tensor};
use candlewick_comm::{Collective, Reduce};
use candlewick_model::{LengthClass, SingleDevice};
use candlewick_ops::to_host;
use candlewick_parallel::{Engine, PackedTokens};

use crate::parallel_config::InferenceGroup;

/// Error: a stop was requested before all requests were processed.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("stopped before all requests were answered")]
pub struct RequestsInterrupted;

/// Intention of a rank before a forward. The largest of all ranks decides.
#[derive(Clone, Copy)]
enum Intention {
    /// The rank has no requests left.
    Idle = 0,
    /// The rank has a forward to compute.
    Compute = 1,
    /// A stop was requested on the rank.
    Stop = 2,
}

/// Agreement of the ranks of an [`InferenceGroup`] before each forward.
pub(super) struct Lockstep<'g> {
    group: &'g InferenceGroup,
    asked_to_stop: Option<&'g dyn Fn() -> bool>,
}

impl<'g> Lockstep<'g> {
    pub(super) fn new(group: &'g InferenceGroup, asked_to_stop: Option<&'g dyn Fn() -> bool>) -> Self {
        Self { group, asked_to_stop }
    }

    /// Waits for the other ranks before a forward. Fails with [`RequestsInterrupted`] after a stop request to any
    /// of them.
    pub(super) fn before_forward(&self) -> Result<()> {
        self.group.step();
        match (&self.group.lockstep, self.asked_to_stop) {
            (Some(ranks), _) => self.agree(&**ranks, Intention::Compute).map(drop),
            (None, Some(asked)) if self.group.any_in_replica(asked())? => Err(RequestsInterrupted.into()),
            (None, _) => Ok(()),
        }
    }

    /// Computes fillers until all ranks are done.
    pub(super) fn finish(&self, engine: &Engine) -> Result<()> {
        let Some(ranks) = &self.group.lockstep else { return Ok(()) };
        while self.agree(&**ranks, Intention::Idle)? {
            self.group.step();
            let mut filler = PackedTokens::default();
            filler.extend(&[0, 0], 0, LengthClass::default());
            engine.logits(&filler, &[0], &SingleDevice)?;
        }
        Ok(())
    }

    /// Returns true if any rank has a forward to compute.
    fn agree(&self, ranks: &dyn Collective, own: Intention) -> Result<bool> {
        let is_asked = self.asked_to_stop.is_some_and(|asked| asked());
        let own = if is_asked { Intention::Stop } else { own };
        let all = ranks.all_reduce(&Tensor::new(own as u32, &Device::Cpu)?, Reduce::Max)?;
        match to_host(&all)?.to_scalar::<u32>()? {
            highest if highest == Intention::Stop as u32 => Err(RequestsInterrupted.into()),
            highest => Ok(highest == Intention::Compute as u32),
        }
    }
}
