#!/usr/bin/env python3
"""Times training steps of random models, ours and torch's, on one GPU: gpu_bench.py TRAINER OUT.json

Both sides: micro-batches of one row of 4096 tokens, four per step; bf16 weights and activations, f32 gradient accumulation,
f32 master weights and AdamW moments, gradient clipping. If the activations do not fit, torch checkpoints every layer, and
ours checkpoints as few as necessary. MFU counts 6 N + causal attention FLOPs per token over 989.5e12, the dense bf16 peak of an H100 or
H200; recomputation does not count. torch's side is transformers (else torch_decoder.py) with sdpa attention, cuDNN's
first; `compiled` means each block and the loss by torch.compile. OUT is written after each run, and no
run starts that would exceed --seconds. --sides selects the sides to run; OUT keeps the results of the others.
"""
import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEAK = 989.5e12
GIB = 2**30
SHAPES = {
    "Llama-3.2-1B": dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=2048,
                         intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
                         head_dim=64, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5,
                         rope_theta=500000.0, tie_word_embeddings=True),
    "SmolLM2-1.7B": dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=2048,
                         intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32, num_key_value_heads=32,
                         vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=130000.0,
                         tie_word_embeddings=True),
    "Qwen3-4B": dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=2560, intermediate_size=9728,
                     num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                     vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0,
                     tie_word_embeddings=True),
}
LLAMA_8B = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336,
                num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
                max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False)
QWEN_7B = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=3584, intermediate_size=18944,
               num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064,
               max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False)
# Six layers of Qwen3-30B-A3B, and a dense model with equal FLOPs per token: its MLPs are as wide as a token's eight experts.
QWEN_MOE = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144,
                num_hidden_layers=6, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
                max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False,
                num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True)
DENSE_TWIN = {**{key: QWEN_MOE[key] for key in SHAPES["Qwen3-4B"]}, "architectures": ["Qwen3ForCausalLM"],
              "model_type": "qwen3"}
BF16_STATE = {"deepspeed": {"bf16": {"bf16_optimizer_states": True}}}
# Sections `precision` of models in FP8. `auto` keeps layers in bf16 that are slower in FP8.
FP8 = {recipe: {"recipe": recipe} for recipe in ("delayed", "current", "blockwise")} | {
    "auto": {"recipe": "delayed", "exclude_slower_modules": True}}
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1, "target_modules": "all-linear"}
# Larger models, by name only: the config, the recipe's keys, and a published throughput in tokens/s on one H100 with its source.
LARGE = {
    "8B-bf16-moments": (LLAMA_8B, BF16_STATE, 6667, "torchtitan, full fine-tuning with FSDP and torch.compile, bf16"),
    "8B-LoRA": (LLAMA_8B, {"model": {"peft_config": LORA}}, 12473, "NeMo Automodel, LoRA of rank 16"),
    "7B-LoRA": (QWEN_7B, {"model": {"peft_config": LORA}}, 14110, "NeMo Automodel, LoRA of rank 16"),
}
# By name only, too: models in FP8, each after the same model in bf16, and a mixture of experts after its dense twin.
BASES = {"4B": (SHAPES["Qwen3-4B"], {}), "8B": (LLAMA_8B, BF16_STATE)}
NAMED = {f"{name}-{precision}": (config, keys if precision == "bf16" else {**keys, "precision": FP8[precision]}, None, None)
         for name, (config, keys) in BASES.items() for precision in ("bf16", *FP8)}
NAMED |= {"MoE-dense-twin": (DENSE_TWIN, {}, None, None), "MoE": (QWEN_MOE, {"model": {"experts_implementation": "auto"}}, None, None),
          "MoE-fused": (QWEN_MOE, {"model": {"experts_implementation": "fused"}}, None, None),
          "MoE-delayed": (QWEN_MOE, {"precision": {"recipe": "delayed"}}, None, None)}
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=600)
TINY_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)


def n_weights(c: dict, n_experts: int | None = None) -> int:
    """Returns the number of weights in matmuls, the head included: with tied embeddings, nearly all. Of a mixture of experts,
    n_experts counts; default: all."""
    d, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim", d // heads)
    attention = d * head_dim * (2 * heads + 2 * c["num_key_value_heads"])
    mlp = 3 * d * c["intermediate_size"]
    if "num_experts" in c:
        mlp = 3 * d * c["moe_intermediate_size"] * (n_experts or c["num_experts"]) + d * c["num_experts"]
    return c["num_hidden_layers"] * (attention + mlp) + c["vocab_size"] * d


def flops_per_token(c: dict, length: int, per_weight: int) -> float:
    heads = c["num_attention_heads"]
    head_dim = c.get("head_dim", c["hidden_size"] // heads)
    return per_weight * n_weights(c, c.get("num_experts_per_tok")) + 6 * c["num_hidden_layers"] * heads * head_dim * length


def widths(c: dict) -> tuple:
    """Returns the widths of the queries of all heads and of the keys."""
    head_dim = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    return head_dim * c["num_attention_heads"], head_dim * c["num_key_value_heads"]


def torch_recomputes(c: dict, job: dict, memory_bytes: int) -> bool:
    """True if torch must recompute. Bytes: bf16 weights, four f32 per weight; per token and layer about 10 d + 4 f + 6 h k."""
    a_token = 2 * c["num_hidden_layers"] * (10 * c["hidden_size"] + 4 * c["intermediate_size"] + 6 * widths(c)[0])
    # Logits and their gradients in f32, and the memory of libraries.
    logits = 3 * 4 * c["vocab_size"] * job["length"]
    return 18 * n_weights(c) + a_token * job["length"] + logits + 2 * GIB > memory_bytes


def state_bytes(keys: dict) -> int:
    """Returns the bytes of a weight with its gradient, master and moments."""
    if "peft_config" in keys.get("model", {}):
        return 2
    return 14 if "deepspeed" in keys else 18


def flops_per_weight(keys: dict) -> int:
    """Returns the FLOPs per weight and token: forward, dx and dw; a frozen weight has no dw."""
    return 4 if "peft_config" in keys.get("model", {}) else 6


def modes(c: dict, job: dict, memory_bytes: int) -> list:
    """Returns our values of activation_checkpoint that may fit, the fastest first. Per layer the tape saves the residual
    stream twice, queries and keys before and after RoPE (and QK norm), values and outputs, gate and up."""
    q, k = widths(c)
    a_block = 2 * job["length"] * (2 * c["hidden_size"] + 3 * (q + k) + 2 * c["intermediate_size"])
    # Logits in f32 and their gradients of a chunk, and the memory of libraries.
    others = state_bytes(job["keys"]) * n_weights(c) + 5 * GIB
    fit = [mode for mode, share in (("none", 1.0), ({"every": 2}, 0.5))
           if others + share * c["num_hidden_layers"] * a_block < memory_bytes]
    return [*fit, "full"]


def call(command: list, seconds: float) -> str:
    """Returns the output of a program. After a timeout, it and its children are killed."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:
        try:
            said, complained = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"not done after {seconds:.0f} s") from None
            raise
    if process.returncode != 0:
        raise RuntimeError(" | ".join(complained.strip().splitlines()[-10:]) or f"exit code {process.returncode}")
    return said


def ours(job: dict, seconds: float) -> dict:
    """Times our side in the fastest mode that fits in memory."""
    end = time.monotonic() + seconds
    for mode in job["modes"]:
        try:
            return trained(job, mode, end - time.monotonic())
        except RuntimeError as error:
            if "memory" not in str(error) or mode == job["modes"][-1] or end - time.monotonic() < 20:
                raise
    raise RuntimeError("no mode to run in")


def words(n: int) -> str:
    draw = random.Random(n)
    return " ".join(str(draw.randrange(10**6)) for _ in range(n))


def recipe_of(job: dict, mode, folder: Path, texts: list[str]) -> Path:
    """Writes a recipe that trains on these documents; its run folder is folder/run."""
    text, recipe, keys = folder / "text.jsonl", folder / "recipe.yaml", dict(job["keys"])
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe.write_text(json.dumps({
        "type": "causal", "device": job["device"], "output_dir": str(folder / "run"),
        "model": {"config": job["config"], "dtype": "bf16", "activation_checkpoint": mode, **keys.pop("model", {})},
        "tokenizer": {"name_or_path": "recipes/quickstart/tokenizer"},
        "data": {"sources": [str(text)], "max_length": job["length"], "cache_dir": str(folder / "cache"),
                 **keys.pop("data", {})},
        "gradient_accumulation_steps": job["rows"], "train_iters": job["steps"], "train_log_iter_interval": 1,
        "optimizer": {"learning_rate": 1e-4}, "checkpoint": "none", **keys,
    }))
    return recipe


def step_records(run: Path) -> list:
    """Returns the steps that a run has logged before its end."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return [record for record in map(json.loads, lines) if "tokens_per_second" in record]


def argument_parser(seconds: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("trainer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    return parser


def trained(job: dict, mode, seconds: float) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "run"
        # One document is many rows long: nearly every row is one sequence.
        n_words = job["length"] * job["rows"] * job["steps"]
        recipe = recipe_of(job, mode, folder, [words(n_words // 4 + i) for i in range(4)])
        cut_off = None
        try:
            call([job["trainer"], "-q", "train", str(recipe)], seconds)
        except TimeoutError as error:
            cut_off = str(error)
        records, about = step_records(run)[job["warm"]:], run / "run.json"
        notes = json.loads(about.read_text()).get("notes", []) if about.is_file() else []
    if not records:
        raise TimeoutError(cut_off or "it logged no step")
    speeds = sorted(record["tokens_per_second"] for record in records)
    return {"tokens_per_second": speeds[len(speeds) // 2], "slowest": speeds[0], "fastest": speeds[-1],
            "device_used_bytes": records[-1].get("gpu_used_bytes"), "mode": mode, "notes": notes, "cut_off": cut_off,
            "record": records[-1]}


def peer(job: dict, compiled: bool, seconds: float) -> dict:
    """Times torch in its own process, which frees its memory before our run."""
    script = Path(__file__).with_name("gpu_bench_torch.py")
    said = call([sys.executable, str(script), json.dumps({**job, "compiled": compiled})], seconds)
    return json.loads(said.splitlines()[-1])


SIDES = {
    "ours": lambda job, left: ours(job, min(left, 100)),
    "torch": lambda job, left: peer(job, False, min(left, 90)),
    "torch_compiled": lambda job, left: peer(job, True, min(left, 150)),
}


def memory_of(trainer: str) -> int:
    try:
        gpus = json.loads(call([trainer, "doctor", "--json"], 30))["gpus"]
    except (RuntimeError, TimeoutError):
        gpus = []
    return gpus[0]["memory_bytes"] if gpus else 10**15


def line(row: dict, side: str) -> str:
    result = row[side]
    if "error" in result:
        return f"{row['name']:15} {side:15} {result['error'][:300]}"
    used = result.get("device_used_bytes") or 0
    chosen = [note for note in result.get("notes", []) if "attention" in note or note.startswith(("experts: ", "precision."))]
    how = [result["model"]] if "model" in result else chosen
    if row["recompute"] if "model" in result else result.get("mode", "none") != "none":
        how.append("recomputes" if "model" in result else f"recomputes: {result['mode']}")
    if side == "ours" and row.get("mark"):
        how.append(f"{result['tokens_per_second'] / row['mark']:.2f} of {row['mark']:,} ({row['mark_source']})")
    return (f"{row['name']:15} {side:15} {result['tokens_per_second']:9,.0f} tokens/s  MFU {result['mfu']:6.1%}  "
            f"{used / GIB:6.1f} GiB  {'; '.join(how)}")


def compared(rows: list) -> list:
    """Returns a line for each model in FP8: its speed-up over the same model in bf16, and the gap of their training losses at
    the last step of both. Data and initial weights are equal."""
    ours_by_name = {row["name"]: row["ours"] for row in rows if "record" in row.get("ours", {})}
    lines = []
    for name, fp8 in ours_by_name.items():
        base, _, precision = name.rpartition("-")
        bf16 = ours_by_name.get(f"{base}-bf16" if f"{base}-bf16" in ours_by_name else base)
        if precision not in FP8 or bf16 is None:
            continue
        gap = "losses of other steps"
        if fp8["record"]["iter"] == bf16["record"]["iter"]:
            gap = f"loss of step {fp8['record']['iter']} {fp8['record']['loss'] - bf16['record']['loss']:+.4f}"
        lines.append(f"{name}: {fp8['tokens_per_second'] / bf16['tokens_per_second']:.2f} times as fast as bf16, {gap}")
    return lines


def main() -> int:
    parser = argument_parser(350)
    parser.add_argument("--sides", default="ours,torch,torch_compiled", help="what to run, in this order")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="which models; also " + ", ".join([*LARGE, *NAMED]))
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    # Its children end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sizes = dict(length=64, rows=2, steps=4, warm=1) if args.quick else dict(length=4096, rows=4, steps=8, warm=3)
    memory = memory_of(args.trainer)
    old = {row["name"]: row for row in json.loads(args.out.read_text())} if args.out.is_file() else {}
    shapes = args.shapes.split(",")
    # Rows of other calls stay in the file.
    table, kept = [], [row for name, row in old.items() if name not in shapes]
    cases = {name: (config, {}, None, None) for name, config in SHAPES.items()} | LARGE | NAMED
    for name in shapes:
        config, keys, mark, mark_source = cases[name]
        mark = None if args.quick else mark
        if args.quick:
            config = {**config, **TINY, **(TINY_EXPERTS if "num_experts" in config else {})}
        job = {**sizes, "config": config, "keys": keys, "device": args.device, "trainer": args.trainer}
        job["recompute"], job["modes"] = torch_recomputes(config, job, memory), modes(config, job, memory)
        done = {side: old[name][side] for side in SIDES if side in old.get(name, {})}
        table.append({"name": name, **sizes, "recompute": job["recompute"], "mark": mark, "mark_source": mark_source,
                      "job": job, **done})
    failed = False
    # One side after the other, so that an interrupted call loses least.
    for side in args.sides.split(","):
        for row in table:
            left = end - time.monotonic()
            try:
                if left < 10:
                    raise TimeoutError("no time was left")
                row[side] = SIDES[side](row["job"], left)
                job = row["job"]
                per_token = flops_per_token(job["config"], sizes["length"], flops_per_weight(job["keys"]))
                row[side]["mfu"] = row[side]["tokens_per_second"] * per_token / PEAK
            except Exception as error:  # A bench that fails is a line of the table.
                row[side] = {"error": f"{type(error).__name__}: {error}"[:2000]}
                failed |= side == "ours"
            print(line(row, side), flush=True)
            args.out.write_text(json.dumps([*kept, *table], indent=1))
    print(*compared([*kept, *table]), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
