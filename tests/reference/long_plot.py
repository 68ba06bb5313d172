#!/usr/bin/env python3
"""Plots time and memory of a step over the sequence length: long_plot.py BENCH.json [BENCH.json ...] OUT.svg

Reads the output of `scripts/bench cpu --only selective --json FILE`. A line of a later file replaces one of an earlier file
with that name. Needs matplotlib.
"""

import json
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "long"
import matplotlib.pyplot as plt

NAME = re.compile(r"train 4 layers 1x(\d+) selective")


def main() -> None:
    *files, out = sys.argv[1:]
    by_name = {result["name"]: result for file in files for result in json.loads(Path(file).read_text())}
    points = sorted((int(found[1]), result) for name, result in by_name.items() if (found := NAME.fullmatch(name)))
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, title in (time, "seconds a step"), (memory, "peak memory of the process, GiB"):
        axes.set(title=title, xscale="log", yscale="log", xlabel="tokens of the sequence")
        axes.set_xticks([length for length, _ in points], [f"{length // 1024}K" for length, _ in points])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    for who, speed, rss in ("candlewick", "ours", "rss_mib"), ("torch", "peer", "peer_rss_mib"):
        seen = [(length, result) for length, result in points if result[speed] is not None]
        lengths = [length for length, _ in seen]
        time.plot(lengths, [length / result[speed] for length, result in seen], "o-", label=who)
        memory.plot(lengths, [result[rss] / 1024 for _, result in seen], "o-", label=who)
    for axes in time, memory:
        low, high = axes.get_ylim()
        ticks = [10**e * step for e in range(-2, 5) for step in (1, 2, 5) if low <= 10**e * step <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    time.legend()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
