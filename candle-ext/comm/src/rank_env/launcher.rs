//! Programs that start the processes of a job.

use std::fmt;

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
    /// An interactive shell of Slurm: the process is the only rank.
    SlurmShell,
    /// No launcher: the process is the only rank.
    None,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Pmi => "PMI",
            Launcher::Slurm => "Slurm",
            Launcher::SlurmShell => "an interactive shell of Slurm",
            Launcher::None => "no launcher",
        })
    }
}
