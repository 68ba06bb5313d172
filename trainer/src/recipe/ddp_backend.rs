//! What a recipe says of several processes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What connects the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DdpBackend {
    /// NCCL where GPUs compute; else `local` on one machine, MPI on several.
    Auto,
    /// Processes of one machine that compute on the CPU.
    Local,
    /// Processes that compute on the CPU, on any machines that MPI reaches.
    Mpi,
    /// One process a GPU.
    Nccl,
    /// Several processes a GPU: what they exchange goes through the host.
    Staged,
}
