#!/usr/bin/env python3
"""Plots losses and the load of the busiest expert over a run: moe_plot.py LABEL=METRICS.jsonl [...] OUT.svg

Reads the records of steps and evaluations in metrics.jsonl. A run without experts has losses alone. Needs matplotlib.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "moe"
import matplotlib.pyplot as plt


def main() -> None:
    *runs, out = sys.argv[1:]
    figure, (loss, load) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    loss.set(title="held-out loss", xlabel="step")
    load.set(title="tokens of the busiest expert over the mean", xlabel="step", yscale="log")
    for run in runs:
        label, path = run.split("=", 1)
        records = [json.loads(line) for line in Path(path).read_text().splitlines()]
        losses = [(record["iter"], record["loss/eval"]) for record in records if "loss/eval" in record]
        (line,) = loss.plot(*zip(*losses), "o-", markersize=3, label=label)
        loads = [(record["iter"], record["expert_load"]["max_over_mean"]) for record in records if record.get("expert_load")]
        if loads:
            load.plot(*zip(*loads), color=line.get_color(), label=label)
    load.set_yticks([1, 2, 3, 4, 6, 8], ["1", "2", "3", "4", "6", "8"])
    load.minorticks_off()
    for axes in loss, load:
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
