//! Variables of torchrun and `launch`.

use super::env::RankEnv;
use super::error::RankEnvError;
use super::launcher::Launcher;
use super::reader::{DEFAULT_PORT, Reader, at_most, below};

/// Reads the variables of torchrun; returns `None` without RANK.
pub(super) fn read(reader: &Reader) -> Result<Option<RankEnv>, RankEnvError> {
    let (rank, world_size) = match (reader.number("RANK")?, reader.number("WORLD_SIZE")?) {
        (None, None) => return Ok(None),
        // A batch script exports WORLD_SIZE to every process that it starts.
        (None, Some(_))
            if ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"].iter().any(|it| reader.text(it).is_some()) =>
        {
            return Ok(None);
        }
        (Some(_), None) => return Err(RankEnvError::Missing { present: "RANK", absent: "WORLD_SIZE" }),
        (None, Some(_)) => return Err(RankEnvError::Missing { present: "WORLD_SIZE", absent: "RANK" }),
        (Some(rank), Some(world_size)) => (rank, world_size),
    };
    // The local rank selects the GPU and is never guessed. A world of one rank has one possible value.
    let is_single = world_size <= 1;
    let local_rank = reader.number("LOCAL_RANK")?.or(is_single.then_some(0));
    let local_rank = local_rank.ok_or(RankEnvError::Missing { present: "RANK", absent: "LOCAL_RANK" })?;
    let local_world_size = reader.number("LOCAL_WORLD_SIZE")?.or(is_single.then_some(1));
    let local_world_size =
        local_world_size.ok_or(RankEnvError::Missing { present: "WORLD_SIZE", absent: "LOCAL_WORLD_SIZE" })?;
    below(("RANK", rank), ("WORLD_SIZE", world_size))?;
    // With torchrun's --virtual-local-rank every worker has local rank 0, which is also in range.
    below(("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_world_size))?;
    at_most(("LOCAL_WORLD_SIZE", local_world_size), ("WORLD_SIZE", world_size))?;
    let master = Ok(reader.master(Launcher::Torchrun, is_single, DEFAULT_PORT)?);
    let node = reader.number("GROUP_RANK")?;
    let restart = reader.number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
    let launcher = Launcher::Torchrun;
    Ok(Some(RankEnv {
        rank,
        local_rank,
        world_size,
        local_world_size,
        node,
        restart,
        master,
        launcher,
        store_secret: None,
    }))
}
