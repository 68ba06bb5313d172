//! Which rank a process is: read from the variables that torchrun (or `launch`), Open MPI, another MPI or Slurm give to
//! the processes they start. The variables come as a value; nothing here asks the system.
//!
//! Whoever stands closest to the process is believed: torchrun's variables before MPI's, MPI's before Slurm's, because
//! `srun` may start `mpirun` and that a launcher.

mod nodelist;

use std::collections::BTreeMap;
use std::fmt;

use crate::fnv1a::fnv1a;
use nodelist::first_host;

/// The variables of a process.
pub type Variables = BTreeMap<String, String>;

/// The place of a process among those that were started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// This process's number, `0..world_size`.
    pub rank: usize,
    /// Its number among the processes of this machine: the GPU it takes.
    pub local_rank: usize,
    /// How many processes there are.
    pub world_size: usize,
    /// How many of them run on this machine.
    pub local_world_size: usize,
    /// The number of this machine, if whoever started the process says it.
    pub node: Option<usize>,
    /// How often the processes were started anew after a failure.
    pub restart: usize,
    /// Where the processes meet. MPI does not say it where there are several machines, and need not be told if it is also
    /// what connects the processes.
    pub master: Result<Master, PlaceError>,
    /// Who started the process.
    pub source: Source,
}

/// Where the processes meet: a store that rank 0 hosts, unless the launcher does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// The name or address of the machine of rank 0.
    pub addr: String,
    /// The store's port.
    pub port: u16,
    /// The launcher's agent hosts the store: every rank connects, rank 0 too.
    pub agent_hosts_store: bool,
}

/// Who started a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// torchrun, `launch`, or anybody who sets RANK and WORLD_SIZE.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// The `mpirun` of MPICH, Intel MPI or another that speaks PMI.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
    /// Nobody: the process is a group of its own.
    Alone,
}

/// Says which variables do not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// One variable is there and its companion is not.
    #[error("read the rank: {present} is set but {absent} is not")]
    Missing {
        /// The one that is there.
        present: &'static str,
        /// The one that is not.
        absent: &'static str,
    },
    /// A variable is not a number.
    #[error("read the rank: {name}={value} is not a number{bound}")]
    NotANumber {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
        /// The largest that it may be, as text.
        bound: &'static str,
    },
    /// A rank is not below the number of ranks.
    #[error("read the rank: {smaller_name}={smaller} must be less than {larger_name}={larger}")]
    NotBelow {
        /// The variable that is too large.
        smaller_name: &'static str,
        /// Its value.
        smaller: usize,
        /// The variable that bounds it.
        larger_name: &'static str,
        /// Its value.
        larger: usize,
    },
    /// There are more processes on this machine than in all.
    #[error("read the rank: {local_name}={local} is more than {all_name}={all}")]
    TooMany {
        /// The variable of this machine.
        local_name: &'static str,
        /// Its value.
        local: usize,
        /// The variable of all.
        all_name: &'static str,
        /// Its value.
        all: usize,
    },
    /// Several machines, and none of them is named.
    #[error("find the machine of rank 0: {source_name} does not say it; set MASTER_ADDR{hint}")]
    NoMaster {
        /// Who started the process.
        source_name: Source,
        /// How to set it.
        hint: &'static str,
    },
    /// Slurm's list of hosts cannot be read.
    #[error("find the machine of rank 0: {name}={value} is not a list of hosts")]
    NodeList {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
    },
}

impl Place {
    /// Reads the place of a process from its variables.
    pub fn from_variables(variables: &Variables) -> Result<Self, PlaceError> {
        let read = Reader(variables);
        let sources = [torchrun, open_mpi, pmi, slurm];
        let found = sources.iter().find_map(|source| source(&read).transpose());
        found.unwrap_or_else(|| Ok(Self::alone()))
    }

    /// Whether all processes run on this machine.
    pub fn is_one_machine(&self) -> bool {
        self.local_world_size == self.world_size
    }

    /// Returns the place of a process that nobody started as part of a group.
    pub fn alone() -> Self {
        let master = Ok(Master { addr: LOOPBACK.into(), port: DEFAULT_PORT, agent_hosts_store: false });
        Self {
            rank: 0,
            local_rank: 0,
            world_size: 1,
            local_world_size: 1,
            node: Some(0),
            restart: 0,
            master,
            source: Source::Alone,
        }
    }
}

const LOOPBACK: &str = "127.0.0.1";
const DEFAULT_PORT: u16 = 29500;

fn torchrun(read: &Reader) -> Result<Option<Place>, PlaceError> {
    let (rank, world_size) = match (read.number("RANK")?, read.number("WORLD_SIZE")?) {
        (None, None) => return Ok(None),
        // Exported by a batch script for whatever it starts.
        (None, Some(_))
            if ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"].iter().any(|it| read.text(it).is_some()) =>
        {
            return Ok(None);
        }
        (Some(_), None) => return Err(PlaceError::Missing { present: "RANK", absent: "WORLD_SIZE" }),
        (None, Some(_)) => return Err(PlaceError::Missing { present: "WORLD_SIZE", absent: "RANK" }),
        (Some(rank), Some(world_size)) => (rank, world_size),
    };
    // A rank's GPU is never guessed; only where there is one rank there is one answer.
    let is_single = world_size <= 1;
    let local_rank = read.number("LOCAL_RANK")?.or(is_single.then_some(0));
    let local_rank = local_rank.ok_or(PlaceError::Missing { present: "RANK", absent: "LOCAL_RANK" })?;
    let local_world_size = read.number("LOCAL_WORLD_SIZE")?.or(is_single.then_some(1));
    let local_world_size =
        local_world_size.ok_or(PlaceError::Missing { present: "WORLD_SIZE", absent: "LOCAL_WORLD_SIZE" })?;
    below(("RANK", rank), ("WORLD_SIZE", world_size))?;
    // torchrun's --virtual-local-rank calls every worker 0; that is below every size too.
    below(("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_world_size))?;
    at_most(("LOCAL_WORLD_SIZE", local_world_size), ("WORLD_SIZE", world_size))?;
    let master = Ok(read.master(Source::Torchrun, is_single, DEFAULT_PORT)?);
    let node = read.number("GROUP_RANK")?;
    let restart = read.number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
    let source = Source::Torchrun;
    Ok(Some(Place { rank, local_rank, world_size, local_world_size, node, restart, master, source }))
}

fn open_mpi(read: &Reader) -> Result<Option<Place>, PlaceError> {
    let names = Names {
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    };
    mpi(read, Source::OpenMpi, &names, &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])
}

fn pmi(read: &Reader) -> Result<Option<Place>, PlaceError> {
    if is_srun(read) {
        return slurm(read);
    }
    let names =
        Names { rank: "PMI_RANK", size: "PMI_SIZE", local_rank: "MPI_LOCALRANKID", local_size: "MPI_LOCALNRANKS" };
    mpi(read, Source::Pmi, &names, &["I_MPI_HYDRA_UUID", "PMI_PORT"])
}

/// srun speaks PMI too, and then knows more than PMI says. Hydra, MPI's own, hands on what srun told it, or told the batch
/// script: its ranks have Slurm's variables as well, and numbers of their own.
fn is_srun(read: &Reader) -> bool {
    let same = |pmi, slurm| read.text(pmi).is_some() && read.text(pmi) == read.text(slurm);
    let is_step = read.text("SLURM_STEP_ID").is_some() && read.text("MPI_LOCALRANKID").is_none();
    is_step && same("PMI_RANK", "SLURM_PROCID")
}

/// The variables of one MPI.
struct Names {
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

/// `jobs` are the variables that name a job, so that two jobs of one machine meet on two ports.
fn mpi(read: &Reader, source: Source, names: &Names, jobs: &[&'static str]) -> Result<Option<Place>, PlaceError> {
    let Some(rank) = read.number(names.rank)? else { return Ok(None) };
    let need = |name| read.number(name)?.ok_or(PlaceError::Missing { present: names.rank, absent: name });
    let (world_size, local_rank) = (need(names.size)?, need(names.local_rank)?);
    let local_world_size = need(names.local_size)?;
    below((names.rank, rank), (names.size, world_size))?;
    below((names.local_rank, local_rank), (names.local_size, local_world_size))?;
    at_most((names.local_size, local_world_size), (names.size, world_size))?;
    let is_one_machine = local_world_size == world_size;
    let job = jobs.iter().find_map(|name| read.text(name));
    let master = match read.master(source, is_one_machine, job.map_or(DEFAULT_PORT, port_of_job)) {
        Err(error @ PlaceError::NoMaster { .. }) => Err(error),
        master => Ok(master?),
    };
    // Intel's says it.
    let node = is_one_machine.then_some(0).or(read.number("HYDRA_BSTRAP_NODE_ID")?);
    Ok(Some(Place { rank, local_rank, world_size, local_world_size, node, restart: 0, master, source }))
}

/// A batch script has Slurm's variables as well, and is no task: only a step has SLURM_STEP_ID.
fn slurm(read: &Reader) -> Result<Option<Place>, PlaceError> {
    let Some(rank) = read.number("SLURM_PROCID")? else { return Ok(None) };
    if read.text("SLURM_STEP_ID").is_none() {
        return Ok(None);
    }
    // A shell of salloc is a step of one task in a job of many.
    let size_name = if read.text("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
    let need = |name| read.number(name)?.ok_or(PlaceError::Missing { present: "SLURM_PROCID", absent: name });
    let (world_size, local_rank, node) = (need(size_name)?, need("SLURM_LOCALID")?, need("SLURM_NODEID")?);
    below(("SLURM_PROCID", rank), (size_name, world_size))?;
    let local_world_size = slurm_local_size(read, node, world_size)?;
    below(("SLURM_LOCALID", local_rank), ("SLURM_STEP_TASKS_PER_NODE", local_world_size))?;
    let master = Ok(slurm_master(read, local_world_size == world_size)?);
    let node = Some(node);
    let (restart, source) = (0, Source::Slurm);
    Ok(Some(Place { rank, local_rank, world_size, local_world_size, node, restart, master, source }))
}

/// `SLURM_STEP_TASKS_PER_NODE` is `2(x3),1`: two tasks on each of three nodes, one on the fourth.
fn slurm_local_size(read: &Reader, node: usize, world_size: usize) -> Result<usize, PlaceError> {
    let name = "SLURM_STEP_TASKS_PER_NODE";
    let Some(text) = read.text(name).or_else(|| read.text("SLURM_TASKS_PER_NODE")) else {
        let is_one_node = read.number("SLURM_NNODES")?.is_none_or(|n| n <= 1);
        let missing = PlaceError::Missing { present: "SLURM_PROCID", absent: name };
        return is_one_node.then_some(world_size).ok_or(missing);
    };
    let not_a_number = || PlaceError::NotANumber { name, value: text.to_owned(), bound: ", or n(xm)" };
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

fn slurm_master(read: &Reader, is_one_machine: bool) -> Result<Master, PlaceError> {
    let port = read.text("SLURM_JOB_ID").map_or(DEFAULT_PORT, port_of_job);
    if read.text("MASTER_ADDR").is_some() || is_one_machine {
        return read.master(Source::Slurm, is_one_machine, port);
    }
    // The nodes of the step: those of the job may be more, and rank 0 need not be on the first of them.
    let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let Some((name, list)) = lists.iter().find_map(|name| Some((*name, read.text(name)?))) else {
        return read.master(Source::Slurm, is_one_machine, port);
    };
    let addr = first_host(list).ok_or_else(|| PlaceError::NodeList { name, value: list.to_owned() })?;
    Ok(Master { addr, port: read.port()?.unwrap_or(port), agent_hosts_store: false })
}

/// A port from the last four digits of a job's number, as people do, or from a hash (FNV-1a) of its name. All are below
/// those that the system gives out by itself.
fn port_of_job(job: &str) -> u16 {
    let number = job.parse().unwrap_or_else(|_| fnv1a(job.bytes().map(u64::from)));
    15000 + (number % 10000) as u16
}

struct Reader<'a>(&'a Variables);

impl<'a> Reader<'a> {
    fn text(&self, name: &str) -> Option<&'a str> {
        self.0.get(name).map(String::as_str).filter(|text| !text.is_empty())
    }

    fn number(&self, name: &'static str) -> Result<Option<usize>, PlaceError> {
        let parse =
            |text: &str| text.parse().map_err(|_| PlaceError::NotANumber { name, value: text.to_owned(), bound: "" });
        self.text(name).map(parse).transpose()
    }

    fn port(&self) -> Result<Option<u16>, PlaceError> {
        let name = "MASTER_PORT";
        let bound = " up to 65535";
        let parse =
            |text: &str| text.parse().map_err(|_| PlaceError::NotANumber { name, value: text.to_owned(), bound });
        self.text(name).map(parse).transpose()
    }

    fn master(&self, source: Source, is_one_machine: bool, port: u16) -> Result<Master, PlaceError> {
        let hint = match source {
            Source::OpenMpi => " (mpirun -x MASTER_ADDR=HOST)",
            Source::Pmi => " (mpirun -genv MASTER_ADDR HOST)",
            _ => "",
        };
        let addr = self.text("MASTER_ADDR").or(is_one_machine.then_some(LOOPBACK));
        let addr = addr.ok_or(PlaceError::NoMaster { source_name: source, hint })?.to_owned();
        let agent = self.text("TORCHELASTIC_USE_AGENT_STORE");
        let agent_hosts_store =
            source == Source::Torchrun && agent.is_some_and(|text| text.eq_ignore_ascii_case("true"));
        Ok(Master { addr, port: self.port()?.unwrap_or(port), agent_hosts_store })
    }
}

fn below(smaller: (&'static str, usize), larger: (&'static str, usize)) -> Result<(), PlaceError> {
    let error =
        PlaceError::NotBelow { smaller_name: smaller.0, smaller: smaller.1, larger_name: larger.0, larger: larger.1 };
    (smaller.1 < larger.1).then_some(()).ok_or(error)
}

fn at_most(local: (&'static str, usize), all: (&'static str, usize)) -> Result<(), PlaceError> {
    let error = PlaceError::TooMany { local_name: local.0, local: local.1, all_name: all.0, all: all.1 };
    (local.1 <= all.1).then_some(()).ok_or(error)
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Torchrun => "torchrun",
            Source::OpenMpi => "Open MPI",
            Source::Pmi => "PMI",
            Source::Slurm => "Slurm",
            Source::Alone => "nobody",
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, local_rank, world_size, local_world_size, node, restart: _, master, source } = self;
        let node = node.map_or_else(|| "?".to_owned(), |node| node.to_string());
        write!(f, "rank {rank} of {world_size}, local rank {local_rank} of {local_world_size}, node {node}, ")?;
        match master {
            Ok(Master { addr, port, agent_hosts_store: true }) => write!(f, "the launcher's store at {addr}:{port}, ")?,
            Ok(Master { addr, port, agent_hosts_store: false }) => write!(f, "rank 0 at {addr}:{port}, ")?,
            Err(_) => f.write_str("rank 0 where MASTER_ADDR does not say, ")?,
        }
        write!(f, "started by {source}")
    }
}

#[cfg(test)]
mod tests;
