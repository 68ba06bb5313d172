//! Rank, world size and rendezvous address of a process, read from the environment variables of its launcher.
//!
//! Each launcher has a reader: torchrun (or `launch`), Open MPI, PMI (MPICH, Intel MPI) and Slurm. The variables are an
//! argument; nothing here reads the process's environment.
//!
//! The launcher closest to the process takes precedence: torchrun's variables over MPI's, MPI's over Slurm's. `srun` may start
//! `mpirun`, and `mpirun` a launcher.

mod error;
mod mpi;
mod nodelist;
mod reader;
mod slurm;
mod torchrun;

use std::collections::BTreeMap;
use std::fmt;

pub use error::RankEnvError;
use reader::{DEFAULT_PORT, LOOPBACK, Reader};

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

/// Launcher of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// torchrun, `launch`, or any other program that sets RANK and WORLD_SIZE.
    Torchrun,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpirun` of MPICH, Intel MPI or another implementation of PMI.
    Pmi,
    /// `srun` of Slurm.
    Slurm,
    /// No launcher: the process is the only rank.
    None,
}

impl RankEnv {
    /// Reads a process's rank from its environment variables.
    pub fn from_variables(variables: &Variables) -> Result<Self, RankEnvError> {
        let reader = Reader(variables);
        let launchers = [torchrun::read, mpi::read_open_mpi, mpi::read_pmi, slurm::read];
        let found = launchers.iter().find_map(|read| read(&reader).transpose());
        found.unwrap_or_else(|| Ok(Self::single()))
    }

    /// Returns true if all ranks run on this node.
    pub fn is_single_node(&self) -> bool {
        self.local_world_size == self.world_size
    }

    /// Returns the only rank of a job without a launcher.
    pub fn single() -> Self {
        let master = Ok(Master { addr: LOOPBACK.into(), port: DEFAULT_PORT, agent_hosts_store: false });
        Self {
            rank: 0,
            local_rank: 0,
            world_size: 1,
            local_world_size: 1,
            node: Some(0),
            restart: 0,
            master,
            launcher: Launcher::None,
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Pmi => "PMI",
            Launcher::Slurm => "Slurm",
            Launcher::None => "no launcher",
        })
    }
}

impl fmt::Display for RankEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, local_rank, world_size, local_world_size, node, restart: _, master, launcher } = self;
        let node = node.map_or_else(|| "?".to_owned(), |node| node.to_string());
        write!(f, "rank {rank} of {world_size}, local rank {local_rank} of {local_world_size}, node {node}, ")?;
        match master {
            Ok(Master { addr, port, agent_hosts_store: true }) => write!(f, "the launcher's store at {addr}:{port}, ")?,
            Ok(Master { addr, port, agent_hosts_store: false }) => write!(f, "rank 0 at {addr}:{port}, ")?,
            Err(_) => f.write_str("rank 0 unknown without MASTER_ADDR, ")?,
        }
        match launcher {
            Launcher::None => f.write_str("started without a launcher"),
            launcher => write!(f, "started by {launcher}"),
        }
    }
}

#[cfg(test)]
mod tests;
