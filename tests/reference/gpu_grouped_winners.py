#!/usr/bin/env python3
"""Prints the cases in which a tile of CUTLASS is faster than our kernels: gpu_grouped_winners.py FOLDER

FOLDER has grouped.json and grouped-TILE.json, the results of `scripts/gpu-check --parts grouped`. A tile is faster if its slowest batch
took less time than the fastest batch of our kernels. The lines are those of candle-ext/ops/src/moe/grouped_linear/winners.txt. A program
also reads them from the file winners.txt in the folder of its tiles.
"""
import json
import sys
import time
from pathlib import Path

OPS = {"grouped_linear": ("y", "bf16"), "grouped_linear dx": ("dx", "bf16"), "grouped_linear dw": ("dw", "f32")}


def cases(path: Path, implementation: str) -> dict:
    """Returns the rows of an implementation in a file of ops-bench by output, dtype, rows of a group, inputs and outputs."""
    found = {}
    for row in json.loads(path.read_text())["rows"]:
        if (" cutlass" in row["op"]) == (implementation == "cutlass"):
            output = OPS.get(row["op"].replace(" cutlass", ""))
            if output:
                t, k, n, e = (row["shape"][name] for name in "tkne")
                mean = -(-t // e)
                found[*output, 1 << (mean - 1).bit_length(), k, n] = row
    return found


def winners(folder: Path) -> list[str]:
    """Returns a line for each case in which a tile is faster, with the fastest tile."""
    path = folder / "grouped.json"
    gpu, fused = json.loads(path.read_text())["device"], cases(path, "fused")
    best = {}
    for path in sorted(folder.glob("grouped-*.json")):
        tile = json.loads(path.read_text())["tile"]
        if not tile:
            continue
        for case, row in cases(path, "cutlass").items():
            ours = fused.get(case)
            if not ours:
                print(f"{path.name}: no row of our kernels for {' '.join(map(str, case))}", file=sys.stderr)
            elif row["ms_max"] < ours["ms_min"] and (case not in best or row["ms"] < best[case][1]["ms"]):
                best[case] = tile, row, ours
    date = time.strftime("%Y-%m-%d")
    return [" ".join(map(str, (*case, tile, round(row["tflop_s"]), round(ours["tflop_s"]), date, gpu)))
            for case, (tile, row, ours) in sorted(best.items())]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lines = winners(Path(sys.argv[1]))
    print(*(lines or ["# No tile is faster than our kernels."]), sep="\n")


if __name__ == "__main__":
    main()
