#!/usr/bin/env python3
"""Trains the quickstart's model on the GPU in several configurations and compares them: gpu_runs.py TRAINER OUT.json [--seconds N]

GPU and CPU: in f32 the losses differ by the order of sums only, 1e-4 over the first steps. In bf16 a GPU rounds the gradient
of the logits once more, 2e-2. Two GPU runs: equal bits in f32, and in bf16 with `attn_deterministic` (cuDNN sums dq in the
order in which thread blocks finish). A plain f32 run and each memory mode, and fp16 with loss scaling: losses, and the
final weights by the norm of the difference over the norm of the weights.

OUT is written after each comparison. --device cpu --quick tests the script without a GPU.
"""
import argparse
import array
import json
import math
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ZERO = "deepspeed.zero_optimization"
ON_HOST = "offload_optimizer: {device: cpu}"
# Name, keys, bounds of the losses and of the weights; 0 means the same bits.
MODES = [
    ("recomputed", ["model.activation_checkpoint=full"], 0.0, 0.0),
    ("recomputed but for attention", ["model.activation_checkpoint=selective"], 0.0, 0.0),
    ("activations parked", ["model.activation_checkpoint=offload"], 0.0, 0.0),
    # AdamW on another processor: roots and powers differ in the last bit.
    ("optimizer on the host", [f"{ZERO}={{stage: 1, {ON_HOST}}}"], 1e-4, 1e-3),
    ("half of it", [f"{ZERO}={{stage: 1, offload_optimizer: {{device: cpu, ratio: 0.5}}}}"], 1e-4, 1e-3),
    ("weights on the host", [f"{ZERO}={{stage: 3, {ON_HOST}, offload_param: {{device: cpu}}}}"], 1e-4, 1e-3),
    # A loss scale without overflows: no step is skipped, and each equals the plain run except for rounding.
    ("fp16", ["model.dtype=fp16", "deepspeed.fp16={initial_scale_power: 8}"], 2e-2, 5e-2),
]
# A loss scale with which the first steps overflow in fp16: they are skipped, and training continues.
OVERFLOWING_POWER = 20
OVERFLOWS = ["model.dtype=fp16", f"deepspeed.fp16={{initial_scale_power: {OVERFLOWING_POWER}, hysteresis: 1}}"]

args = argparse.Namespace()


class Trained:
    """A run: its losses by step, what the last step said of skipped ones, and the file of its weights."""

    def __init__(self, folder: Path, name: str, device: str, keys: list[str]):
        run = folder / name.replace(" ", "-")
        saves = f"checkpoint=[{{type: huggingface, output_dir: {run}/model, save_end_of_training: true}}]"
        fixed = [f"device={device}", f"train_iters={args.steps}", f"output_dir={run}", saves, "generate=null",
                 "train_log_iter_interval=1", "eval_interval=1000", "eval_on_start=false",
                 f"data.cache_dir={folder / 'cache'}"]
        small = ["model.config.num_hidden_layers=1", "model.config.intermediate_size=128", "data.max_length=128",
                 "data.sources=[recipes/quickstart/eval.jsonl]", "data.eval_sources=[]"] if args.quick else []
        # The trainer accepts a key once; the last one counts.
        last = {key.split("=")[0]: key for key in ["model.dtype=f32", *fixed, *small, *keys]}
        command = [args.trainer, "-q", "train", "recipes/quickstart.yaml", *last.values()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(args.end - time.monotonic(), 1))
        if done.returncode != 0:
            raise RuntimeError(f"{name}: {done.stderr.strip()[-500:]}")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        self.losses = [record["loss"] for record in records if "loss" in record]
        self.records = records
        self.weights = next(run.glob("model/**/*.safetensors"))


def numbers(path: Path) -> array.array:
    """All numbers of a safetensors file in f32, in the order of the file."""
    data = path.read_bytes()
    (n_header,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n_header])
    formats = {tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"}
    body = data[8 + n_header:]
    if formats == {"F32"}:
        return array.array("f", body)
    if formats == {"F16"}:
        return array.array("f", [number for (number,) in struct.iter_unpack("<e", body)])
    raise RuntimeError(f"{path}: weights in {formats}")


def worst_difference(want: list[float], got: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(want, got, strict=True))


def distance(want: Path, got: Path) -> float:
    a, b = numbers(want), numbers(got)
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / sum(x * x for x in a))


def compared(folder: Path, name: str, keys: list[str], bound: float, repeats: bool) -> dict:
    """The same run on the CPU and on the device, there twice if its bits are to be the same."""
    cpu, gpu = Trained(folder, f"{name} cpu", "cpu", keys), Trained(folder, f"{name} gpu", args.device, keys)
    difference = worst_difference(cpu.losses, gpu.losses)
    found = {"cpu": cpu.losses, "gpu": gpu.losses, "worst_relative_difference": difference, "bound": bound,
             "ok": difference <= bound}
    if repeats:
        again = Trained(folder, f"{name} again", args.device, keys)
        found["repeats_to_the_bit"] = again.losses == gpu.losses
        found["ok"] &= found["repeats_to_the_bit"]
    return found


def mode(folder: Path, plain: Trained, name: str, keys: list[str], bound: float, bound_of_weights: float) -> dict:
    other = Trained(folder, name, args.device, keys)
    difference, of_weights = worst_difference(plain.losses, other.losses), distance(plain.weights, other.weights)
    return {"gpu": other.losses, "worst_relative_difference": difference, "bound": bound,
            "weights_differ_by": of_weights, "bound_of_weights": bound_of_weights,
            "ok": difference <= bound and of_weights <= bound_of_weights}


def overflows(folder: Path) -> dict:
    """Steps whose gradients overflow are skipped, as many as it takes to halve the scale until it fits."""
    run = Trained(folder, "overflow", args.device, OVERFLOWS)
    scales = [2.0**OVERFLOWING_POWER] + [record["loss_scale"] for record in run.records if "loss_scale" in record]
    n_halved = sum(later == earlier / 2 for earlier, later in zip(scales, scales[1:]))
    return {"gpu": run.losses, "loss_scales": scales,
            "ok": 0 < n_halved < len(scales) - 1 and run.losses[-1] < run.losses[0]}


def line(name: str, found: dict) -> str:
    if "error" in found:
        return f"{name}: {found['error']}"
    if "loss_scales" in found:
        return f"{name}: scales {found['loss_scales'][0]:.0f} to {found['loss_scales'][-1]:.0f}{verdict(found)}"
    text = f"{name}: losses differ by {found['worst_relative_difference']:.1e} at most, bound {found['bound']:.0e}"
    if "weights_differ_by" in found:
        text += f", weights by {found['weights_differ_by']:.1e}, bound {found['bound_of_weights']:.0e}"
    if "repeats_to_the_bit" in found:
        text += ", the same twice" if found["repeats_to_the_bit"] else ", NOT the same twice"
    return text + verdict(found)


def verdict(found: dict) -> str:
    return "" if found["ok"] else "  FAIL"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("trainer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--parts", help="the names of the comparisons to make, separated by commas; default all")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps, to try the script")
    parser.parse_args(namespace=args)
    args.steps, args.end = (12 if args.quick else 20), time.monotonic() + args.seconds
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exact = ["model.dtype=bf16", "model.attn_deterministic=true"]
        parts = {
            "f32": lambda: compared(folder, "f32", [], 1e-4, repeats=True),
            "bf16, deterministic": lambda: compared(folder, "exact", exact, 2e-2, repeats=True),
            "bf16": lambda: compared(folder, "bf16", ["model.dtype=bf16"], 2e-2, repeats=False),
        }
        plain = []

        def with_plain(*of_mode):
            if not plain:
                plain.append(Trained(folder, "plain", args.device, []))
            return mode(folder, plain[0], *of_mode)
        for of_mode in MODES:
            parts[of_mode[0]] = lambda of_mode=of_mode: with_plain(*of_mode)
        parts["fp16 that overflows"] = lambda: overflows(folder)
        wanted = args.parts.split(",") if args.parts else list(parts)
        for name, run in ((name, parts[name]) for name in wanted):
            try:
                if args.end - time.monotonic() < 5:
                    raise TimeoutError("no time was left")
                found[name] = run()
            except Exception as error:  # The other parts still run.
                found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
            print(line(name, found[name]), flush=True)
            args.out.write_text(json.dumps(found, indent=1))
    return 0 if all(part["ok"] for part in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
