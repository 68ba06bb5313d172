//! The command line: torchrun's flags in both spellings, with its PET_* variables as defaults, and a few of our own.
//! What it comes to on a host is the business of [`crate::plan`].

use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Args, Parser, ValueEnum};

use crate::streams::StreamsPerRank;
use crate::values::{LineFilter, LocalRanks, NodeRange, NprocPerNode, RendezvousBackend, RendezvousOptions, SignalSet};

/// Starts a program once for each rank, as torchrun does, and ends all of it if one of them fails.
#[derive(Clone, Debug, Parser)]
#[command(name = "launch", version, override_usage = USAGE, after_long_help = EXAMPLES, args_override_self = true)]
pub struct Cli {
    /// Print what would run, one worker after the other, and start nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Print which rank this process is by its environment, as the programs read it under torchrun, srun or mpirun
    #[arg(long)]
    pub world: bool,
    /// The program and its arguments, which are passed on untouched but for ${local_rank}
    #[arg(trailing_var_arg = true, required_unless_present = "world", value_name = "PROGRAM")]
    pub command: Vec<String>,
    /// How many workers.
    #[command(flatten)]
    pub workers: WorkerArgs,
    /// Which nodes, and how they meet.
    #[command(flatten)]
    pub nodes: NodeArgs,
    /// What happens when something goes wrong.
    #[command(flatten)]
    pub faults: RestartArgs,
    /// Where output goes.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Whether the program is Python's.
    #[command(flatten)]
    pub python: PythonArgs,
    /// torchrun's flags without a meaning here.
    #[command(flatten)]
    pub torchrun_only: TorchrunOnlyArgs,
}

const USAGE: &str = "launch [OPTIONS] [--] PROGRAM [ARGUMENTS]...";

const EXAMPLES: &str = "\
Defaults can be set by variables: PET_NPROC_PER_NODE=4 stands for --nproc-per-node 4. Flags may be spelled with _ for -.

Examples:
  launch --nproc-per-node 4 -- trainer train recipe.yaml
  launch --standalone --nproc-per-node auto --max-restarts 3 trainer train recipe.yaml
  launch --nproc-per-node 2 --log-dir logs --tee 3 --local-ranks-filter 0 trainer train recipe.yaml
  launch --nnodes 2 --node-rank 1 --master-addr node0 --nproc-per-node 8 trainer train recipe.yaml
  launch --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id job7 trainer train recipe.yaml
  launch --dry-run --nproc-per-node 2 trainer train recipe.yaml

Exit codes:
  0 every worker ended with 0, 2 wrong command line (nothing was started),
  7 workers of another node failed, 75 stopped on request with a checkpoint saved,
  1 the launcher itself failed (a port in use, a node that never came);
  otherwise the code of the worker that failed first, 128+n if signal n ended it";

/// How many workers.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Workers")]
pub struct WorkerArgs {
    /// Workers a node: a number, gpu (one a GPU), cpu (one a core), auto (GPUs if there are any, else cores)
    #[arg(long, alias = "nproc_per_node", env = "PET_NPROC_PER_NODE", hide_env = true)]
    #[arg(value_name = "N|auto|gpu|cpu", default_value = "1")]
    pub nproc_per_node: NprocPerNode,
    /// A name for the workers, in ROLE_NAME
    #[arg(long, env = "PET_ROLE", hide_env = true, value_name = "NAME", default_value = "default")]
    pub role: String,
    /// Show each worker one GPU, as device 0, and call it local rank 0
    #[arg(long, alias = "virtual_local_rank", env = "PET_VIRTUAL_LOCAL_RANK", hide_env = true)]
    #[arg(value_parser = FalseyValueParser::new())]
    pub virtual_local_rank: bool,
}

/// Which nodes, and how they meet.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Nodes")]
pub struct NodeArgs {
    /// How many nodes, each with a launcher of its own
    #[arg(long, env = "PET_NNODES", hide_env = true, value_name = "N|MIN:MAX", default_value = "1:1")]
    pub nnodes: NodeRange,
    /// static: every node is told its number; c10d: the nodes meet at the endpoint
    #[arg(long, alias = "rdzv_backend", env = "PET_RDZV_BACKEND", hide_env = true)]
    #[arg(value_name = "static|c10d", default_value = "static")]
    pub rdzv_backend: RendezvousBackend,
    /// Static: the number of this node, from 0
    #[arg(long, alias = "node_rank", env = "PET_NODE_RANK", hide_env = true, value_name = "N", default_value_t = 0)]
    pub node_rank: usize,
    /// Static: the name or address of node 0 [default with one node: 127.0.0.1]
    #[arg(long, alias = "master_addr", env = "PET_MASTER_ADDR", hide_env = true)]
    #[arg(value_name = "HOST")]
    pub master_addr: Option<String>,
    /// Static: the port of node 0's store
    #[arg(long, alias = "master_port", env = "PET_MASTER_PORT", hide_env = true)]
    #[arg(value_name = "PORT", default_value_t = 29500)]
    pub master_port: u16,
    /// c10d: where the nodes meet; the port is 29400 if not given
    #[arg(long, alias = "rdzv_endpoint", env = "PET_RDZV_ENDPOINT", hide_env = true)]
    #[arg(value_name = "HOST[:PORT]", default_value = "", hide_default_value = true)]
    pub rdzv_endpoint: String,
    /// The name of the job: nodes of the same name belong together
    #[arg(long, alias = "rdzv_id", env = "PET_RDZV_ID", hide_env = true, value_name = "ID", default_value = "none")]
    pub rdzv_id: String,
    /// timeout=900 (static), join_timeout=600, last_call_timeout=30, is_host=1|0 (c10d), keep_alive_interval=5,
    /// keep_alive_max_attempt=3; torchrun's others have no effect
    #[arg(long, alias = "rdzv_conf", env = "PET_RDZV_CONF", hide_env = true)]
    #[arg(value_name = "KEY=VALUE,...", default_value = "", hide_default_value = true)]
    pub rdzv_conf: RendezvousOptions,
    /// One node and a free port, whatever the other flags of this group say
    #[arg(long, env = "PET_STANDALONE", hide_env = true, value_parser = FalseyValueParser::new())]
    pub standalone: bool,
    /// The address under which others reach this node, if its host name will not do
    #[arg(long, alias = "local_addr", env = "PET_LOCAL_ADDR", hide_env = true, value_name = "HOST")]
    pub local_addr: Option<String>,
}

/// What happens when something goes wrong.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Faults and signals")]
pub struct RestartArgs {
    /// How often all workers are started again after one failed
    #[arg(long, alias = "max_restarts", env = "PET_MAX_RESTARTS", hide_env = true)]
    #[arg(value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub max_restarts: usize,
    /// Seconds between two looks at the other nodes. A worker that ends is seen at once
    #[arg(long, alias = "monitor_interval", env = "PET_MONITOR_INTERVAL", hide_env = true)]
    #[arg(value_name = "SECONDS", default_value_t = 0.1, allow_negative_numbers = true)]
    pub monitor_interval: f64,
    /// Signals that end the group: passed on once; the same again kills. SIGUSR1 and SIGUSR2 are passed on in any case
    #[arg(long, alias = "signals_to_handle", env = "PET_SIGNALS_TO_HANDLE", hide_env = true)]
    #[arg(value_name = "SIGNAL,...", default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT")]
    pub signals_to_handle: SignalSet,
    /// Seconds that workers get to end before they are killed [default: 30 after a failure, 300 after a signal]
    #[arg(long, alias = "shutdown_timeout", env = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", hide_env = true)]
    #[arg(value_name = "SECONDS", allow_negative_numbers = true)]
    pub shutdown_timeout: Option<f64>,
}

/// Where output goes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Keep logs in DIR/ID_*/attempt_N/LOCAL_RANK/ [default: a new folder in the temporary directory]
    #[arg(long, alias = "log_dir", env = "PET_LOG_DIR", hide_env = true, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Write to stdout.log and stderr.log instead of the console: 0 neither, 1 stdout, 2 stderr, 3 both, or by local
    /// rank as in 0:1,1:2
    #[arg(short, long, env = "PET_REDIRECTS", hide_env = true, value_name = "STREAMS", default_value = "0")]
    pub redirects: StreamsPerRank,
    /// Write to the log files as well as to the console; takes what --redirects takes
    #[arg(short, long, env = "PET_TEE", hide_env = true, value_name = "STREAMS", default_value = "0")]
    pub tee: StreamsPerRank,
    /// Show only these local ranks on the console
    #[arg(long, alias = "local_ranks_filter", env = "PET_LOCAL_RANKS_FILTER", hide_env = true, value_name = "0,1,...")]
    pub local_ranks_filter: Option<LocalRanks>,
    /// Copy the lines of tee'd stdout that contain one of these words to attempt_N/filtered_stdout.log; ,, is a comma
    #[arg(long, alias = "duplicate_stdout_filters", env = "PET_DUPLICATE_STDOUT_FILTERS", hide_env = true)]
    #[arg(value_name = "WORD,...")]
    pub duplicate_stdout_filters: Option<LineFilter>,
    /// The same for stderr and attempt_N/filtered_stderr.log
    #[arg(long, alias = "duplicate_stderr_filters", env = "PET_DUPLICATE_STDERR_FILTERS", hide_env = true)]
    #[arg(value_name = "WORD,...")]
    pub duplicate_stderr_filters: Option<LineFilter>,
}

/// Whether the program is Python's. Without a flag, a name in .py is, and everything else is executed itself.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Python")]
pub struct PythonArgs {
    /// PROGRAM is the name of a Python module: run `python -u -m PROGRAM`
    #[arg(short, long, env = "PET_MODULE", hide_env = true, value_parser = FalseyValueParser::new())]
    pub module: bool,
    /// Execute PROGRAM itself, as is done anyway unless its name ends in .py
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON", hide_env = true, value_parser = FalseyValueParser::new())]
    pub no_python: bool,
    /// Run PROGRAM, a Python script, whatever its name
    #[arg(long, alias = "run_path", env = "PET_RUN_PATH", hide_env = true, value_parser = FalseyValueParser::new())]
    pub run_path: bool,
}

/// torchrun's flags without a meaning here: the first two change nothing, the others are refused.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Of torchrun, without effect or refused")]
pub struct TorchrunOnlyArgs {
    /// No effect: workers are programs of their own
    #[arg(long, alias = "start_method", env = "PET_START_METHOD", hide_env = true, value_name = "METHOD")]
    pub start_method: Option<StartMethod>,
    /// No effect: there are no events beside the messages on stderr
    #[arg(long, alias = "event_log_handler", env = "PET_EVENT_LOG_HANDLER", hide_env = true, value_name = "NAME")]
    pub event_log_handler: Option<String>,
    /// Refused: it names a Python class
    #[arg(long, alias = "logs_specs", value_name = "NAME")]
    pub logs_specs: Option<String>,
    /// Refused: start PROGRAM by numactl or taskset
    #[arg(long, alias = "numa_binding", value_name = "MODE")]
    pub numa_binding: Option<String>,
}

/// How Python's multiprocessing starts a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StartMethod {
    /// A new interpreter.
    Spawn,
    /// A copy of the process.
    Fork,
    /// A copy of a server.
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
