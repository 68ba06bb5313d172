#!/usr/bin/env python3
"""Times training steps of random models, ours and torch's in turn, on one GPU: gpu_bench.py TRAINER OUT.json

bf16 weights, f32 masters and AdamW states, rows of 4096 tokens, batch 1 by 4 accumulated steps. MFU counts 6 N + causal
attention floating-point operations a token over 989.5e12, the dense bf16 peak of an H100 or H200. torch's side is
transformers with sdpa attention if it is installed, compiled and not; else there is no peer, and the table says so.
"""
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTH, ACCUMULATED, STEPS, WARM = 4096, 4, 8, 3
PEAK = 989.5e12
SHAPES = {
    "SmolLM2-1.7B": dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=2048,
                         intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32, num_key_value_heads=32,
                         vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=130000.0,
                         tie_word_embeddings=True),
    "Llama-3.2-1B": dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=2048,
                         intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
                         head_dim=64, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5,
                         rope_theta=500000.0, tie_word_embeddings=True),
    "Qwen3-4B": dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=2560, intermediate_size=9728,
                     num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                     vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0,
                     tie_word_embeddings=True),
}


def flops_per_token(c: dict) -> float:
    d, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim", d // heads)
    attention = d * head_dim * (2 * heads + 2 * c["num_key_value_heads"])
    n = c["num_hidden_layers"] * (attention + 3 * d * c["intermediate_size"]) + c["vocab_size"] * d
    return 6 * n + 6 * c["num_hidden_layers"] * heads * head_dim * LENGTH


def ours(trainer: str, config: dict, folder: Path) -> dict:
    words = random.Random(1)
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": " ".join(str(words.randrange(10**6)) for _ in range(20000))}) + "\n"
                            for _ in range(20)))
    run = folder / "run"
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps({
        "type": "causal", "device": "cuda", "output_dir": str(run),
        "model": {"config": config, "dtype": "bf16"},
        "tokenizer": {"name_or_path": "recipes/quickstart/tokenizer"},
        "data": {"sources": [str(text)], "max_length": LENGTH, "cache_dir": str(folder / "cache")},
        "gradient_accumulation_steps": ACCUMULATED, "train_iters": STEPS,
        "optimizer": {"learning_rate": 1e-4},
    }))
    subprocess.run([trainer, "-q", "train", str(recipe)], check=True, timeout=120)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = sorted(record["tokens_per_second"] for record in records[WARM:])
    return {"tokens_per_second": speeds[len(speeds) // 2], "record": records[-1]}


def peer(config: dict, compiled: bool) -> dict:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = config["model_type"]
    rest = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **rest), attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step_model = torch.compile(model) if compiled else model
    ids = torch.randint(0, config["vocab_size"], (1, LENGTH), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        for _ in range(ACCUMULATED):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = step_model(input_ids=ids, labels=ids, use_cache=False).loss / ACCUMULATED
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    times = sorted(times[WARM:])
    return {"tokens_per_second": LENGTH * ACCUMULATED / times[len(times) // 2],
            "peak_bytes": torch.cuda.max_memory_allocated()}


def attempt(what: str, f) -> dict:
    try:
        return f()
    except Exception as error:  # A bench that fails is a line of the table.
        return {"error": f"{what}: {type(error).__name__}: {error}"[:300]}


def in_own_process(config: dict, compiled: bool) -> dict:
    """A peer in its own process: its memory is given back before ours runs."""
    request = json.dumps([config, compiled])
    done = subprocess.run([sys.executable, __file__, "--peer", request], capture_output=True, text=True, timeout=150)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    if sys.argv[1] == "--peer":
        print(json.dumps(peer(*json.loads(sys.argv[2]))))
        return 0
    trainer, out = sys.argv[1], Path(sys.argv[2])
    table, failed = [], False
    for name, config in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            us = attempt("ours", lambda: ours(trainer, config, Path(folder)))
        row = {"name": name, "length": LENGTH, "rows": ACCUMULATED, "ours": us,
               "torch": attempt("torch", lambda: in_own_process(config, False)),
               "torch_compiled": attempt("torch.compile", lambda: in_own_process(config, True))}
        failed |= "error" in us
        for side in ("ours", "torch", "torch_compiled"):
            speed = row[side].get("tokens_per_second")
            if speed:
                row[side]["mfu"] = speed * flops_per_token(config) / PEAK
            said = f"{speed:,.0f} tokens/s, MFU {row[side]['mfu']:.1%}" if speed else row[side]["error"]
            print(f"{name:14} {side:15} {said}")
        table.append(row)
        out.write_text(json.dumps(table, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
