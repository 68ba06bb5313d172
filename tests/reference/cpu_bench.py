#!/usr/bin/env python3
"""Times training steps on the CPU, ours and torch's in turn: cpu_bench.py TRAINER [--json FILE] [--only TEXT] [--rounds N]

f32, random weights, the same shapes, tokens a step and number of threads. A round runs each side once, in a process of
its own; a side's speed is the median over its steps after the first two. The ratio of a case is the median of its rounds',
with the smallest and largest beside it; above 1 we are faster, and an rss_ratio below 1 means we need less memory.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARM = 2
SMALL = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
             head_dim=64, vocab_size=8192, tie_word_embeddings=False)
SMOLLM2 = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
               num_key_value_heads=3, head_dim=64, vocab_size=49152, tie_word_embeddings=True)
QWEN3 = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
             num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True)
# name, family, shape, rows of a micro-batch, tokens of a row, micro-batches of a step, steps
CASES = [
    ("train small 4x256", "llama", SMALL, 4, 256, 1, 12),
    ("train smollm2-135m 1x512", "llama", SMOLLM2, 1, 512, 1, 6),
    ("train smollm2-135m 1x1024", "llama", SMOLLM2, 1, 1024, 1, 5),
    ("train smollm2-135m 4x1024 accumulated", "llama", SMOLLM2, 1, 1024, 4, 4),
    ("train qwen3-0.6b 1x512", "qwen3", QWEN3, 1, 512, 1, 4),
]
FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config(family: str, shape: dict) -> dict:
    return dict(shape, architectures=[FAMILIES[family]], model_type=family, max_position_embeddings=8192,
                rms_norm_eps=1e-6, rope_theta=10000.0)


def timed(command: list) -> tuple[str, float]:
    """What a program prints, and its peak memory in MiB."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"failed: {' '.join(map(str, command))} ended with {os.waitstatus_to_exitcode(status)}")
        out.seek(0)
        return out.read().decode(), usage.ru_maxrss / 1024


def ours(trainer: str, folder: Path, case: tuple) -> tuple[float, float]:
    _, family, shape, rows, length, accumulated, steps = case
    recipe = folder / "recipe.yaml"
    run = folder / "run"
    recipe.write_text(json.dumps({
        "type": "causal", "device": "cpu", "output_dir": str(run),
        "model": {"config": config(family, shape), "dtype": "f32"},
        "tokenizer": {"name_or_path": "recipes/quickstart/tokenizer"},
        "data": {"sources": [str(folder / "text.jsonl")], "max_length": length, "overlong": "split",
                 "pack_samples": rows == 1, "cache_dir": str(folder / "cache")},
        "micro_batch_size": rows, "gradient_accumulation_steps": accumulated, "train_iters": steps,
        "optimizer": {"learning_rate": 1e-4}, "train_log_iter_interval": 1,
    }))
    (run / "metrics.jsonl").unlink(missing_ok=True)
    _, rss = timed([trainer, "-q", "train", str(recipe)])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["tokens_per_second"] for record in records[WARM:]), rss


def peer(case: tuple) -> tuple[float, float]:
    _, family, shape, rows, length, accumulated, steps = case
    work = json.dumps({"config": config(family, shape), "rows": rows, "length": length, "accumulated": accumulated,
                       "steps": steps})
    out, rss = timed([sys.executable, str(Path(__file__).with_name("cpu_bench_torch.py")), work])
    return statistics.median(json.loads(out.splitlines()[-1])[WARM:]), rss


def spread(numbers: list) -> tuple[float, float, float]:
    return statistics.median(numbers), min(numbers), max(numbers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trainer")
    parser.add_argument("--json")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results = []
    words = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = (" ".join(str(words.randrange(10**6)) for _ in range(4000)) for _ in range(20))
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text))
        for case in CASES:
            if options.only not in case[0]:
                continue
            rounds = [(ours(options.trainer, folder, case), peer(case)) for _ in range(options.rounds)]
            ratio, low, high = spread([our[0] / their[0] for our, their in rounds])
            result = {"name": case[0], "unit": "tokens/s",
                      "ours": statistics.median(our[0] for our, _ in rounds),
                      "peer": statistics.median(their[0] for _, their in rounds),
                      "ratio": ratio, "ratio_min": low, "ratio_max": high,
                      "rss_ratio": statistics.median(our[1] / their[1] for our, their in rounds)}
            results.append(result)
            print(f"{result['name']:40} {result['ours']:9.1f} {result['peer']:9.1f} {result['unit']}  x{ratio:.2f} "
                  f"({low:.2f} to {high:.2f})  memory x{result['rss_ratio']:.2f}", flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
