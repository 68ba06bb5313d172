#!/usr/bin/env python3
"""Computes the loss in FP8 by torch's float8_e4m3fn, forward only, and compares its gap to bf16 with ours.

    trainer preprocess RECIPE --steps 100 --output-format json >batches.jsonl
    trainer train RECIPE output_dir=none optimizer.learning_rate=1e-30 exit_iteration=100
    trainer train RECIPE output_dir=current optimizer.learning_rate=1e-30 exit_iteration=100 precision.recipe=current
    fp8_loss.py MODEL_FOLDER batches.jsonl [--ours none=none/metrics.jsonl current=current/metrics.jsonl]

Such a learning rate changes no weight: each loss of a run is that of the loaded weights. torch quantizes the input and the weight of each linear layer
of the decoder layers, multiplies the values of the codes in f32, and rounds the output to bf16:

    current    a scale per tensor, 448 / amax
    blockwise  a scale per 1x128 elements of inputs and 128x128 of weights, rounded down to a power of two
"""
import argparse
import json

import torch
from transformers import AutoModelForCausalLM

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the values of the codes of x."""
    return (x * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() / scale


def of_tensor(x: torch.Tensor) -> torch.Tensor:
    return rounded(x, LARGEST / x.abs().max())


def of_blocks(x: torch.Tensor, rows: int, columns: int = 128) -> torch.Tensor:
    """Quantizes blocks of a matrix; those at its edges may be smaller."""
    (n, k), pad = x.shape, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)
    padded = torch.nn.functional.pad(x, pad)
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(LARGEST / amax.clamp(min=1e-30)))), 1.0)
    return rounded(blocks, scale).flatten(2, 3).flatten(0, 1)[:n, :k]


QUANTIZATIONS = {
    "current": (of_tensor, of_tensor),
    "blockwise": (lambda x: of_blocks(x, 1), lambda w: of_blocks(w, 128)),
}


class Fp8Linear(torch.nn.Module):
    """A linear layer with rounded operands."""

    def __init__(self, linear: torch.nn.Linear, recipe: str):
        super().__init__()
        self.of_input, of_weight = QUANTIZATIONS[recipe]
        self.weight, self.bias = of_weight(linear.weight.detach().float()), linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.of_input(x.float().flatten(0, -2))
        y = torch.nn.functional.linear(rows, self.weight, None if self.bias is None else self.bias.float())
        return y.to(x.dtype).unflatten(0, x.shape[:-1])


def in_fp8(model: torch.nn.Module, recipe: str) -> int:
    """Replaces the linear layers of the decoder layers, and returns their number."""
    found = [(name, module) for name, module in model.model.layers.named_modules() if isinstance(module, torch.nn.Linear)]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        setattr(model.model.layers.get_submodule(parent), child, Fp8Linear(module, recipe))
    return len(found)


@torch.no_grad()
def losses(model: torch.nn.Module, steps: list) -> list:
    """Returns the mean loss of each step. Sequences are computed one by one."""
    means = []
    for step in steps:
        total = 0.0
        for micro in step["micro_batches"]:
            for begin, end in zip(micro["cu_seqlens"], micro["cu_seqlens"][1:]):
                logits = model(torch.tensor([micro["ids"][begin:end]])).logits[0].float()
                targets = torch.tensor(micro["targets"][begin:end])
                total += torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").item()
        means.append(total / step["n_targets"])
    return means


def mean(numbers: list) -> float:
    return sum(numbers) / len(numbers)


def report(side: str, of_recipes: dict):
    """Prints the mean losses, and the gaps to bf16 with their standard errors."""
    base = of_recipes["none"]
    for recipe, found in of_recipes.items():
        gaps = [fp8 - dense for fp8, dense in zip(found, base, strict=True)]
        error = (sum((gap - mean(gaps)) ** 2 for gap in gaps) / len(gaps) / max(len(gaps) - 1, 1)) ** 0.5
        print(f"{side:>5} {recipe:>10}: loss {mean(found):.4f}, gap {mean(gaps):+.4f} ({error:.4f})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("batches")
    parser.add_argument("--ours", nargs="*", default=[], metavar="RECIPE=METRICS")
    args = parser.parse_args()
    with open(args.batches) as file:
        steps = [json.loads(line) for line in file]
    found = {}
    for recipe in ["none", *QUANTIZATIONS]:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation="eager").eval()
        n_layers = 0 if recipe == "none" else in_fp8(model, recipe)
        print(f"torch {recipe}: {n_layers} linear layers in FP8, {len(steps)} steps", flush=True)
        found[recipe] = losses(model, steps)
    report("torch", found)
    ours = {}
    for named in args.ours:
        recipe, _, path = named.partition("=")
        with open(path) as file:
            records = [json.loads(line) for line in file]
        ours[recipe] = [record["loss"] for record in records if "loss" in record][: len(steps)]
    if ours:
        report("ours", ours)


if __name__ == "__main__":
    main()
