//! Variables of Open MPI and of PMI, which MPICH and Intel MPI implement.

use super::env::RankEnv;
use super::error::RankEnvError;
use super::launcher::Launcher;
use super::reader::{DEFAULT_PORT, Reader, at_most, below, port_of_job};
use super::slurm;

/// Reads the variables of Open MPI; returns `None` if they are not set.
pub(super) fn read_open_mpi(reader: &Reader) -> Result<Option<RankEnv>, RankEnvError> {
    let names = Names {
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    };
    read(reader, Launcher::OpenMpi, &names, &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])
}

/// Reads the variables of PMI, or those of Slurm if `srun` sets both; returns `None` if they are not set.
pub(super) fn read_pmi(reader: &Reader) -> Result<Option<RankEnv>, RankEnvError> {
    if is_srun(reader) {
        return slurm::read(reader);
    }
    let names =
        Names { rank: "PMI_RANK", size: "PMI_SIZE", local_rank: "MPI_LOCALRANKID", local_size: "MPI_LOCALNRANKS" };
    read(reader, Launcher::Pmi, &names, &["I_MPI_HYDRA_UUID", "PMI_PORT"])
}

/// Returns true if `srun` started the process. `srun` implements PMI, and Slurm's variables then have more than PMI's.
///
/// Hydra, the process manager of MPICH, passes Slurm's variables on to its ranks, whose PMI ranks differ from Slurm's.
fn is_srun(reader: &Reader) -> bool {
    let same = |pmi, slurm| reader.text(pmi).is_some() && reader.text(pmi) == reader.text(slurm);
    let is_step = reader.text("SLURM_STEP_ID").is_some() && reader.text("MPI_LOCALRANKID").is_none();
    is_step && same("PMI_RANK", "SLURM_PROCID")
}

/// Names of the variables of one MPI implementation.
struct Names {
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

/// Reads the variables in `names`. The first variable of `jobs` that is set is the job's id, which selects the port: two jobs on
/// one node get different ports.
fn read(
    reader: &Reader,
    launcher: Launcher,
    names: &Names,
    jobs: &[&'static str],
) -> Result<Option<RankEnv>, RankEnvError> {
    let Some(rank) = reader.number(names.rank)? else { return Ok(None) };
    let need = |name| reader.number(name)?.ok_or(RankEnvError::Missing { present: names.rank, absent: name });
    let (world_size, local_rank) = (need(names.size)?, need(names.local_rank)?);
    let local_world_size = need(names.local_size)?;
    below((names.rank, rank), (names.size, world_size))?;
    below((names.local_rank, local_rank), (names.local_size, local_world_size))?;
    at_most((names.local_size, local_world_size), (names.size, world_size))?;
    let is_single_node = local_world_size == world_size;
    let job = jobs.iter().find_map(|name| reader.text(name));
    let master = match reader.master(launcher, is_single_node, job.map_or(DEFAULT_PORT, port_of_job)) {
        Err(error @ RankEnvError::NoMaster { .. }) => Err(error),
        master => Ok(master?),
    };
    // Intel MPI exports the node's index.
    let node = is_single_node.then_some(0).or(reader.number("HYDRA_BSTRAP_NODE_ID")?);
    Ok(Some(RankEnv {
        rank,
        local_rank,
        world_size,
        local_world_size,
        node,
        restart: 0,
        master,
        launcher,
        store_secret: None,
    }))
}
