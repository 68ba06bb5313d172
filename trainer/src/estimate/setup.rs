//! What of a plan decides its memory.

use candlewick_model::{Model, ModelError};
use candlewick_ops::AttentionImpl;

use super::modes::Modes;
use crate::checkpoint::Kind;
use crate::plan::{ComputeDtype, Init, Plan, RanksPlan};

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// This machine's processor, in its RAM.
    Cpu,
    /// A GPU, in its own memory.
    Gpu,
}

/// The part of a plan that the formulas read.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The units with every parameter's shape.
    pub model: Model,
    /// The number format of forward and backward.
    pub compute: ComputeDtype,
    /// Of master weights and gradients.
    pub masters: ComputeDtype,
    /// Of AdamW's moments.
    pub moments: ComputeDtype,
    /// What trades time for memory.
    pub modes: Modes,
    /// The most tokens of a row.
    pub row_tokens: u64,
    /// Rows of a micro-batch.
    pub rows: u64,
    /// Whether inputs that are parked stay in the memory that computes.
    pub parks_in_memory: bool,
    /// How the ranks share what they have in common.
    pub ranks: RanksPlan,
    /// The share of the parameters whose masters and moments are in the RAM of a GPU's host.
    pub optimizer_on_host: f64,
    /// What computes.
    pub place: Place,
    /// What computes attention.
    pub attention: AttentionImpl,
    /// Where the weights come from.
    pub init: Init,
    /// Whether there is evaluation.
    pub evaluates: bool,
    /// What is saved.
    pub saves: Vec<Kind>,
}

/// Why nothing can be said about a plan. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The model's config is on the Hub only.
    #[error("estimate the memory: the model's config is not known")]
    NoConfig,
    /// The config makes no model.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Setup {
    /// Takes what matters from a plan.
    pub fn of(plan: &Plan, place: Place) -> Result<Self, SetupError> {
        let config = plan.model.config.clone().ok_or(SetupError::NoConfig)?;
        Ok(Self {
            model: Model::new(config, plan.model.adapter.clone())?,
            compute: plan.model.dtype,
            masters: plan.optimizer.masters,
            moments: plan.optimizer.moments,
            modes: Modes::of(plan),
            row_tokens: plan.data.max_length as u64,
            rows: plan.data.micro_batch_size as u64,
            parks_in_memory: place == Place::Cpu && plan.model.parks_in_memory,
            ranks: plan.ranks,
            optimizer_on_host: if place == Place::Gpu { plan.optimizer_on_host } else { 0.0 },
            place,
            attention: plan.model.attention.implementation,
            init: plan.model.init,
            evaluates: plan.eval.is_some(),
            saves: plan.checkpoints.iter().map(|checkpoint| checkpoint.kind).collect(),
        })
    }

    /// The most tokens of a micro-batch that a rank computes.
    pub fn tokens(&self) -> u64 {
        (self.row_tokens * self.rows).div_ceil(self.ranks.n_of_micro_batch() as u64)
    }
}
