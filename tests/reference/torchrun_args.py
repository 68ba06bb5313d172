"""Records how torchrun (torch 2.11) parses command lines: the settings of each, or a refusal.

    python tests/reference/torchrun_args.py > candle-ext/launch/tests/fixtures/torchrun_args.json

Run by hand. Nothing is launched. The host is simulated, with 8 cores and the GPUs of the case, so that the values of
--nproc-per-node do not depend on the machine.
"""

import contextlib
import io
import json
import os
import sys
from unittest import mock

import torch
from torch.distributed import run as torchrun

CORES = 8

# (environment, GPUs, command line)
CASES = [
    ({}, 0, ["--no-python", "prog"]),
    ({}, 0, ["--no-python", "prog", "a", "-b", "--nnodes", "7"]),
    ({}, 0, ["--nproc-per-node", "4", "--no-python", "prog"]),
    ({}, 0, ["--nproc_per_node", "4", "--no_python", "prog"]),
    ({}, 0, ["--nproc-per-node=4", "--no-python", "prog"]),
    ({}, 0, ["--nproc_per_node=4", "--no-python", "prog", "--nproc_per_node=9"]),
    ({}, 0, ["--nproc-per-node", "cpu", "--no-python", "prog"]),
    ({}, 0, ["--nproc-per-node", "auto", "--no-python", "prog"]),
    ({}, 4, ["--nproc-per-node", "auto", "--no-python", "prog"]),
    ({}, 4, ["--nproc-per-node", "gpu", "--no-python", "prog"]),
    ({}, 0, ["--nproc-per-node", "gpu", "--no-python", "prog"]),
    ({}, 0, ["--nproc-per-node", "many", "--no-python", "prog"]),
    ({}, 0, ["--no-python", "--nproc-per-node", "2", "--", "prog", "a"]),
    ({}, 0, ["--no-python", "--nproc-per-node", "2", "prog", "--", "a"]),
    ({}, 0, ["--nnodes", "2", "--no-python", "prog"]),
    ({}, 0, ["--nnodes", "1:4", "--no-python", "prog"]),
    ({}, 0, ["--nnodes=2:2", "--no-python", "prog"]),
    ({}, 0, ["--nnodes", "4:1", "--no-python", "prog"]),
    ({}, 0, ["--nnodes", "0", "--no-python", "prog"]),
    ({}, 0, ["--nnodes", "1:2:3", "--no-python", "prog"]),
    ({}, 0, ["--nnodes", "two", "--no-python", "prog"]),
    ({}, 0, ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "1234",
             "--no-python", "prog"]),
    ({}, 0, ["--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1", "--master_port", "1234",
             "--no-python", "prog"]),
    ({}, 0, ["--node-rank", "one", "--no-python", "prog"]),
    ({}, 0, ["--standalone", "--no-python", "prog"]),
    ({}, 0, ["--standalone", "--rdzv-id", "mine", "--rdzv-endpoint", "far:1", "--no-python", "prog"]),
    ({}, 0, ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400", "--rdzv-id", "job7", "--nnodes", "1:4",
             "--rdzv-conf", "join_timeout=60,last_call_timeout=5,is_host=1", "--no-python", "prog"]),
    ({}, 0, ["--rdzv_backend=c10d", "--rdzv_endpoint=node0", "--rdzv_id=job7", "--rdzv_conf=read_timeout=30",
             "--no-python", "prog"]),
    ({}, 0, ["--rdzv-conf", "timeout=60", "--no-python", "prog"]),
    ({}, 0, ["--rdzv-conf", "timeout", "--no-python", "prog"]),
    ({}, 0, ["--rdzv-backend", "static", "--rdzv-endpoint", "10.0.0.2:555", "--no-python", "prog"]),
    ({}, 0, ["--max-restarts", "3", "--monitor-interval", "0.5", "--role", "actor", "--no-python", "prog"]),
    ({}, 0, ["--max_restarts=3", "--monitor_interval=5", "--no-python", "prog"]),
    ({}, 0, ["--max-restarts", "-1", "--no-python", "prog"]),
    ({}, 0, ["--max-restarts", "x", "--no-python", "prog"]),
    ({}, 0, ["--log-dir", "logs", "-r", "3", "-t", "1", "--no-python", "prog"]),
    ({}, 0, ["--log_dir", "logs", "--redirects", "0:1,1:2", "--tee", "1:3", "--nproc-per-node", "2",
             "--no-python", "prog"]),
    ({}, 0, ["-r", "4", "--no-python", "prog"]),
    ({}, 0, ["-t", "0:1,", "--no-python", "prog"]),
    ({}, 0, ["-t", "0:4", "--no-python", "prog"]),
    ({}, 0, ["--local-ranks-filter", "0,2", "--nproc-per-node", "4", "--no-python", "prog"]),
    ({}, 0, ["--local_ranks_filter=1", "--nproc-per-node", "2", "--no-python", "prog"]),
    ({}, 0, ["--local-ranks-filter", "a", "--no-python", "prog"]),
    ({}, 0, ["--duplicate-stdout-filters", "a,b,,c", "--duplicate_stderr_filters", "x", "--no-python", "prog"]),
    ({}, 0, ["--signals-to-handle", "SIGTERM,SIGUSR1", "--no-python", "prog"]),
    ({}, 0, ["--signals_to_handle=SIGINT", "--no-python", "prog"]),
    ({}, 0, ["--local-addr", "10.1.1.1", "--virtual-local-rank", "--no-python", "prog"]),
    ({}, 0, ["train.py", "--lr", "1"]),
    ({}, 0, ["-m", "pkg.train", "--lr", "1"]),
    ({}, 0, ["--module", "pkg.train"]),
    ({}, 0, ["--no-python", "-m", "pkg.train"]),
    ({}, 0, ["--start-method", "fork", "--no-python", "prog"]),
    ({}, 0, ["--start-method", "thread", "--no-python", "prog"]),
    ({}, 0, ["--nproc-per-nod", "4", "-q", "--no-python", "prog"]),
    ({}, 0, ["--no-such-flag", "--no-python", "prog"]),
    ({}, 0, ["--no-python"]),
    ({}, 0, []),
    ({"PET_NPROC_PER_NODE": "3", "PET_NNODES": "2", "PET_NODE_RANK": "1"}, 0, ["--no-python", "prog"]),
    ({"PET_NPROC_PER_NODE": "3"}, 0, ["--nproc-per-node", "5", "--no-python", "prog"]),
    ({"PET_MASTER_ADDR": "node0", "PET_MASTER_PORT": "1234", "PET_NO_PYTHON": "1"}, 0, ["prog"]),
    ({"PET_STANDALONE": "1"}, 0, ["--no-python", "prog"]),
    ({"PET_STANDALONE": "0"}, 0, ["--no-python", "prog"]),
    ({"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "node0:1", "PET_RDZV_ID": "j", "PET_RDZV_CONF": "is_host=0"},
     0, ["--no-python", "prog"]),
    ({"PET_REDIRECTS": "3", "PET_TEE": "1", "PET_LOG_DIR": "l", "PET_LOCAL_RANKS_FILTER": "0"}, 0,
     ["--no-python", "prog"]),
    ({"PET_MAX_RESTARTS": "2", "PET_MONITOR_INTERVAL": "1", "PET_ROLE": "r", "PET_SIGNALS_TO_HANDLE": "SIGINT"}, 0,
     ["--no-python", "prog"]),
]


def std(value):
    """A stream setting: a number for every rank, or a map by local rank."""
    return {str(k): int(v) for k, v in value.items()} if isinstance(value, dict) else int(value)


def settings(args):
    """Returns the settings that torchrun's `run` passes to its agent, as plain values."""
    if args.standalone:
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", "<uuid>"
    config, cmd, cmd_args = torchrun.config_from_args(args)
    logs = config.logs_specs
    return {
        "min_nodes": config.min_nodes,
        "max_nodes": config.max_nodes,
        "nproc_per_node": config.nproc_per_node,
        "run_id": config.run_id,
        "role": config.role,
        "rdzv_backend": config.rdzv_backend,
        "rdzv_endpoint": config.rdzv_endpoint,
        "rdzv_configs": {k: str(v) for k, v in sorted(config.rdzv_configs.items()) if k != "timeout" or v != 900},
        "max_restarts": config.max_restarts,
        "monitor_interval": config.monitor_interval,
        "local_addr": config.local_addr,
        "log_dir": args.log_dir,
        "redirects": std(logs._redirects),
        "tee": std(logs._tee),
        "local_ranks_filter": sorted(logs._local_ranks_filter) if logs._local_ranks_filter else None,
        "signals_to_handle": config.signals_to_handle,
        "duplicate_stdout_filters": config.duplicate_stdout_filters,
        "duplicate_stderr_filters": config.duplicate_stderr_filters,
        "virtual_local_rank": config.virtual_local_rank,
        "command": ["python" if part == sys.executable else part for part in [cmd, *cmd_args]],
    }


def read(environment, n_gpus, line):
    """Returns the settings, or `None` if torchrun refuses the line."""
    with contextlib.ExitStack() as stack:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PET_") and k != "OMP_NUM_THREADS"}
        stack.enter_context(mock.patch.dict(os.environ, {**clean, **environment}, clear=True))
        stack.enter_context(mock.patch.object(os, "cpu_count", lambda: CORES))
        for owner, name in [(torch.cuda, "is_available"), (torch.accelerator, "is_available")]:
            stack.enter_context(mock.patch.object(owner, name, lambda: n_gpus > 0))
        for owner in [torch.cuda, torch.accelerator]:
            stack.enter_context(mock.patch.object(owner, "device_count", lambda: n_gpus))
        kind = mock.Mock(type="cuda")
        stack.enter_context(mock.patch.object(torch.accelerator, "current_accelerator", lambda: kind))
        stack.enter_context(mock.patch.object(torchrun, "LaunchConfig", lambda **kw: mock.Mock(**kw)))
        stack.enter_context(mock.patch.object(torchrun.DefaultLogsSpecs, "__init__", keep_logs))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try:
            return settings(torchrun.parse_args(line))
        except (SystemExit, Exception):  # noqa: B014: argparse exits, the rest raises
            return None


def keep_logs(self, log_dir=None, redirects=0, tee=0, local_ranks_filter=None):
    """Replaces the log settings by ones that create no folder."""
    self._redirects, self._tee, self._local_ranks_filter = redirects, tee, local_ranks_filter


def main():
    rows = [
        {"env": environment, "gpus": n_gpus, "args": line, "settings": read(environment, n_gpus, line)}
        for environment, n_gpus, line in CASES
    ]
    head = {"torch": torch.__version__.split("+")[0], "cores": CORES}
    print(json.dumps({**head, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
