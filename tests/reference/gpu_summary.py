#!/usr/bin/env python3
"""Prints the results of `scripts/gpu-check` as tables, from the files of its parts: gpu_summary.py FOLDER"""
import json
import sys
from pathlib import Path

from gpu_batch_invariance import line as invariance_line
from gpu_bench import SIDES, compared, line as step_line
from gpu_ceilings import line as ceiling_line
from gpu_fp8_advice import lines as advice_lines
from gpu_long import line as long_line
from gpu_ops_bench_rows import line as op_line
from gpu_runs import line as run_line
from gpu_where import line as where_line


def read(path):
    """Reads a file; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        print(f"{path.name}: {error}")
        return None


def main():
    out = Path(sys.argv[1])
    of = {name: read(out / f"{name}.json") for name in (
        "parts", "doctor", "first", "runs", "ops-bench", "bench", "tune", "large", "where", "fp8", "fp8-advise", "host", "fp8-steps", "moe-steps",
        "long", "long-2", "ceilings", "small", "h100", "batch-invariant")}
    grouped = {path.stem: read(path) for path in sorted(out.glob("grouped*.json"))}
    for gpu in (of["doctor"] or {}).get("gpus", []):
        print(f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB")
    for part in of["parts"] or []:
        print(f"{part['result']:4} {part['name']} ({part['seconds']} s)")
    for name, found in [*(of["first"] or {}).items(), *(of["runs"] or {}).items()]:
        print(run_line(name, found))
    if of["ops-bench"]:
        print_ops(of["ops-bench"])
    for title, found in [("fp8", of["fp8"]), *grouped.items()]:
        if found:
            print(f"\n{title}:")
            print_ops(found)
    winners = out / "winners.txt"
    if winners.is_file():
        print("\ntiles of CUTLASS that are faster than our kernels:", winners.read_text(), sep="\n", end="")
    for kernels, filter in ((kernels, filter) for filter in ("quantize", "mlp") for kernels in ("shared_memory", "registers", "fused")):
        for number in (1, 2):
            rows = read(out / f"fp8-{kernels}-{filter}-{number}.json")
            if rows:
                print(f"\nFP8 kernels: {kernels}, round {number}", end="")
                print_ops(rows)
    for row in (of["host"] or {}).get("rows", []):
        print(f"host, linear layers of {row['layers']} decoder layers, {row['precision']}: {row['cached_ms']:.2f} ms a step, "
              f"{row['not_cached_ms']:.2f} ms with new descriptors")
    for name, found in (of["fp8-advise"] or {}).items():
        print(*advice_lines(name, found), sep="\n")
    for title in ("bench", "tune", "large", "small", "h100", "fp8-steps", "moe-steps"):
        rows = of[title] or []
        if rows:
            print(f"\n{title}:")
        for row in rows:
            for side in SIDES:
                if side in row:
                    print(step_line(row, side))
        for comparison in compared(rows):
            print(comparison)
    if of["where"]:
        print(f"\ntime by {of['where']['by']}:", *map(where_line, of["where"]["rows"][:25]), sep="\n")
    if of["ceilings"]:
        print("\nceilings of matmuls:", *map(ceiling_line, of["ceilings"]), sep="\n")
    if of["batch-invariant"]:
        print(invariance_line(of["batch-invariant"]))
    for found in (of["long"], of["long-2"]):
        if found:
            print(f"\nlong, {found['layers']} layers:", *map(long_line, found["steps"]), f"end: {found['end'][:300]}", sep="\n")


def print_ops(ops):
    ceilings = ops["ceilings"]
    print(f"\nceilings: copies {ceilings['copy_bytes_per_second'] / 1e9:.0f} GB/s, multiplies "
          f"{ceilings['product_flops_per_second'] / 1e12:.1f} TFLOP/s")
    for row in ops["rows"]:
        print(op_line(row))
    for failed in ops["failed"]:
        print(f"failed: {failed['case']}: {failed['error']}")


if __name__ == "__main__":
    main()
