#!/usr/bin/env python3
"""Runs `trainer fp8-advise` on the 4B and 8B shapes: gpu_fp8_advice.py TRAINER OUT.json [--seconds N] [--quick]

It prints the layers that are slower in FP8 with each recipe, which a run with precision.exclude_slower_modules keeps in bf16.
"""
import json
import sys
import tempfile
import time
from pathlib import Path

from gpu_bench import argument_parser, call, recipe_of
from gpu_shapes import BASES, TINY


def advice_of(args, config: dict, keys: dict, seconds: float) -> list:
    """Returns the advice of each recipe for micro-batches of one row."""
    length = 64 if args.quick else 4096
    job = {"config": {**config, **TINY} if args.quick else config, "keys": keys, "device": args.device, "length": length,
           "rows": 1, "micro_batch_size": 1, "steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(job, "none", Path(folder), [])
        return json.loads(call([args.trainer, "-q", "fp8-advise", str(recipe), "--json"], seconds))


def timed(one: dict) -> list:
    """Returns name and speed-up of each MLP, each group of layers that read one tensor, and each other layer."""
    named = [(f"MLP {row['hidden_size']} x {row['intermediate_size']}", row) for row in one["mlps"]]
    named += [(f"{'+'.join(map(str, row['n_out']))} x {row['n_in']}", row) for row in one["shared_inputs"]]
    named += [(f"{row['n_out']} x {row['n_in']}", row) for row in one["sizes"]]
    return [(name, row["dense_ms"] / row["fp8_ms"]) for name, row in named]


def lines(name: str, advice: list) -> list:
    """Returns a line for each recipe: the least and the largest speed-up, and what is slower."""
    found = []
    for one in advice:
        speed_ups = timed(one)
        slower = [size for size, speed_up in speed_ups if speed_up <= 1]
        least, most = (choose(speed_up for _, speed_up in speed_ups) for choose in (min, max))
        found.append(f"fp8-advise {name} {one['recipe']}: {least:.2f} to {most:.2f} times as fast as {one['dtype']}; "
                     f"slower: {', '.join(slower) or 'none'}")
    return found


def main() -> int:
    args = argument_parser(60).parse_args()
    end, all_advice = time.monotonic() + args.seconds, {}
    for name, case in BASES.items():
        all_advice[name] = advice_of(args, case.config, case.keys, max(end - time.monotonic(), 1))
        print(*lines(name, all_advice[name]), sep="\n", flush=True)
        args.out.write_text(json.dumps(all_advice, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
