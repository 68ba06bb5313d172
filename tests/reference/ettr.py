"""Measures the effective training time ratio (ETTR) of a run whose ranks are killed, and the causes of the lost seconds.

    cargo build --release --bin trainer --bin launch
    python tests/reference/ettr.py --programs target/release --seconds 300 --kill-every 20

It trains the quickstart on 2 ranks under `launch --max-restarts`, with an asynchronous checkpoint each 10 steps, and sends
SIGKILL to the last rank each 20 seconds. Before and after, it trains without checkpoints and kills: the mean step of these two
runs is a useful step. It prints a table: seconds, and the share of all seconds. The ratio is the number of different steps
times the useful step, divided by all seconds.
"""

import argparse
import os
import re
import shutil
import signal
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
    parser.add_argument("--undisturbed-seconds", type=float, default=60, help="each run without checkpoints and kills")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the recipe")
    return parser.parse_args()


def start(args, folder, checkpoint):
    command = [args.programs / "launch", "--nproc-per-node", str(args.ranks), "--max-restarts", "1000", "--log-dir", f"{folder}/logs"]
    command += [args.programs / "trainer", "train", "recipes/quickstart.yaml", "epochs=null", "train_iters=1000000"]
    command += [f"output_dir={folder}/run", f"data.cache_dir={folder}/cache", f"checkpoint={checkpoint}"]
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


def observe(process, rank, seconds, kill_every):
    """Returns the events as (seconds, kind, value): kinds are step, saved, resumed, detected and kill."""
    events, began = [], time.monotonic()

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
    next_kill = kill_every
    while (now := time.monotonic() - began) < seconds and process.poll() is None:
        if now >= next_kill:
            if pid := rank_pid(process.pid, rank):
                os.kill(pid, signal.SIGKILL)
                events.append((time.monotonic() - began, "kill", None))
            next_kill += kill_every
        time.sleep(0.01)
    end = time.monotonic() - began
    process.send_signal(signal.SIGINT)
    process.wait()
    reader.join()
    return sorted((event for event in events if event[0] <= end), key=lambda event: event[0]), end


def useful_step(args):
    """Returns the mean seconds of a step without checkpoints and kills."""
    events, _ = in_new_folder(args, "none", args.undisturbed_seconds, float("inf"))
    steps = [now for now, kind, _ in events if kind == "step"]
    return (steps[-1] - steps[0]) / (len(steps) - 1)


def in_new_folder(args, checkpoint, seconds, kill_every):
    folder = Path(tempfile.mkdtemp(prefix="ettr-"))
    try:
        process = start(args, folder, checkpoint.replace("$", str(folder)))
        return observe(process, args.ranks - 1, seconds, kill_every)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def losses(events, end, step):
    """Splits all seconds by cause, given the seconds of a useful step. Returns the parts and the counts."""
    parts = dict.fromkeys(
        ["first start", "detection of the exit", "start of the processes", "first step after a restart",
         "steps computed again", "slower steps, with a checkpoint reported", "slower steps, others"], 0.0
    )
    last, highest, n_unique, n_again, saved = 0.0, 0, 0, 0, False
    killed = detected = resumed = None
    n_kills = 0
    for now, kind, value in events:
        if kind == "kill":
            killed, detected, resumed = now, None, None
            n_kills += 1
            parts["slower steps, others"] += now - last  # The step that the kill cut off.
            last = now
        elif kind == "detected" and killed is not None:
            detected = now
        elif kind == "resumed" and killed is not None:
            resumed = now
        elif kind == "saved":
            saved = True
        elif kind == "step":
            again = value <= highest
            n_unique, n_again, highest = n_unique + (not again), n_again + again, max(highest, value)
            if highest == value == 1:
                parts["first start"] = now - step
            elif killed is not None and detected is None:
                parts["detection of the exit"] -= step  # A step that ended after the kill.
            elif killed is not None:
                resumed = resumed or now
                parts["detection of the exit"] += detected - killed
                parts["start of the processes"] += resumed - detected
                parts["first step after a restart"] += now - resumed - step
                killed = None
            else:
                name = "slower steps, with a checkpoint reported" if saved else "slower steps, others"
                parts[name] += now - last - step
            last, saved = now, False
    parts["steps computed again"] = n_again * step
    useful = n_unique * step
    parts["unexplained"] = end - useful - sum(parts.values())
    return useful, parts, n_kills, n_again


def main():
    args = arguments()
    save = "[{output_dir: $/saves, auto_resume: true, async_save: true, save_total_limit: 3, save_every_n_steps: %d}]"
    before = useful_step(args)
    events, end = in_new_folder(args, save % args.save_every, args.seconds, args.kill_every)
    after = useful_step(args)
    useful, parts, n_kills, n_again = losses(events, end, (before + after) / 2)
    print(f"{end:.0f} s, {n_kills} kills, {n_again} steps again; a useful step: {1000 * before:.2f} ms before, {1000 * after:.2f} ms after")
    print("| part | seconds | share |\n|---|---|---|")
    for name, seconds in {"useful steps": useful, **parts}.items():
        print(f"| {name} | {seconds:.2f} | {100 * seconds / end:.1f} % |")


main()
