#!/usr/bin/env python3
"""Times TransformerEngine's linear layers beside ours in FP8: gpu_te_bench.py FP8.json [--seconds N] [--quick]

FP8.json is the output of `ops-bench --fp8 --json`. The script adds TransformerEngine's time to the rows of linear layers and
MLPs, and rewrites the file. Both sides quantize inputs and gradients in each run, and weights once, in TransformerEngine's default
formats: E4M3 with E5M2 gradients, and E4M3 alone with blockwise scaling, whose scales are powers of two. Where TransformerEngine is not
installed, the script says so and changes nothing.
"""
import argparse
import json
import statistics
import sys
import time
from pathlib import Path

# Recipe of our rows, and the name of its class in transformer_engine.common.recipe.
RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
# Parts of a layer in our rows: forward, the gradient of the input, and that of the weight.
PARTS = {"": "forward", " dx": "dx", " dw": "dw"}


def libraries():
    """Returns torch, transformer_engine.pytorch and its recipes; None if they cannot be imported."""
    try:
        import torch
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name not in ("torch", "transformer_engine"):
            raise
        print(f"{name} is not installed: TransformerEngine was not timed")
        return None
    return torch, te, recipe


def recipe_of(recipe, name):
    if name == "delayed":
        return recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=1024, amax_compute_algo="max")
    # Defaults of other releases would change what is timed.
    fp8_format = recipe.Format.E4M3 if name == "block" else recipe.Format.HYBRID
    return getattr(recipe, RECIPES[name])(fp8_format=fp8_format)


class Bench:
    """Runs of one layer. A run returns nothing."""

    def __init__(self, torch, te, fp8_recipe, quick):
        self.torch, self.te, self.fp8_recipe = torch, te, fp8_recipe
        self.batch_ms, self.n_batches = (1, 3) if quick else (25, 7)

    def randn(self, *shape, grad=False):
        return self.torch.randn(shape, device="cuda", dtype=self.torch.bfloat16, requires_grad=grad)

    def forward_of(self, module):
        """Returns a forward that quantizes the weight in its first call alone."""
        # Newer releases call fp8_autocast autocast.
        if hasattr(self.te, "fp8_autocast"):
            autocast = lambda: self.te.fp8_autocast(enabled=True, fp8_recipe=self.fp8_recipe)
        else:
            autocast = lambda: self.te.autocast(enabled=True, recipe=self.fp8_recipe)
        is_first = [True]

        def forward(x):
            with autocast():
                y = module(x, is_first_microbatch=is_first[0])
            is_first[0] = False
            return y
        return forward

    def milliseconds(self, run):
        def batch(n):
            begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.torch.cuda.synchronize()
            begin.record()
            for _ in range(n):
                run()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / n
        batch(3)
        n = min(max(round(self.batch_ms / max(batch(3), 1e-6)), 1), 10_000)
        return statistics.median(batch(n) for _ in range(self.n_batches))

    def part(self, module, t, k, n, part):
        """Returns the milliseconds of a forward, or of a backward without its forward."""
        for weight in module.parameters():
            weight.requires_grad_(part in ("dw", "backward"))
            weight.grad = None
        x = self.randn(t, k, grad=part in ("dx", "backward"))
        forward = self.forward_of(module)
        if part == "forward":
            def alone():
                with self.torch.no_grad():
                    forward(x)
            return self.milliseconds(alone)
        dy = self.randn(t, n)

        def both():
            forward(x).backward(dy)
            x.grad = None
        return self.milliseconds(both) - self.milliseconds(lambda: forward(x))

    def linear(self, t, k, n, part):
        return self.part(self.te.Linear(k, n, bias=False, params_dtype=self.torch.bfloat16, device="cuda"), t, k, n, part)

    def mlp(self, t, d, f, part):
        """Times LayerNormMLP, with an RMSNorm as ours."""
        module = self.te.LayerNormMLP(d, f, bias=False, normalization="RMSNorm", activation="swiglu",
                                      params_dtype=self.torch.bfloat16, device="cuda")
        return self.part(module, t, d, d, part)


def timed(bench, row):
    """Returns the milliseconds of a row of ours; None for a row without a counterpart."""
    _, name, *rest = row["op"].split(" ", 2)
    rest = "".join(f" {word}" for word in rest)
    shape = row["shape"]
    if rest == " mlp":
        return bench.mlp(shape["t"], shape["d"], shape["f"], row["what"])
    if rest in PARTS:
        return bench.linear(shape["t"], shape["k"], shape["n"], PARTS[rest])
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="output of ops-bench --fp8 --json; it is rewritten")
    parser.add_argument("--seconds", type=float, default=120, help="no row begins later")
    parser.add_argument("--quick", action="store_true", help="short batches, for a trial run")
    arguments = parser.parse_args()
    found = libraries()
    if found is None:
        return 0
    torch, te, recipe = found
    ours, end, failures = json.loads(arguments.rows.read_text()), time.monotonic() + arguments.seconds, 0
    for row in ours["rows"]:
        name = row["op"].split(" ")[1] if row["op"].startswith("fp8 ") else ""
        if name not in RECIPES:
            continue
        if time.monotonic() > end:
            print("no time was left for the other rows")
            break
        try:
            ms = timed(Bench(torch, te, recipe_of(recipe, name), arguments.quick), row)
        except Exception as error:  # The row has no time, and the others follow.
            row["te_failed"], failures = f"{type(error).__name__}: {error}"[:300], failures + 1
            print(f"{row['op']} {row['what']}: {row['te_failed']}")
            continue
        if ms is not None:
            row["te_ms"] = ms
            print(f"{row['op']:18} {row['what']:8} {row['shape']}: ours {row['ms']:.4f} ms, TransformerEngine {ms:.4f} ms "
                  f"({ms / row['ms']:.2f}x)")
        torch.cuda.empty_cache()
    ours["transformer_engine"] = getattr(te, "__version__", None) or sys.modules["transformer_engine"].__version__
    arguments.rows.write_text(json.dumps(ours, indent=2))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
