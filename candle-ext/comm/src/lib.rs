//! Process groups: collective communication between ranks.
//!
//! A [`Collective`] is one rank's handle of a process group. [`Solo`] is the group of one rank, so that no caller compares a
//! degree with 1. A [`World`] holds the group of all ranks. [`CommBackend`] selects its backend:
//!
//! * [`threads`]: ranks are threads of one process;
//! * `local`: ranks are processes of one node, which rendezvous in a [`store`];
//! * `mpi` (feature `mpi`): ranks are connected by an installed MPI;
//! * `nccl` (feature `cuda`): each rank has its own GPU;
//! * [`StagedGroup`]: GPU tensors are copied through host memory.
//!
//! [`mesh`] divides the ranks into groups. [`rank_env`] reads a process's rank from its launcher's environment variables.

mod arguments;
mod call;
mod collective;
mod element;
mod error;
mod failure;
mod fnv1a;
mod group;
mod join;
mod liveness;
#[cfg(target_os = "linux")]
pub mod local;
pub mod mesh;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "cuda")]
pub mod nccl;
mod node;
mod panic;
#[cfg(any(target_os = "linux", feature = "mpi", feature = "cuda"))]
mod peer;
mod pending;
pub mod rank_env;
mod recv;
#[cfg(any(target_os = "linux", feature = "cuda"))]
mod rendezvous;
mod solo;
mod staged;
pub mod store;
mod sync;
mod thread_pool;
pub mod threads;
mod transport;
#[cfg(any(test, feature = "cuda"))]
mod watchdog;
mod world;

// The cases that every backend must pass import this crate by its public name.
#[cfg(test)]
extern crate self as candlewick_comm;

pub use call::{CollectiveCall, Op, Reduce};
pub use collective::{Collective, exchange_bytes, sum};
pub use error::{Cause, Error, RankFailure, Result};
pub use join::{CommBackend, HostBackend};
pub use liveness::{KeepAlive, KeepAliveGuard};
pub use node::is_first_on_node;
pub use pending::Pending;
pub use recv::Recv;
pub use solo::Solo;
pub use staged::StagedGroup;
pub use world::{Options, World};
