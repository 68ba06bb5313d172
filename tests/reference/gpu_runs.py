#!/usr/bin/env python3
"""Trains the quickstart's model on the CPU and on the GPU and compares the losses: gpu_runs.py TRAINER OUT.json

In f32 the two differ by the order of sums only: 1e-4 over the first steps. In bf16 a GPU rounds the gradient of the
logits once more: 2e-2.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 20


def losses(trainer: str, folder: Path, device: str, dtype: str) -> list[float]:
    run = folder / f"{device}-{dtype}"
    keys = [f"device={device}", f"model.dtype={dtype}", f"train_iters={STEPS}", f"output_dir={run}",
            "checkpoint=[]", "generate=null", "train_log_iter_interval=1", "eval_interval=20",
            f"data.cache_dir={folder / 'cache'}"]
    subprocess.run([trainer, "-q", "train", "recipes/quickstart.yaml", *keys], check=True)
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def main() -> int:
    trainer, out = sys.argv[1], Path(sys.argv[2])
    found, worst = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype, bound in [("f32", 1e-4), ("bf16", 2e-2)]:
            cpu, gpu, again = (losses(trainer, Path(folder) / str(i), device, dtype)
                               for i, device in enumerate(["cpu", "cuda", "cuda"]))
            difference = max(abs(a - b) / abs(a) for a, b in zip(cpu, gpu, strict=True))
            found[dtype] = {"cpu": cpu, "gpu": gpu, "worst_relative_difference": difference, "bound": bound,
                            "repeats_to_the_bit": gpu == again}
            worst[dtype] = difference <= bound and gpu == again
            print(f"{dtype}: worst relative difference {difference:.2e} (bound {bound:.0e}), "
                  f"{'the same twice' if gpu == again else 'NOT the same twice'}")
    out.write_text(json.dumps(found, indent=1))
    return 0 if all(worst.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
