"""Writes the environment that torchrun (torch 2.11) gives to workers, for a few command lines.

    python tests/reference/torchrun_env.py > candle-ext/launch/tests/fixtures/torchrun_env.json

Run by hand; needs `torchrun` next to this python. A worker prints the variables that the launcher did not have. Values that
differ from run to run are replaced: <port>, <uuid>, <logs>, <host>.
"""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile

WORKER = (
    "import json, os, sys; "
    "json.dump([dict(os.environ), sys.argv[2:]], open(f'{sys.argv[1]}/' + os.environ['RANK'], 'w'))"
)

# Command lines; those of a list are the nodes of one job.
JOBS = [
    [["--nproc-per-node", "1", "--master-port", "29611"]],
    [["--nproc-per-node", "2", "--master-port", "29612", "--role", "actor", "--max-restarts", "3", "--rdzv-id", "j"]],
    [["--nproc-per-node", "2", "--standalone"]],
    [["--nproc-per-node", "2", "--virtual-local-rank", "--master-port", "29613"]],
    [
        ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(2 - node), "--master-port", "29614"]
        for node in range(2)
    ],
    [
        ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29615",
         "--rdzv-id", "job7"]
        for _ in range(2)
    ],
]

BARE = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}


def replaced(value, port):
    value = re.sub(r"^/.*/(attempt_\d+/\d+/error.json)$", r"<logs>/\1", value)
    value = re.sub(r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", "<uuid>", value)
    value = "<host>" if value in (socket.gethostname(), socket.getfqdn()) else value
    return "<port>" if value == port else value


def run(nodes):
    with tempfile.TemporaryDirectory() as folder:
        torchrun = pathlib.Path(sys.executable).parent / "torchrun"
        tail = ["--no-python", sys.executable, "-c", WORKER, folder, "${local_rank}"]
        agents = [subprocess.Popen([torchrun, *node, *tail], env=BARE, stderr=subprocess.DEVNULL) for node in nodes]
        assert [agent.wait() for agent in agents] == [0] * len(nodes), nodes
        workers = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).iterdir())]
    fixed = "--master-port" in nodes[0]
    return {
        "nodes": nodes,
        "workers": [
            {
                "env": {
                    k: replaced(v, None if fixed else env["MASTER_PORT"])
                    for k, v in sorted(env.items())
                    if BARE.get(k) != v and k not in ("LC_CTYPE", "PWD", "SHLVL", "_")
                },
                "arguments": arguments,
            }
            for env, arguments in workers
        ],
    }


if __name__ == "__main__":
    print(json.dumps([run(nodes) for nodes in JOBS], indent=1))
