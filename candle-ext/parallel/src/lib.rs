//! Where each weight and activation lives, and when it moves: the block engine and the parameter store.
//!
//! No kernels and no family names: kernels are in `candlewick-ops`, what a block computes is in `candlewick-model`.

mod engine;
mod groups;
mod kv_cache;
mod offload;
mod params;
mod sequence;

pub use engine::{Engine, LossScale, Micro, Residency};
pub use groups::Groups;
pub use kv_cache::KvCache;
pub use offload::Parking;
pub use params::{Formats, Mode, ParamState, ParamStore, Sharded, Sharing};
pub use sequence::Sequence;
