#!/usr/bin/env python3
"""Lists the kernels of training steps by time: gpu_where.py TRAINER OUT.json [--seconds N]

The model has the shape of SmolLM2-1.7B with four layers, on rows of 4096 tokens. With Nsight Compute (ncu) the times are
those of the kernels. Without it they are those of the trainer's spans, and the host waits for each kernel (CUDA_LAUNCH_BLOCKING).
OUT holds {"by": "kernel" or "span", "rows": [{"name", "calls", "seconds", "share"}]}, the longest first.
"""
import csv
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from gpu_bench import argument_parser, call, recipe_of, words
from gpu_shapes import CASES, TINY

METRIC = "gpu__time_duration.sum"
SECONDS = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "s": 1.0, "second": 1.0}


def by_kernel(said: str) -> dict:
    """Sums the rows of ncu's raw page in CSV: a header, the units, then a line for each launch."""
    lines = said.splitlines()
    start = next((i for i, line in enumerate(lines) if '"Kernel Name"' in line), None)
    if start is None:
        raise RuntimeError("ncu printed no table: " + " | ".join(lines[-5:]))
    rows = list(csv.DictReader(lines[start:]))
    unit = SECONDS[rows[0][METRIC]]
    found = {}
    for row in rows[1:]:
        calls, seconds = found.get(row["Kernel Name"], (0, 0.0))
        found[row["Kernel Name"]] = (calls + 1, seconds + float(row[METRIC].replace(",", "")) * unit)
    return found


def by_span(table: str) -> dict:
    """Reads the table of the trainer's profile: calls, own time, share, cumulative time, name."""
    found = {}
    for line in table.splitlines()[1:]:
        fields = line.split(None, 4)
        if len(fields) == 5 and fields[0].isdigit():
            found[fields[4]] = (int(fields[0]), float(fields[1]))
    return found


def measure(trainer: str, recipe: Path, seconds: float) -> tuple[str, dict]:
    command = [trainer, "-q", "train", str(recipe)]
    if shutil.which("ncu"):
        ncu = ["ncu", "--csv", "--page", "raw", "--metrics", METRIC, "--clock-control", "none"]
        return "kernel", by_kernel(call(ncu + command, seconds))
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    call([*command, "--profile", "tottime"], seconds)
    return "span", by_span((recipe.parent / "run/profile.txt").read_text())


def line(row: dict) -> str:
    return f"{row['share']:6.1%} {row['seconds'] * 1e3:10.2f} ms {row['calls']:6} calls  {row['name'][:110]}"


def main() -> int:
    args = argument_parser(90).parse_args()
    length, steps = (64, 2) if args.quick else (4096, 3)
    config = {**CASES["SmolLM2-1.7B"].config, **(TINY if args.quick else {}), "num_hidden_layers": 4}
    job = {"config": config, "keys": {}, "device": args.device, "length": length, "rows": 2, "micro_batch_size": 1,
           "steps": steps}
    with tempfile.TemporaryDirectory() as name:
        recipe = recipe_of(job, "none", Path(name), [words(length * 2 * steps)])
        by, found = measure(args.trainer, recipe, args.seconds)
    whole = sum(seconds for _, seconds in found.values())
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    rows = [{"name": name, "calls": calls, "seconds": seconds, "share": seconds / whole if whole else 0.0}
            for name, (calls, seconds) in ordered]
    args.out.write_text(json.dumps({"by": by, "rows": rows}, indent=1))
    for row in rows[:25]:
        print(line(row))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
