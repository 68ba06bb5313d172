"""Runs a program and returns its output, its duration and its peak memory."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

N_THREADS = len(os.sched_getaffinity(0))
# Both sides have the same number of threads, and neither uses the network.
ENVIRONMENT = dict(os.environ, RAYON_NUM_THREADS=str(N_THREADS), OMP_NUM_THREADS=str(N_THREADS), HF_HUB_OFFLINE="1")


class Failed(SystemExit):
    """A failed program. Uncaught, it ends this one."""


class Ran(NamedTuple):
    said: str
    complained: str
    seconds: float
    # Peak memory of the largest process, in MiB.
    rss: float


def run(command: list, environment: dict | None = None) -> Ran:
    command = list(map(str, command))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=ENVIRONMENT | (environment or {}),
                                   preexec_fn=first_to_go)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        said, complained = out.read().decode(), err.read().decode()
    if process.returncode:
        raise Failed(f"{complained}failed: {' '.join(command)} ended with {process.returncode}")
    return Ran(said, complained, seconds, usage.ru_maxrss / 1024)


def first_to_go() -> None:
    """Makes the OOM killer choose this process instead of the measuring one."""
    Path("/proc/self/oom_score_adj").write_text("1000")


def peer_command(what: str, job: dict) -> list:
    """Returns the command of peer.py for `what`."""
    job = job | {"what": what, "threads": N_THREADS}
    return [sys.executable, str(Path(__file__).with_name("peer.py")), json.dumps(job)]


def seconds_until(command: list, begins: str) -> tuple[float, float]:
    """Returns the time from a process's start to its stderr line with this beginning, and its peak memory in MiB."""
    command = list(map(str, command))
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    seconds, lines = None, []
    for line in process.stderr:
        lines.append(line)
        if seconds is None and line.startswith(begins):
            seconds = time.perf_counter() - began
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or seconds is None:
        sys.exit(f"{''.join(lines)}failed: {' '.join(command)} ended with {process.returncode}")
    return seconds, usage.ru_maxrss / 1024
