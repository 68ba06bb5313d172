//! The key `ddp_backend`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The communication backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DdpBackend {
    /// NCCL on GPUs; on CPUs `local` on one machine, MPI on several.
    Auto,
    /// CPU processes on one machine.
    Local,
    /// CPU processes connected by MPI.
    Mpi,
    /// GPU processes, one a GPU.
    Nccl,
    /// Several processes a GPU, connected through host memory.
    Staged,
}
