//! The rank of a process, and the address of its rendezvous store.

use std::collections::BTreeMap;

use super::error::RankEnvError;
use super::launcher::Launcher;
use crate::store::StoreSecret;

/// Environment variables of a process.
pub type Variables = BTreeMap<String, String>;

/// Rank of a process in its job, as its launcher exports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEnv {
    /// Rank of this process, `0..world_size`.
    pub rank: usize,
    /// Rank among the processes of this node; the index of its GPU.
    pub local_rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of ranks on this node.
    pub local_world_size: usize,
    /// Index of this node, if the launcher exports it.
    pub node: Option<usize>,
    /// Number of restarts of the worker group so far.
    pub restart: usize,
    /// Rendezvous address. MPI does not export it for several nodes, and the MPI backend does not need it.
    pub master: Result<Master, RankEnvError>,
    /// Launcher of the process.
    pub launcher: Launcher,
    /// Secret of the rendezvous store; `None` for a store without one.
    pub store_secret: Option<StoreSecret>,
}

/// Address of the rendezvous store, which rank 0 hosts unless the launcher's agent does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// Host name or address of rank 0's node.
    pub addr: String,
    /// Port of the store.
    pub port: u16,
    /// True if the launcher's agent hosts the store. Every rank then connects as a client, rank 0 too.
    pub agent_hosts_store: bool,
}
