//! The command line: torchrun's flags in both spellings, its PET_* variables as defaults, and a few additional flags.
//!
//! [`crate::plan`] resolves it on a node.

use std::path::PathBuf;

use candlewick_command_line::{ManArgs, Shell};
use clap::builder::FalseyValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::streams::StreamsPerRank;
use crate::values::{LineFilter, LocalRanks, NodeRange, NprocPerNode, RendezvousBackend, RendezvousOptions, SignalSet};

/// Starts a program once per rank, as torchrun does, and stops all ranks when one fails.
#[derive(Clone, Debug, Parser)]
#[command(name = "launch", version, override_usage = USAGE, after_long_help = EXAMPLES, args_override_self = true)]
#[command(subcommand_negates_reqs = true, args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
pub struct Cli {
    /// A command of the launcher itself. `launch -- man` starts a program of that name.
    #[command(subcommand)]
    pub document: Option<DocumentCommand>,
    /// Print the environment and command of each worker, and start nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Print the rank of this process, read from the environment of torchrun, srun or mpirun
    #[arg(long)]
    pub world: bool,
    /// Program and its arguments, passed unchanged except for ${local_rank}
    #[arg(trailing_var_arg = true, required_unless_present = "world", value_name = "PROGRAM")]
    pub command: Vec<String>,
    /// Workers of this node.
    #[command(flatten)]
    pub workers: WorkerArgs,
    /// Nodes and their rendezvous.
    #[command(flatten)]
    pub nodes: NodeArgs,
    /// Failures, restarts and signals.
    #[command(flatten)]
    pub faults: RestartArgs,
    /// Destinations of the output.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Python programs.
    #[command(flatten)]
    pub python: PythonArgs,
    /// torchrun flags without effect.
    #[command(flatten)]
    pub torchrun_only: TorchrunOnlyArgs,
}

/// The launcher's own commands, which print documents of its command line.
#[derive(Clone, Debug, Subcommand)]
pub enum DocumentCommand {
    /// Print a shell completion script
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the man page, or write it into a folder
    Man(ManArgs),
}

const USAGE: &str = "launch [OPTIONS] [--] PROGRAM [ARGUMENTS]...";

const EXAMPLES: &str = "\
Environment variables set defaults: PET_NPROC_PER_NODE=4 equals --nproc-per-node 4. Flags accept _ in place of -.

Examples:
  launch --nproc-per-node 4 -- trainer train recipe.yaml
  launch --standalone --nproc-per-node auto --max-restarts 3 trainer train recipe.yaml
  launch --nproc-per-node 2 --log-dir logs --tee 3 --local-ranks-filter 0 trainer train recipe.yaml
  launch --standalone --nproc-per-node 2 --interactive -- trainer chat runs/my-run --tensor-parallel-size 2
  launch --nnodes 2 --node-rank 1 --master-addr node0 --nproc-per-node 8 trainer train recipe.yaml
  launch --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id job7 trainer train recipe.yaml
  launch --dry-run --nproc-per-node 2 trainer train recipe.yaml

Exit codes:
  0 every worker exited with 0
  1 the launcher failed (a port in use, a missing node)
  2 invalid command line; nothing was started
  7 workers of another node failed
  75 stopped on request with a checkpoint saved
  otherwise the exit code of the worker that failed first, 128+n for signal n";

/// The workers of this node.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Workers")]
pub struct WorkerArgs {
    /// Workers per node: a number, gpu (one per GPU), cpu (one per core), or auto (gpu if the node has any, else cpu)
    #[arg(long, alias = "nproc_per_node", env = "PET_NPROC_PER_NODE", hide_env = true)]
    #[arg(value_name = "N|auto|gpu|cpu", default_value = "1")]
    pub nproc_per_node: NprocPerNode,
    /// Role of the workers, passed as ROLE_NAME
    #[arg(long, env = "PET_ROLE", hide_env = true, value_name = "NAME", default_value = "default")]
    pub role: String,
    /// Set LOCAL_RANK to 0 and make one GPU visible to each worker
    #[arg(long, alias = "virtual_local_rank", env = "PET_VIRTUAL_LOCAL_RANK", hide_env = true)]
    #[arg(value_parser = FalseyValueParser::new())]
    pub virtual_local_rank: bool,
}

/// The nodes and their rendezvous.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Nodes")]
pub struct NodeArgs {
    /// Number of nodes, or the range of an elastic job. Each node runs its own launcher
    #[arg(long, env = "PET_NNODES", hide_env = true, value_name = "N|MIN:MAX", default_value = "1:1")]
    pub nnodes: NodeRange,
    /// Rendezvous backend. static: each node sets --node-rank; c10d: ranks follow the order of arrival at the endpoint
    #[arg(long, alias = "rdzv_backend", env = "PET_RDZV_BACKEND", hide_env = true)]
    #[arg(value_name = "static|c10d", default_value = "static")]
    pub rdzv_backend: RendezvousBackend,
    /// Rank of this node, from 0 (static)
    #[arg(long, alias = "node_rank", env = "PET_NODE_RANK", hide_env = true, value_name = "N", default_value_t = 0)]
    pub node_rank: usize,
    /// Host name or address of node 0 (static) [default with one node: 127.0.0.1]
    #[arg(long, alias = "master_addr", env = "PET_MASTER_ADDR", hide_env = true)]
    #[arg(value_name = "HOST")]
    pub master_addr: Option<String>,
    /// Port of the store on node 0 (static)
    #[arg(long, alias = "master_port", env = "PET_MASTER_PORT", hide_env = true)]
    #[arg(value_name = "PORT", default_value_t = 29500)]
    pub master_port: u16,
    /// Rendezvous endpoint (c10d); the default port is 29400
    #[arg(long, alias = "rdzv_endpoint", env = "PET_RDZV_ENDPOINT", hide_env = true)]
    #[arg(value_name = "HOST[:PORT]", default_value = "", hide_default_value = true)]
    pub rdzv_endpoint: String,
    /// ID of the job, equal on all of its nodes
    #[arg(long, alias = "rdzv_id", env = "PET_RDZV_ID", hide_env = true, value_name = "ID", default_value = "none")]
    pub rdzv_id: String,
    /// Rendezvous options: timeout=900 (static), join_timeout=600, last_call_timeout=30, is_host=1|0 (c10d),
    /// keep_alive_interval=5, keep_alive_max_attempt=3; other torchrun keys have no effect
    #[arg(long, alias = "rdzv_conf", env = "PET_RDZV_CONF", hide_env = true)]
    #[arg(value_name = "KEY=VALUE,...", default_value = "", hide_default_value = true)]
    pub rdzv_conf: RendezvousOptions,
    /// Run on one node with a store at a free port; overrides --nnodes, --rdzv-* and --master-*
    #[arg(long, env = "PET_STANDALONE", hide_env = true, value_parser = FalseyValueParser::new())]
    pub standalone: bool,
    /// Also answer clients of the store that do not send its secret, such as torch's. A Python program implies it
    #[arg(long)]
    pub allow_torch_clients: bool,
    /// Address at which other nodes reach this node [default: its host name]
    #[arg(long, alias = "local_addr", env = "PET_LOCAL_ADDR", hide_env = true, value_name = "HOST")]
    pub local_addr: Option<String>,
}

/// Failures, restarts and signals.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Failures and signals")]
pub struct RestartArgs {
    /// Maximum number of worker group restarts before failing
    #[arg(long, alias = "max_restarts", env = "PET_MAX_RESTARTS", hide_env = true)]
    #[arg(value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub max_restarts: usize,
    /// Seconds between checks of the other nodes. The exit of a worker is detected at once
    #[arg(long, alias = "monitor_interval", env = "PET_MONITOR_INTERVAL", hide_env = true)]
    #[arg(value_name = "SECONDS", default_value_t = 0.1, allow_negative_numbers = true)]
    pub monitor_interval: f64,
    /// Signals that stop the workers: forwarded once; a second one kills. SIGUSR1 and SIGUSR2 are always forwarded
    #[arg(long, alias = "signals_to_handle", env = "PET_SIGNALS_TO_HANDLE", hide_env = true)]
    #[arg(value_name = "SIGNAL,...", default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT")]
    pub signals_to_handle: SignalSet,
    /// Seconds between the stop signal and SIGKILL [default: 30 after a failure, 300 after a signal]
    #[arg(long, alias = "shutdown_timeout", env = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", hide_env = true)]
    #[arg(value_name = "SECONDS", allow_negative_numbers = true)]
    pub shutdown_timeout: Option<f64>,
}

/// The destinations of the output.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Log directory; files are DIR/ID_*/attempt_N/LOCAL_RANK/*.log [default: a new temporary directory]
    #[arg(long, alias = "log_dir", env = "PET_LOG_DIR", hide_env = true, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Redirect streams to log files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank, for
    /// example 0:1,1:2
    #[arg(short, long, env = "PET_REDIRECTS", hide_env = true, value_name = "STREAMS", default_value = "0")]
    pub redirects: StreamsPerRank,
    /// Copy streams to log files in addition to the console; takes the values of --redirects
    #[arg(short, long, env = "PET_TEE", hide_env = true, value_name = "STREAMS", default_value = "0")]
    pub tee: StreamsPerRank,
    /// Give the console to local rank 0, for a program that talks to its user: its output has no prefix, and parts of
    /// lines appear at once
    #[arg(long, conflicts_with_all = ["redirects", "tee"])]
    pub interactive: bool,
    /// Show only the output of these local ranks on the console
    #[arg(long, alias = "local_ranks_filter", env = "PET_LOCAL_RANKS_FILTER", hide_env = true, value_name = "0,1,...")]
    pub local_ranks_filter: Option<LocalRanks>,
    /// Copy lines of tee'd stdout that contain one of these words to attempt_N/filtered_stdout.log; ,, is a comma
    #[arg(long, alias = "duplicate_stdout_filters", env = "PET_DUPLICATE_STDOUT_FILTERS", hide_env = true)]
    #[arg(value_name = "WORD,...")]
    pub duplicate_stdout_filters: Option<LineFilter>,
    /// Copy lines of tee'd stderr that contain one of these words to attempt_N/filtered_stderr.log; ,, is a comma
    #[arg(long, alias = "duplicate_stderr_filters", env = "PET_DUPLICATE_STDERR_FILTERS", hide_env = true)]
    #[arg(value_name = "WORD,...")]
    pub duplicate_stderr_filters: Option<LineFilter>,
}

/// Python programs. Without a flag, `python3` runs a program whose name ends in .py; others are executed directly.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Python")]
pub struct PythonArgs {
    /// Run PROGRAM as a Python module: `python -u -m PROGRAM`
    #[arg(short, long, env = "PET_MODULE", hide_env = true, value_parser = FalseyValueParser::new())]
    pub module: bool,
    /// Execute PROGRAM directly, even if its name ends in .py
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON", hide_env = true, value_parser = FalseyValueParser::new())]
    pub no_python: bool,
    /// Run PROGRAM as a Python script, regardless of its name
    #[arg(long, alias = "run_path", env = "PET_RUN_PATH", hide_env = true, value_parser = FalseyValueParser::new())]
    pub run_path: bool,
}

/// torchrun flags without effect: the first two are ignored, the others are rejected.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "torchrun flags without effect")]
pub struct TorchrunOnlyArgs {
    /// Ignored: workers are started by fork and exec
    #[arg(long, alias = "start_method", env = "PET_START_METHOD", hide_env = true, value_name = "METHOD")]
    pub start_method: Option<StartMethod>,
    /// Ignored: events are logged to stderr
    #[arg(long, alias = "event_log_handler", env = "PET_EVENT_LOG_HANDLER", hide_env = true, value_name = "NAME")]
    pub event_log_handler: Option<String>,
    /// Rejected: it names a Python class
    #[arg(long, alias = "logs_specs", value_name = "NAME")]
    pub logs_specs: Option<String>,
    /// Rejected: start PROGRAM with numactl or taskset
    #[arg(long, alias = "numa_binding", value_name = "MODE")]
    pub numa_binding: Option<String>,
}

/// The start methods of Python's multiprocessing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StartMethod {
    /// A new interpreter.
    Spawn,
    /// A copy of the process.
    Fork,
    /// A copy of a server process.
    Forkserver,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_example_parses() {
        for line in EXAMPLES.lines().map(str::trim).filter(|line| line.starts_with("launch ")) {
            assert!(Cli::try_parse_from(line.split(' ')).is_ok(), "{line}");
        }
    }
}
