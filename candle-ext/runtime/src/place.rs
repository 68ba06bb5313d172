//! The place of this process among those that were started together.

use anyhow::{Result, anyhow};
use candlewick_comm::place::Place;

use crate::exit::ExitCode;

/// Reads this process's place from the variables of torchrun, MPI or Slurm.
///
/// # Errors
///
/// With [`ExitCode::Usage`] if the variables contradict each other.
pub fn place() -> Result<Place> {
    let variables =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let place = Place::from_variables(&variables.collect());
    place.map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))
}
