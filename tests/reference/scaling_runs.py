"""Measures the cost of each parallel strategy on this machine: scaling_runs.py LAUNCH TRAINER FOLDER [--quick]

Each strategy trains a few steps of SmolLM2-135M's shape on ranks with one thread each, with `--profile`, and gives a row of rank 0's
numbers: time per step, bytes sent, duration of the collectives, time that the computing thread waited for them, and the
fraction of communication that was overlapped. The first step is included.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

SHAPE = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}
# Heads that two ranks can split: 8 of 64 instead of 9, in all rows, for tensor parallelism and Ulysses.
SHAPE |= {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
STEPS = 3
ZERO = "deepspeed.zero_optimization.stage="
# Name, recipe keys, and micro-batches per rank and step.
STRATEGIES = [
    ("replicas", [], 2),
    ("ZeRO 1", [ZERO + "1"], 2),
    ("ZeRO 2", [ZERO + "2"], 2),
    ("ZeRO 3", [ZERO + "3"], 2),
    ("tensor, tokens in parts", ["tensor_parallel_size=2"], 4),
    ("tensor, all tokens", ["tensor_parallel_size=2", "sequence_parallel=false"], 4),
    ("pipeline, 1F1B", ["pipeline_parallel_size=2"], 4),
    ("pipeline, two runs a stage", ["pipeline_parallel_size=2", "virtual_pipeline_parallel_size=2"], 4),
    ("Ulysses", ["sequence_parallel_size=2"], 4),
    ("ring", ["context_parallel_size=2"], 4),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("launch"), parser.add_argument("trainer"), parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="two layers, to try the script")
    asked = parser.parse_args()
    shape = SHAPE | ({"num_hidden_layers": 2, "vocab_size": 1024} if asked.quick else {})
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"After {i} comes {i + 1}, and before it {i - 1}.\n" for i in range(4000)]
    (folder / "text.txt").write_text("".join(lines))
    print("| ranks share | s a step | MB sent | s under way | s waited | of the step | hidden |")
    print("|---|---|---|---|---|---|---|")
    for name, keys, micros in STRATEGIES:
        print(row(name, measure(asked, folder, shape, keys, micros)), flush=True)


def measure(asked, folder: Path, shape: dict, keys: list, micros: int) -> dict:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    root = Path(__file__).resolve().parents[2]
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps({
        "type": "causal", "device": "cpu", "output_dir": str(run), "train_iters": STEPS,
        "model": {"dtype": "f32", "config": shape},
        "tokenizer": {"name_or_path": str(root / "recipes/quickstart/tokenizer")},
        "data": {"sources": [str(folder / "text.txt")], "max_length": 512, "truncation": "split",
                 "cache_dir": str(folder / "cache")},
        "scheduler": {"name": "constant"}, "checkpoint": "none",
    }))
    command = [asked.launch, "--standalone", "--nproc-per-node", "2", "--", asked.trainer, "-q", "train", str(recipe),
               f"gradient_accumulation_steps={micros}", *keys, "--profile", "tottime"]
    subprocess.run(command, check=True, env=dict(os.environ, RAYON_NUM_THREADS="1", HF_HUB_OFFLINE="1"),
                   stderr=subprocess.DEVNULL)
    return read(run / "profile.txt")


def read(table: Path) -> dict:
    sums = {"step": 0.0, "sent": 0.0, "exchange": 0.0, "wait": 0.0}
    for line in table.read_text().splitlines()[1:-1]:
        _, _, _, cumtime, name = line.split(maxsplit=4)
        sent = re.search(r", ([\d.]+) MB sent$", name)
        name = name.split(",")[0]
        if name.startswith("world "):
            continue
        kind = name.rsplit(" ", 1)[-1]
        if kind in sums:
            sums[kind] += float(cumtime) / STEPS
        sums["sent"] += float(sent[1]) / STEPS if sent else 0
    return sums


def row(name: str, sums: dict) -> str:
    hidden = 1 - sums["wait"] / sums["exchange"] if sums["exchange"] else 0
    numbers = [f"{sums['step']:.2f}", f"{sums['sent']:.1f}", f"{sums['exchange']:.2f}", f"{sums['wait']:.2f}",
               f"{100 * sums['wait'] / sums['step']:.1f} %", f"{100 * max(0, hidden):.0f} %"]
    return f"| {name} | " + " | ".join(numbers) + " |"


if __name__ == "__main__":
    main()
