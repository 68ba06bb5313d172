//! The launch plan: the command line resolved on this node. All defaults and checks that need no process are here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candlewick_comm::store::StoreSecret;

use crate::cli::Cli;
use crate::endpoint::{Endpoint, is_this_machine};
use crate::node_resources::NodeResources;
use crate::streams::StreamsPerRank;
use crate::values::{LineFilter, LocalRanks, NodeRange, NprocPerNode, RendezvousBackend, SignalSet};

/// The resolved settings of the launcher.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchPlan {
    /// Minimum and maximum number of nodes.
    pub nodes: NodeRange,
    /// Number of workers on this node.
    pub local_world_size: usize,
    /// Rendezvous of the nodes.
    pub rendezvous: RendezvousPlan,
    /// ID of the job.
    pub run_id: String,
    /// Role of the workers.
    pub role: String,
    /// Secret of the stores; `None` if clients without it are let in.
    pub store_secret: Option<StoreSecret>,
    /// Address at which other nodes reach this node.
    pub local_addr: Option<String>,
    /// Maximum number of restarts of the worker group.
    pub max_restarts: usize,
    /// Interval between checks of the other nodes.
    pub monitor_interval: Duration,
    /// Time without a heartbeat after which another node counts as lost.
    pub heartbeat_timeout: Duration,
    /// Time between the stop signal and SIGKILL.
    pub shutdown_timeouts: ShutdownTimeouts,
    /// Signals that stop the worker group.
    pub signals: SignalSet,
    /// Destinations of the workers' output.
    pub output: OutputPlan,
    /// Shows each worker one GPU, as local rank 0.
    pub virtual_local_rank: bool,
    /// Thread counts per worker, for the variables that the user has not set.
    pub threads: BTreeMap<&'static str, String>,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Messages to log before the start.
    pub notes: Vec<String>,
}

/// The rendezvous backend and its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RendezvousPlan {
    /// Node ranks and the address of node 0 are given on the command line.
    Static {
        /// Address of the store on node 0.
        master: Endpoint,
        /// Rank of this node.
        node_rank: usize,
        /// Longest wait for the other nodes.
        timeout: Duration,
    },
    /// Node ranks are assigned at a store, in order of arrival.
    Dynamic(DynamicRendezvous),
}

/// The settings of a c10d rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DynamicRendezvous {
    /// Address of the store.
    pub endpoint: Endpoint,
    /// Forces this node to host the store or not. By default the node with the endpoint's address hosts it.
    pub is_host: Option<bool>,
    /// Longest wait for the minimum number of nodes.
    pub join_timeout: Duration,
    /// Wait for further nodes after the minimum has joined.
    pub last_call_timeout: Duration,
}

/// The time between the stop signal and SIGKILL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownTimeouts {
    /// Timeout after a failure. Other workers may hang in a collective.
    pub after_failure: Duration,
    /// Timeout after a stop signal. Workers may save a checkpoint.
    pub after_signal: Duration,
}

/// The destinations of the workers' output.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputPlan {
    /// Log directory; `None` creates a temporary one.
    pub log_dir: Option<PathBuf>,
    /// Streams redirected to log files.
    pub redirects: StreamsPerRank,
    /// Streams copied to log files in addition to the console.
    pub tee: StreamsPerRank,
    /// Local rank 0 writes to the console itself.
    pub is_interactive: bool,
    /// Local ranks shown on the console; `None` for all.
    pub local_ranks_filter: Option<LocalRanks>,
    /// Filter words for stdout.
    pub stdout_filters: LineFilter,
    /// Filter words for stderr.
    pub stderr_filters: LineFilter,
    /// Template of the line prefix, with ${role_name}, ${local_rank} and ${rank}.
    pub prefix: String,
}

/// An error of a command line that cannot run on this node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// One worker per GPU is requested and the node has no GPU.
    #[error("start one worker per GPU: this node has no GPU (use --nproc-per-node cpu, auto or a number)")]
    NoGpu,
    /// More GPUs are needed than are visible.
    #[error("give each of {n_workers} workers a GPU (--virtual-local-rank): CUDA_VISIBLE_DEVICES lists {n_gpus}")]
    TooFewGpus {
        /// Number of workers.
        n_workers: usize,
        /// Number of visible GPUs.
        n_gpus: usize,
    },
    /// The node rank is not below the number of nodes.
    #[error("start node {node_rank} of {n_nodes}: --node-rank counts from 0")]
    NodeRankOutOfRange {
        /// The given node rank.
        node_rank: usize,
        /// Number of nodes.
        n_nodes: usize,
    },
    /// The address of the rendezvous is missing.
    #[error("find the other nodes: --nnodes {n_nodes} requires {flag}")]
    MissingEndpoint {
        /// Number of nodes.
        n_nodes: usize,
        /// The missing flag.
        flag: &'static str,
    },
    /// Port 0 selects a port that the other nodes cannot know.
    #[error("find the other nodes: --nnodes {n_nodes} requires a fixed port, not 0")]
    PortZero {
        /// Number of nodes.
        n_nodes: usize,
    },
    /// The nodes' store would answer every client that reaches its port.
    #[error(
        "protect the store of {n_nodes} nodes: {} is not set; set it to one secret on every node. torch's clients cannot \
         send it: for them use --allow-torch-clients",
        StoreSecret::VARIABLE
    )]
    MissingSecret {
        /// Number of nodes.
        n_nodes: usize,
    },
    /// A flag has an invalid value.
    #[error("read {flag}: {problem}")]
    InvalidValue {
        /// The flag.
        flag: &'static str,
        /// The cause.
        problem: String,
    },
    /// A torchrun flag is not supported.
    #[error("use {flag}: {reason}")]
    Unsupported {
        /// The flag.
        flag: &'static str,
        /// The reason and the remedy.
        reason: &'static str,
    },
}

impl LaunchPlan {
    /// Resolves the command line on this node.
    pub fn resolve(cli: &Cli, node_resources: &NodeResources) -> Result<Self, PlanError> {
        reject_unsupported_flags(cli)?;
        let local_world_size = local_world_size(cli, node_resources)?;
        let nodes = if cli.nodes.standalone { NodeRange { min: 1, max: 1 } } else { cli.nodes.nnodes };
        let faults = &cli.faults;
        let rendezvous = rendezvous(cli)?;
        Ok(Self {
            nodes,
            local_world_size,
            rendezvous,
            store_secret: store_secret(cli, nodes, node_resources)?,
            run_id: if cli.nodes.standalone { random_id() } else { cli.nodes.rdzv_id.clone() },
            role: cli.workers.role.clone(),
            local_addr: cli.nodes.local_addr.clone(),
            max_restarts: faults.max_restarts,
            monitor_interval: seconds("--monitor-interval", faults.monitor_interval)?,
            heartbeat_timeout: heartbeat_timeout(cli)?,
            shutdown_timeouts: shutdown_timeouts(faults.shutdown_timeout)?,
            signals: faults.signals_to_handle.clone(),
            output: output(cli, node_resources),
            virtual_local_rank: cli.workers.virtual_local_rank,
            threads: threads(local_world_size, node_resources),
            command: command(cli, node_resources)?,
            notes: notes(cli, local_world_size, node_resources),
        })
    }
}

impl OutputPlan {
    /// Returns whether any worker's output goes to a file.
    pub fn keeps_files(&self) -> bool {
        self.redirects.is_any() || self.tee.is_any()
    }
}

fn reject_unsupported_flags(cli: &Cli) -> Result<(), PlanError> {
    let reason = "it names a Python class, which this launcher cannot load";
    let refuse = |flag, reason| Err(PlanError::Unsupported { flag, reason });
    match &cli.torchrun_only {
        torchrun_only if torchrun_only.logs_specs.is_some() => refuse("--logs-specs", reason),
        torchrun_only if torchrun_only.numa_binding.is_some() => refuse(
            "--numa-binding",
            "it is not supported; start the program with numactl, for example `launch numactl --cpunodebind 0 PROGRAM`",
        ),
        _ => Ok(()),
    }
}

fn local_world_size(cli: &Cli, node_resources: &NodeResources) -> Result<usize, PlanError> {
    let n_workers = match cli.workers.nproc_per_node {
        NprocPerNode::Exactly(n) => n,
        NprocPerNode::Gpu if node_resources.n_gpus == 0 => return Err(PlanError::NoGpu),
        NprocPerNode::Gpu => node_resources.n_gpus,
        NprocPerNode::Auto if node_resources.n_gpus > 0 => node_resources.n_gpus,
        NprocPerNode::Auto | NprocPerNode::Cpu => node_resources.n_cores,
    };
    // The list is trusted: only its length is checked.
    let listed = node_resources.variables.get("CUDA_VISIBLE_DEVICES");
    let visible = listed.map(|list| list.split(',').filter(|gpu| !gpu.trim().is_empty()).count());
    match visible {
        Some(n_gpus) if cli.workers.virtual_local_rank && n_gpus < n_workers => {
            Err(PlanError::TooFewGpus { n_workers, n_gpus })
        }
        _ => Ok(n_workers),
    }
}

fn rendezvous(cli: &Cli) -> Result<RendezvousPlan, PlanError> {
    let nodes = &cli.nodes;
    let n_nodes = nodes.nnodes.max;
    let wait = |key, default| option_seconds(cli, key, default);
    if nodes.standalone {
        let endpoint = Endpoint { host: "localhost".into(), port: 0 };
        let (join_timeout, last_call_timeout) = (Duration::from_secs(600), Duration::ZERO);
        return Ok(RendezvousPlan::Dynamic(DynamicRendezvous {
            endpoint,
            is_host: Some(true),
            join_timeout,
            last_call_timeout,
        }));
    }
    if nodes.rdzv_backend == RendezvousBackend::C10d {
        let is_host = option_flag(cli, "is_host")?;
        let (join_timeout, last_call_timeout) = (wait("join_timeout", 600)?, wait("last_call_timeout", 30)?);
        let endpoint = known_port(c10d_endpoint(cli)?, n_nodes)?;
        return Ok(RendezvousPlan::Dynamic(DynamicRendezvous { endpoint, is_host, join_timeout, last_call_timeout }));
    }
    if nodes.node_rank >= n_nodes {
        return Err(PlanError::NodeRankOutOfRange { node_rank: nodes.node_rank, n_nodes });
    }
    let timeout = wait("timeout", 900)?;
    Ok(RendezvousPlan::Static {
        master: known_port(static_master(cli)?, n_nodes)?,
        node_rank: nodes.node_rank,
        timeout,
    })
}

fn known_port(endpoint: Endpoint, n_nodes: usize) -> Result<Endpoint, PlanError> {
    if endpoint.port == 0 && n_nodes > 1 { Err(PlanError::PortZero { n_nodes }) } else { Ok(endpoint) }
}

fn static_master(cli: &Cli) -> Result<Endpoint, PlanError> {
    let nodes = &cli.nodes;
    let (flag, text) = match (&nodes.master_addr, nodes.rdzv_endpoint.as_str()) {
        (Some(addr), "") => ("--master-addr", addr.as_str()),
        (None, "") if nodes.nnodes.max > 1 => {
            return Err(PlanError::MissingEndpoint { n_nodes: nodes.nnodes.max, flag: "--master-addr" });
        }
        (None, "") => ("--master-addr", "127.0.0.1"),
        (_, endpoint) => ("--rdzv-endpoint", endpoint),
    };
    // --master-addr has no port, so an IPv6 address may be written without brackets.
    let bare = flag == "--master-addr" && text.parse::<std::net::Ipv6Addr>().is_ok();
    let text = if bare { format!("[{text}]") } else { text.to_owned() };
    Endpoint::parse(&text, nodes.master_port).map_err(|problem| PlanError::InvalidValue { flag, problem })
}

fn c10d_endpoint(cli: &Cli) -> Result<Endpoint, PlanError> {
    let flag = "--rdzv-endpoint";
    let text = match cli.nodes.rdzv_endpoint.as_str() {
        "" if cli.nodes.nnodes.max > 1 => {
            return Err(PlanError::MissingEndpoint { n_nodes: cli.nodes.nnodes.max, flag });
        }
        "" => "localhost",
        text => text,
    };
    Endpoint::parse(text, 29400).map_err(|problem| PlanError::InvalidValue { flag, problem })
}

/// Returns the heartbeat timeout: by default three intervals of five seconds.
fn heartbeat_timeout(cli: &Cli) -> Result<Duration, PlanError> {
    let flag = "--rdzv-conf";
    let key = "keep_alive_max_attempt";
    let interval = option_seconds(cli, "keep_alive_interval", 5)?;
    let times = cli.nodes.rdzv_conf.0.get(key).map_or(Ok(3), |text| text.parse::<u32>());
    let times = times.ok().filter(|times| *times > 0);
    let times = times.ok_or_else(|| PlanError::InvalidValue { flag, problem: format!("{key} is not a count") })?;
    Ok(duration(interval.as_secs_f64() * f64::from(times)).expect("both factors are at least zero"))
}

fn option_seconds(cli: &Cli, key: &str, default: u64) -> Result<Duration, PlanError> {
    let Some(text) = cli.nodes.rdzv_conf.0.get(key) else { return Ok(Duration::from_secs(default)) };
    let problem = || format!("{key}={text} is not a number of seconds");
    let seconds = text.parse().ok().and_then(duration);
    seconds.ok_or_else(|| PlanError::InvalidValue { flag: "--rdzv-conf", problem: problem() })
}

fn option_flag(cli: &Cli, key: &str) -> Result<Option<bool>, PlanError> {
    let Some(text) = cli.nodes.rdzv_conf.0.get(key) else { return Ok(None) };
    match text.to_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" => Ok(Some(true)),
        "0" | "false" | "f" | "no" | "n" => Ok(Some(false)),
        _ => Err(PlanError::InvalidValue {
            flag: "--rdzv-conf",
            problem: format!("{key}={text} is neither true nor false"),
        }),
    }
}

fn seconds(flag: &'static str, value: f64) -> Result<Duration, PlanError> {
    let problem = || format!("{value} is not a number of seconds");
    duration(value).ok_or_else(|| PlanError::InvalidValue { flag, problem: problem() })
}

/// Converts seconds, at most ten years: a larger value could overflow when added to an `Instant`.
fn duration(seconds: f64) -> Option<Duration> {
    const LONGEST: f64 = 10.0 * 365.0 * 86400.0;
    // Not `min`, which would turn NaN into the limit.
    Duration::try_from_secs_f64(if seconds > LONGEST { LONGEST } else { seconds }).ok()
}

fn shutdown_timeouts(requested: Option<f64>) -> Result<ShutdownTimeouts, PlanError> {
    let requested = requested.map(|value| seconds("--shutdown-timeout", value)).transpose()?;
    let or = |default| requested.unwrap_or(Duration::from_secs(default));
    Ok(ShutdownTimeouts { after_failure: or(30), after_signal: or(300) })
}

fn output(cli: &Cli, node_resources: &NodeResources) -> OutputPlan {
    let output = &cli.output;
    let prefix = node_resources.variables.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE");
    OutputPlan {
        log_dir: output.log_dir.clone(),
        redirects: output.redirects.clone(),
        tee: output.tee.clone(),
        is_interactive: output.interactive,
        local_ranks_filter: output.local_ranks_filter.clone(),
        stdout_filters: output.duplicate_stdout_filters.clone().unwrap_or_default(),
        stderr_filters: output.duplicate_stderr_filters.clone().unwrap_or_default(),
        prefix: prefix.map_or("[${rank}]: ", String::as_str).to_owned(),
    }
}

/// Returns the thread counts of each of several workers: one OpenMP thread, as in torchrun, and cores / workers for
/// rayon.
fn threads(local_world_size: usize, node_resources: &NodeResources) -> BTreeMap<&'static str, String> {
    let rayon_threads = (node_resources.n_cores / local_world_size).max(1).to_string();
    let wanted = [("OMP_NUM_THREADS", "1".to_owned()), ("RAYON_NUM_THREADS", rayon_threads)];
    let has_several = local_world_size >= 2;
    wanted.into_iter().filter(|(name, _)| has_several && !node_resources.variables.contains_key(*name)).collect()
}

/// Returns the secret of the stores: that of the environment, else a random one if all clients are on this node.
fn store_secret(cli: &Cli, nodes: NodeRange, node_resources: &NodeResources) -> Result<Option<StoreSecret>, PlanError> {
    if lets_in_torch(cli) {
        return Ok(None);
    }
    match StoreSecret::from_variable(node_resources.variables.get(StoreSecret::VARIABLE)) {
        None if nodes.max > 1 => Err(PlanError::MissingSecret { n_nodes: nodes.max }),
        None => Ok(Some(StoreSecret::new(format!("{:032x}", rand::random::<u128>())))),
        given => Ok(given),
    }
}

/// Returns true if the store answers clients that do not send its secret.
fn lets_in_torch(cli: &Cli) -> bool {
    cli.nodes.allow_torch_clients || runs_python(cli)
}

/// Returns true if the workers are Python programs.
fn runs_python(cli: &Cli) -> bool {
    let python = &cli.python;
    let program = cli.command.first().and_then(|program| Path::new(program).file_name()?.to_str());
    let is_python = |name: &str| name.starts_with("python") || name.ends_with(".py") && !python.no_python;
    python.run_path || python.module || program.is_some_and(is_python)
}

fn command(cli: &Cli, node_resources: &NodeResources) -> Result<Vec<String>, PlanError> {
    let python = &cli.python;
    if python.module && python.no_python {
        return Err(PlanError::Unsupported { flag: "--module", reason: "--no-python excludes it" });
    }
    let is_script = cli.command.first().is_some_and(|program| program.ends_with(".py")) && !python.no_python;
    let interpreter = node_resources.variables.get("PYTHON_EXEC").map_or("python3", String::as_str);
    // -u turns off Python's output buffering.
    let before = match (python.run_path || is_script, python.module) {
        (true, _) => vec![interpreter, "-u"],
        (false, true) => vec![interpreter, "-u", "-m"],
        (false, false) => vec![],
    };
    Ok(before.into_iter().map(str::to_owned).chain(cli.command.iter().cloned()).collect())
}

fn notes(cli: &Cli, local_world_size: usize, node_resources: &NodeResources) -> Vec<String> {
    let mut notes = Vec::new();
    let set = threads(local_world_size, node_resources);
    if !set.is_empty() {
        let pairs: Vec<_> = set.iter().map(|(name, value)| format!("{name}={value}")).collect();
        notes.push(format!(
            "{local_world_size} workers share {} cores: {} (set these variables to override)",
            node_resources.n_cores,
            pairs.join(" ")
        ));
    }
    if (1..local_world_size).contains(&node_resources.n_gpus) {
        notes.push(format!("{local_world_size} workers run on {} GPUs", node_resources.n_gpus));
    }
    let master = cli.nodes.master_addr.as_deref().filter(|_| cli.nodes.nnodes.max > 1 && cli.nodes.node_rank == 0);
    if let Some(master) = master.filter(|master| !is_this_machine(master, &node_resources.hostname)) {
        notes.push(format!(
            "this is node 0, and --master-addr {master} is not an address of {}",
            node_resources.hostname
        ));
    }
    let secret = StoreSecret::from_variable(node_resources.variables.get(StoreSecret::VARIABLE));
    if secret.is_some() && lets_in_torch(cli) {
        let variable = StoreSecret::VARIABLE;
        notes.push(format!("{variable} has no effect: torch's clients send no secret, so the store needs none"));
    }
    if cli.torchrun_only.start_method.is_some() || cli.torchrun_only.event_log_handler.is_some() {
        notes.push("--start-method and --event-log-handler have no effect here".into());
    }
    notes
}

/// Returns a random UUID, the ID of a standalone job as in torchrun.
fn random_id() -> String {
    let bits: u128 = rand::random();
    let hex = format!("{:032x}", (bits & !(0xf << 76) & !(0x3 << 62)) | (4 << 76) | (2 << 62));
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}
