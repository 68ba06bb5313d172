//! Variables of Slurm's `srun`.

use super::env::{Master, RankEnv};
use super::error::RankEnvError;
use super::launcher::Launcher;
use super::nodelist::first_host;
use super::reader::{DEFAULT_PORT, Reader, at_most, below, port_of_job};

/// Reads the variables of a task of `srun`; returns `None` for other processes.
///
/// A batch script also has SLURM_PROCID but is not a task: SLURM_STEP_ID is set in job steps only.
pub(super) fn read(reader: &Reader) -> Result<Option<RankEnv>, RankEnvError> {
    let Some(rank) = reader.number("SLURM_PROCID")? else { return Ok(None) };
    if reader.text("SLURM_STEP_ID").is_none() {
        return Ok(None);
    }
    // The shell of salloc is a step of one task; SLURM_NTASKS counts the tasks of its job.
    let size_name = if reader.text("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
    let need = |name| reader.number(name)?.ok_or(RankEnvError::Missing { present: "SLURM_PROCID", absent: name });
    let (world_size, local_rank, node) = (need(size_name)?, need("SLURM_LOCALID")?, need("SLURM_NODEID")?);
    below(("SLURM_PROCID", rank), (size_name, world_size))?;
    let local_world_size = local_world_size_of(reader, node, world_size)?;
    below(("SLURM_LOCALID", local_rank), ("SLURM_STEP_TASKS_PER_NODE", local_world_size))?;
    let master = Ok(master(reader, local_world_size == world_size)?);
    let node = Some(node);
    let (restart, launcher) = (0, Launcher::Slurm);
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

/// Returns the number of tasks on `node`.
///
/// `SLURM_STEP_TASKS_PER_NODE` is, for example, `2(x3),1`: two tasks on each of three nodes, one on the fourth.
fn local_world_size_of(reader: &Reader, node: usize, world_size: usize) -> Result<usize, RankEnvError> {
    let name = "SLURM_STEP_TASKS_PER_NODE";
    let Some(text) = reader.text(name).or_else(|| reader.text("SLURM_TASKS_PER_NODE")) else {
        let is_one_node = reader.number("SLURM_NNODES")?.is_none_or(|n| n <= 1);
        let missing = RankEnvError::Missing { present: "SLURM_PROCID", absent: name };
        return is_one_node.then_some(world_size).ok_or(missing);
    };
    let not_a_number = || RankEnvError::NotANumber { name, value: text.to_owned(), bound: ", or n(xm)" };
    let mut node_left = node;
    for item in text.split(',') {
        let (size, times) = match item.split_once("(x") {
            Some((size, times)) => (size, times.trim_end_matches(')')),
            None => (item, "1"),
        };
        let (size, times): (usize, usize) =
            (size.parse().map_err(|_| not_a_number())?, times.parse().map_err(|_| not_a_number())?);
        if node_left < times {
            at_most((name, size), ("SLURM_NTASKS", world_size))?;
            return Ok(size);
        }
        node_left -= times;
    }
    Err(not_a_number())
}

fn master(reader: &Reader, is_single_node: bool) -> Result<Master, RankEnvError> {
    let port = reader.text("SLURM_JOB_ID").map_or(DEFAULT_PORT, port_of_job);
    if reader.text("MASTER_ADDR").is_some() || is_single_node {
        return reader.master(Launcher::Slurm, is_single_node, port);
    }
    // Prefer the nodes of the step: the job may have more nodes, and rank 0 may run on another than their first.
    let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let Some((name, list)) = lists.iter().find_map(|name| Some((*name, reader.text(name)?))) else {
        return reader.master(Launcher::Slurm, is_single_node, port);
    };
    let addr = first_host(list).ok_or_else(|| RankEnvError::NodeList { name, value: list.to_owned() })?;
    Ok(Master { addr, port: reader.port()?.unwrap_or(port), agent_hosts_store: false })
}
