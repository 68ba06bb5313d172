//! Rank of this process in its launch environment.

use std::io::Write as _;
use std::sync::Once;

use anyhow::{Result, anyhow};
use candlewick_comm::rank_env::{Launcher, RankEnv};

use crate::exit::ExitCode;
use crate::progress::AboveBars;

/// The note about an interactive shell is printed once.
static SHELL_NOTE: Once = Once::new();

/// Reads this process's rank from the environment variables of torchrun, MPI or Slurm. Prints a note if it ignores Slurm's.
///
/// # Errors
///
/// Fails with [`ExitCode::Usage`] if the variables contradict each other.
pub fn rank_env() -> Result<RankEnv> {
    let variables =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let env = RankEnv::of_this_process(&variables.collect());
    let env = env.map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))?;
    if env.launcher == Launcher::SlurmShell {
        // The rank is read before the logger starts.
        SHELL_NOTE.call_once(|| {
            drop(writeln!(AboveBars, "note: in an interactive shell: one process; Slurm's variables are ignored"));
        });
    }
    Ok(env)
}
