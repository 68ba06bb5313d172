#!/usr/bin/env python3
"""Compares the log-probabilities of requests alone and in batches, and times batch invariance:
gpu_batch_invariance.py TRAINER EVALUATOR OUT.json [--device cuda] [--quick] [--seconds N]

A short run of the quickstart in bf16 makes the model. `evaluator answer` scores the same requests in batches of 1 and of 16, with and
without `--deterministic batch_invariant`. With it, the bits must be equal. OUT has the seconds of each command and the number of
responses that differ.
"""
import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCHES = ("1", "16")
MODES = ("none", "batch_invariant")
WORDS = "one two three four five six seven eight nine ten".split()


def requests(n: int) -> list[dict]:
    """Requests of different lengths, some with a shared context."""
    texts = [" ".join(WORDS[(i + j) % 10] for j in range(3 + 5 * (i % 7))) for i in range(n)]
    return [{"type": "loglikelihood", "context": texts[i - i % 2], "continuation": f" {WORDS[i % 10]} {WORDS[i % 3]}"}
            for i in range(n)]


def line(found: dict) -> str:
    if "error" in found:
        return f"batch invariance: {found['error']}"
    seconds = " ".join(f"{name} {value:.2f} s" for name, value in found["seconds"].items())
    differing = ", ".join(f"{n} with {mode}" for mode, n in found["differing"].items())
    verdict = "ok" if found["ok"] else "WRONG"
    return f"batch invariance: {verdict}; of {found['n_requests']} responses differ {differing}; {seconds}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer")
    parser.add_argument("evaluator")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds

    def call(command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(end - time.monotonic(), 1))
        if done.returncode != 0:
            raise RuntimeError(f"{command[1]}: {done.stderr.strip()[-500:]}")
        return done.stdout

    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = requests(8 if args.quick else 256)
        (folder / "requests.jsonl").write_text("".join(json.dumps(request) + "\n" for request in asked))
        small = ["model.config.num_hidden_layers=1", "model.config.intermediate_size=128"] if args.quick else []
        saves = f"checkpoint=[{{type: huggingface, output_dir: {folder}/model, save_end_of_training: true}}]"
        try:
            call([args.trainer, "-q", "train", "recipes/quickstart.yaml", f"device={args.device}", "train_iters=2", saves,
                  "model.dtype=bf16", f"output_dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}", "generate=null",
                  "eval_interval=1000", "eval_on_start=false", *small])
            answers, seconds = {}, {}
            for mode in MODES:
                for batch in BATCHES:
                    began = time.monotonic()
                    said = call([args.evaluator, "answer", str(folder / "requests.jsonl"), "-M", str(folder / "model/latest"),
                                 "--device", args.device, "--dtype", "bfloat16", "--deterministic", mode, "--batch-size", batch])
                    seconds[f"{mode}/{batch}"] = time.monotonic() - began
                    answers[mode, batch] = said.splitlines()
            differing = {mode: sum(a != b for a, b in zip(*(answers[mode, batch] for batch in BATCHES), strict=True))
                         for mode in MODES}
            found = {"n_requests": len(asked), "seconds": seconds, "differing": differing,
                     "ok": differing["batch_invariant"] == 0}
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found = {"error": str(error)[:1000], "ok": False}
    args.out.write_text(json.dumps(found, indent=1))
    print(line(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
