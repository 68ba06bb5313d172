//! Rank, world size and rendezvous address of a process, read from the environment variables of its launcher.
//!
//! Each launcher has a reader: torchrun (or `launch`), Open MPI, PMI (MPICH, Intel MPI) and Slurm. The variables are an
//! argument; nothing here reads the process's environment.
//!
//! The launcher closest to the process takes precedence: torchrun's variables over MPI's, MPI's over Slurm's. `srun` may start
//! `mpirun`, and `mpirun` a launcher.

mod env;
mod error;
mod interactive;
mod launcher;
mod mpi;
mod nodelist;
mod reader;
mod slurm;
mod torchrun;

use std::fmt;

use crate::store::StoreSecret;
pub use env::{Master, RankEnv, Variables};
pub use error::RankEnvError;
use interactive::has_interactive_shell;
pub use launcher::Launcher;
use reader::{DEFAULT_PORT, LOOPBACK, Reader};

impl RankEnv {
    /// Reads the rank of this process from its environment variables.
    ///
    /// In an interactive shell of Slurm, a process is the only rank: the shell has the variables of a task, but the other tasks of
    /// its step run no program.
    pub fn of_this_process(variables: &Variables) -> Result<Self, RankEnvError> {
        let env = Self::from_variables(variables)?;
        Ok(match env.launcher {
            Launcher::Slurm if has_interactive_shell() => Self { launcher: Launcher::SlurmShell, ..Self::single() },
            _ => env,
        })
    }

    /// Reads a process's rank from its environment variables.
    pub fn from_variables(variables: &Variables) -> Result<Self, RankEnvError> {
        let reader = Reader(variables);
        let launchers = [torchrun::read, mpi::read_open_mpi, mpi::read_pmi, slurm::read];
        let found = launchers.iter().find_map(|read| read(&reader).transpose());
        let found = found.unwrap_or_else(|| Ok(Self::single()))?;
        Ok(Self { store_secret: StoreSecret::from_variable(variables.get(StoreSecret::VARIABLE)), ..found })
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
            store_secret: None,
        }
    }
}

impl fmt::Display for RankEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            local_rank,
            world_size,
            local_world_size,
            node,
            restart: _,
            master,
            launcher,
            store_secret: _,
        } = self;
        let node = node.map_or_else(|| "?".to_owned(), |node| node.to_string());
        write!(f, "rank {rank} of {world_size}, local rank {local_rank} of {local_world_size}, node {node}, ")?;
        match master {
            Ok(Master { addr, port, agent_hosts_store: true }) => write!(f, "the launcher's store at {addr}:{port}, ")?,
            Ok(Master { addr, port, agent_hosts_store: false }) => write!(f, "rank 0 at {addr}:{port}, ")?,
            Err(_) => f.write_str("rank 0 unknown without MASTER_ADDR, ")?,
        }
        match launcher {
            Launcher::None => f.write_str("started without a launcher"),
            Launcher::SlurmShell => write!(f, "started by {launcher}, whose variables are ignored"),
            launcher => write!(f, "started by {launcher}"),
        }
    }
}

#[cfg(test)]
mod tests;
