#!/usr/bin/env python3
"""Trains an 8B model on ever longer sequences until memory or time ends: gpu_long.py TRAINER OUT.json [--seconds N]

One process takes one step at each length, so the model is created once. As in ArcticTraining's recipes for one GPU, layer
inputs and the optimizer are offloaded to the host, MLPs are tiled, and weights, gradients and moments are bf16. With --optimizer
device the host has the layer inputs alone. --layers limits the model: the memory of a layer at a length follows from few of them. OUT
holds the steps in order, with tokens, seconds, tokens/s and bytes in use, the model's layers, and the end of the run.
"""
import json
import sys
import tempfile
from pathlib import Path

from gpu_bench import argument_parser, call, recipe_of, step_records, words
from gpu_shapes import GIB, LLAMA_8B, TINY

LENGTHS = "8,16,32,64,96,128,192,256,384,512"
BF16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def keys(optimizer: str) -> dict:
    """Returns the recipe's keys; the optimizer is on the device or on the host."""
    offload = {"offload_optimizer": {"device": "cpu"}} if optimizer == "host" else {}
    return {
        "tiled_mlp_compute": True,
        "data": {"order": "sequential", "pack_samples": False, "truncation": "truncate"},
        "deepspeed": {"bf16": BF16, "zero_optimization": {"stage": 1, **offload}},
    }


def steps_of(run: Path) -> list:
    return [{"tokens": round(record["seqlen"]), "seconds": record["step_time"],
             "tokens_per_second": record["tokens_per_second"], "used_bytes": record.get("gpu_used_bytes") or 0}
            for record in step_records(run)]


def line(step: dict) -> str:
    return (f"{step['tokens']:8} tokens  {step['tokens_per_second']:9,.0f} tokens/s  {step['seconds']:7.2f} s  "
            f"{step['used_bytes'] / GIB:6.1f} GiB")


def main() -> int:
    parser = argument_parser(300)
    parser.description = __doc__
    parser.add_argument("--lengths", help="lengths in units of 1024 tokens; of 4 tokens with --quick")
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--optimizer", choices=("host", "device"), default="host")
    args = parser.parse_args()
    unit, default = (4, "16,32,64") if args.quick else (1024, LENGTHS)
    lengths = [unit * int(n) for n in (args.lengths or default).split(",")]
    layers = {"num_hidden_layers": args.layers}
    config = {**LLAMA_8B, **layers, **(TINY if args.quick else {}), "max_position_embeddings": 2 * max(lengths)}
    job = {"config": config, "keys": keys(args.optimizer), "device": args.device, "length": max(lengths), "rows": 1,
           "micro_batch_size": 1, "steps": len(lengths)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A number of six digits has about seven tokens.
        recipe = recipe_of(job, "offload", folder, [words(length // 7) for length in lengths])
        try:
            call([args.trainer, "-q", "train", str(recipe)], args.seconds)
            end = "all lengths were trained"
        except (RuntimeError, TimeoutError) as error:
            end = str(error)[:2000]
        steps = steps_of(folder / "run")
    args.out.write_text(json.dumps({"layers": config["num_hidden_layers"], "steps": steps, "end": end}, indent=1))
    for step in steps:
        print(line(step))
    print(f"end: {end[:300]}")
    return 0 if steps else 1


if __name__ == "__main__":
    sys.exit(main())
