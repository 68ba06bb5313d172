//! Rank of this process in its launch environment.

use anyhow::{Result, anyhow};
use candlewick_comm::rank_env::RankEnv;

use crate::exit::ExitCode;

/// Reads this process's rank from the environment variables of torchrun, MPI or Slurm.
///
/// # Errors
///
/// Fails with [`ExitCode::Usage`] if the variables contradict each other.
pub fn rank_env() -> Result<RankEnv> {
    let variables =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let env = RankEnv::of_this_process(&variables.collect());
    env.map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))
}
