//! [`GroupedProblems`](super::grouped::GroupedProblems) by CUTLASS, through shared objects. The host reads no size of a group.

#[cfg(feature = "cuda")]
mod launch;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod object;

#[cfg(feature = "cuda")]
pub(super) use launch::run;
