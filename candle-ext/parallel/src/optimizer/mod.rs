//! Optimizers: the kinds, and the groups of parameters that they update.
//!
//! A kind declares its hyperparameters, its state and the parts of a parameter that it can update. The parameter store
//! allocates the state, shards it and calls the update. A new kind is a file of this folder and a line in
//! [`OPTIMIZER_KINDS`]. This module knows no buffers, shards or process groups of the store.

mod adamw;
mod groups;
mod hyperparameter;
mod kind;

pub use groups::{DecayedParams, GroupsError, OptimizerGroup, OptimizerGroups, ParamPattern};
pub use hyperparameter::{Hyperparameter, HyperparameterRange};
pub use kind::{
    ElementUpdates, KindDeclaration, MatrixUpdates, OptimizerKind, ShardUpdate, SlotDtype, StateSlot, StepUpdates,
    UpdateNeed,
};

/// All kinds, the default first.
pub static OPTIMIZER_KINDS: &[&KindDeclaration] = &[&adamw::ADAMW];
