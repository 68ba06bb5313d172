"""Measures the effective training time ratio (ETTR) of a run whose ranks are killed, and the causes of the lost seconds.

    cargo build --release --bin trainer --bin launch
    python tests/reference/ettr.py --programs target/release --seconds 300 --kill-every 20

It trains the quickstart on 2 ranks under `launch --max-restarts`, with an asynchronous checkpoint each 10 steps, and sends
SIGKILL to the last rank each 20 seconds. It prints a table: seconds, and the share of all seconds. The ratio is the number of
different steps times the median step, divided by all seconds.
"""

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"Train iter: (\d+)/")
RESTART = "restarting the worker group"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=ROOT / "target/release", help="folder of launch and trainer")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--kill-every", type=float, default=20)
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the recipe")
    return parser.parse_args()


def start(args, folder):
    saves = f"{{output_dir: {folder}/saves, auto_resume: true, async_save: true, save_every_n_steps: {args.save_every}, save_total_limit: 3}}"
    command = [args.programs / "launch", "--nproc-per-node", str(args.ranks), "--max-restarts", "1000", "--log-dir", f"{folder}/logs"]
    command += [args.programs / "trainer", "train", "recipes/quickstart.yaml", "epochs=null", "train_iters=1000000"]
    command += [f"output_dir={folder}/run", f"data.cache_dir={folder}/cache", f"checkpoint=[{saves}]"]
    command += ["eval_interval=0", "eval_on_start=false", "generate=null", "train_log_iter_interval=1", *args.overrides]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([str(word) for word in command], cwd=ROOT, text=True, bufsize=1, **pipe)


def rank_pid(launcher, rank):
    """Returns the process of a rank, or None while there is none."""
    for children in Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in children.read_text().split():
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"RANK={rank}".encode() in variables:
                return int(pid)
    return None


def observe(process, args, began):
    """Returns the events as (seconds, kind, value): kinds are step, saved, resumed, detected and kill."""
    events = []

    def read():
        for line in process.stdout:
            now = time.monotonic() - began
            if found := STEP.search(line):
                events.append((now, "step", int(found[1])))
            elif "saved " in line:
                events.append((now, "saved", None))
            elif "resum" in line and line.startswith("[0]"):
                events.append((now, "resumed", line))
            elif RESTART in line:
                events.append((now, "detected", None))
            elif "error" in line:
                print(line.rstrip())

    reader = threading.Thread(target=read)
    reader.start()
    next_kill = args.kill_every
    while (now := time.monotonic() - began) < args.seconds and process.poll() is None:
        if now >= next_kill:
            if pid := rank_pid(process.pid, args.ranks - 1):
                os.kill(pid, signal.SIGKILL)
                events.append((time.monotonic() - began, "kill", None))
            next_kill += args.kill_every
        time.sleep(0.01)
    end = time.monotonic() - began
    process.send_signal(signal.SIGINT)
    process.wait()
    reader.join()
    return sorted((event for event in events if event[0] <= end), key=lambda event: event[0]), end


def losses(events, end):
    """Splits all seconds by cause. Returns the parts and the numbers of steps."""
    parts = dict.fromkeys(
        ["first start", "detection of the exit", "start of the processes", "first step after a restart",
         "steps computed again", "steps with a checkpoint write, above the median", "other steps, above the median"], 0.0
    )
    # The time between two steps of one generation, and whether a checkpoint was reported in between.
    gaps, last, highest, n_unique, n_again, saved = [], None, 0, 0, 0, False
    killed = detected = resumed = None
    kills = []
    first = None
    for now, kind, value in events:
        if kind == "kill":
            killed, detected, resumed, last = now, None, None, now
        elif kind == "detected" and killed is not None:
            detected = now
        elif kind == "resumed" and killed is not None:
            resumed = now
        elif kind == "saved":
            saved = True
        elif kind == "step":
            again = value <= highest
            n_unique, n_again, highest = n_unique + (not again), n_again + again, max(highest, value)
            if first is None:
                first = now
                parts["first start"] = now
            elif killed is not None and detected is None:
                continue  # A step that ended before the kill was noticed.
            elif killed is not None:
                kills.append((killed, detected, resumed or now, now))
                killed = None
            else:
                gaps.append((now - last, saved, again))
            last, saved = now, False
    median = statistics.median(gap for gap, _, _ in gaps)
    for kill, detected, resumed, step in kills:
        parts["detection of the exit"] += detected - kill
        parts["start of the processes"] += resumed - detected
        parts["first step after a restart"] += max(step - resumed - median, 0)
    parts["first start"] -= median
    parts["steps computed again"] = n_again * median
    for gap, saved, _ in gaps:
        parts["steps with a checkpoint write, above the median" if saved else "other steps, above the median"] += gap - median
    useful = n_unique * median
    parts["unexplained"] = end - useful - sum(parts.values())
    return parts, useful, median, n_unique, n_again, kills


def main():
    args = arguments()
    folder = Path(tempfile.mkdtemp(prefix="ettr-"))
    try:
        began = time.monotonic()
        events, end = observe(start(args, folder), args, began)
        parts, useful, median, n_unique, n_again, kills = losses(events, end)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{end:.0f} s, {len(kills)} kills, {n_unique} steps of {1000 * median:.1f} ms, {n_again} steps again")
    print("| part | seconds | share |\n|---|---|---|")
    for name, seconds in {"useful steps": useful, **parts}.items():
        print(f"| {name} | {seconds:.2f} | {100 * seconds / end:.1f} % |")


main()
