//! Process groups: collectives between ranks. Moves bytes and reduces them; computes nothing else.
//!
//! A [`Collective`] is one rank's end of a group. [`Solo`] is the group of one, so that no caller compares a degree with 1.
//! A [`World`] holds the group of all ranks. [`Engine`] chooses its backend:
//!
//! * [`threads`]: ranks of one process;
//! * `local`: processes of one machine, which rendezvous in a [`store`];
//! * `mpi` (a feature): ranks that an installed MPI reaches;
//! * `nccl` (the feature `cuda`): ranks with a GPU each;
//! * [`Staged`]: tensors of a GPU that travel through the host.
//!
//! A [`mesh`] says which ranks make which groups, and [`place`] which rank a process is.

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
mod machine;
pub mod mesh;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "cuda")]
pub mod nccl;
mod panic;
#[cfg(any(target_os = "linux", feature = "mpi", feature = "cuda"))]
mod peer;
mod pending;
pub mod place;
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

// The cases that every engine must pass name this crate as users do.
#[cfg(test)]
extern crate self as candlewick_comm;

pub use call::{Call, Op, Reduce};
pub use collective::{Collective, exchange_bytes, sum};
pub use error::{Cause, Error, Failure, Result};
pub use join::{Engine, Host};
pub use liveness::{KeepAlive, KeepAliveGuard};
pub use machine::is_first_of_machine;
pub use pending::Pending;
pub use recv::Recv;
pub use solo::Solo;
pub use staged::Staged;
pub use world::{Options, World};
