#!/usr/bin/env python3
"""Prints what `scripts/gpu-check OUT` found, from the files that it left: gpu_summary.py OUT"""
import json
import sys
from pathlib import Path

from gpu_bench import SIDES, line as step_line
from gpu_ops_bench_rows import line as op_line
from gpu_runs import line as run_line


def read(path):
    """None of a file that is not there, or that its part did not finish."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        print(f"{path.name}: {error}")
        return None


def main():
    out = Path(sys.argv[1])
    parts, doctor, runs, ops, steps = (
        read(out / f"{name}.json") for name in ("parts", "doctor", "runs", "ops-bench", "bench"))
    for gpu in (doctor or {}).get("gpus", []):
        print(f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB")
    for part in parts or []:
        print(f"{part['result']:4} {part['name']} ({part['seconds']} s)")
    for name, found in (runs or {}).items():
        print(run_line(name, found))
    if ops:
        ceilings = ops["ceilings"]
        print(f"\nceilings: copies {ceilings['copy_bytes_per_second'] / 1e9:.0f} GB/s, multiplies "
              f"{ceilings['product_flops_per_second'] / 1e12:.1f} TFLOP/s")
        for row in ops["rows"]:
            print(op_line(row))
        for failed in ops["failed"]:
            print(f"failed: {failed['case']}: {failed['error']}")
    print()
    for row in steps or []:
        for side in SIDES:
            if side in row:
                print(step_line(row, side))


if __name__ == "__main__":
    main()
