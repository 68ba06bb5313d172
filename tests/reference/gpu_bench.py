#!/usr/bin/env python3
"""Times training steps of random models, ours and torch's, on one GPU: gpu_bench.py TRAINER OUT.json

All sides: four rows of 4096 tokens a step; bf16 weights and activations, f32 gradient accumulation, f32 master weights and AdamW
moments, gradient clipping. A run ends after --side-seconds of timed steps. If the activations do not fit, torch checkpoints every
layer; ours checkpoints as few as necessary, by `trainer estimate`. MFU counts 6 N + causal attention FLOPs per token over 989.5e12,
the dense bf16 peak of an H100 or H200; recomputation does not count. gpu_shapes.py has the models.

The sides of torch are transformers (else torch_decoder.py) with sdpa attention, cuDNN's first, and PEFT for LoRA:
`torch` is eager. `torch_compiled` compiles each block and the loss. `liger` has Liger's kernels, with its fused loss of the output layer
and its fused experts. `torchao_tensorwise` and `torchao_rowwise` are linear layers in FP8 by torchao, compiled. `nf4` is LoRA on torchao's
NF4 weights, compiled.

The sides of a model run after one another. The next model, and the next of --rounds, begin with the last side. OUT is written after each
run, and no run starts that would exceed --seconds. OUT keeps the results of other calls.
"""
import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gpu_smi
from gpu_shapes import (CASES, DEFAULT, FP8, GIB, PEAK, TINY, TINY_EXPERTS, flops_per_token, is_lora, torch_recomputes)

# Values of activation_checkpoint, the fastest first.
MODES = ("none", {"every": 2}, "full")
# Steps of a run, at most; --side-seconds end it earlier.
MOST_STEPS = 100_000


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
        raise RuntimeError(reason(complained, process.returncode))
    return said


def reason(complained: str, code: int) -> str:
    """Returns the end of a program's messages; a program that a signal ended may have printed others."""
    said = " | ".join(complained.strip().splitlines()[-10:])
    return f"{said} | signal {-code}".removeprefix(" | ") if code < 0 else said or f"exit code {code}"


def ours(job: dict, seconds: float) -> dict:
    """Times our side in the fastest mode that fits in memory."""
    end = time.monotonic() + seconds
    modes = fitting(job)
    for mode, estimate in modes:
        try:
            return {**trained(job, mode, end - time.monotonic()), "estimated_bytes": estimate}
        except RuntimeError as error:
            if "memory" not in str(error) or mode == modes[-1][0] or end - time.monotonic() < 20:
                raise
    raise RuntimeError("no mode to run in")


def fitting(job: dict) -> list:
    """Returns the modes from the first one on that fits, each with the bytes of `trainer estimate`."""
    found = []
    for mode in MODES:
        with tempfile.TemporaryDirectory() as folder:
            recipe = recipe_of(job, mode, Path(folder), [])
            # The exit code is 4 if the run does not fit.
            command = [job["trainer"], "-q", "estimate", str(recipe), "--json", "--device", str(job["memory"])]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode not in (0, 4):
            raise RuntimeError(f"trainer estimate: {done.stderr.strip()[-500:] or f'exit code {done.returncode}'}")
        estimate = json.loads(done.stdout)
        if estimate["fits"] or found or mode == MODES[-1]:
            found.append((mode, estimate["peak_bytes"]))
    return found


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
        "micro_batch_size": job["micro_batch_size"], "gradient_accumulation_steps": job["rows"] // job["micro_batch_size"],
        "train_iters": job["steps"], "train_log_iter_interval": 1,
        "optimizer": {"learning_rate": 1e-4}, "checkpoint": "none", **keys,
    }))
    return recipe


def step_records(run: Path) -> list:
    """Returns the steps that a run has logged before its end."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return [record for record in map(json.loads, lines) if "tokens_per_second" in record]


def argument_parser(seconds: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    return parser


def timed_enough(job: dict, seconds: list) -> bool:
    """True after enough timed steps: the least number of them, and the least time."""
    return len(seconds) >= job["least_steps"] and sum(seconds) >= job["side_seconds"]


def run_until(command: list, run: Path, job: dict, seconds: float) -> str | None:
    """Runs the trainer until enough steps are timed. Returns the reason of an earlier end."""
    end = time.monotonic() + seconds
    errors = run.parent / "errors.txt"
    with errors.open("w") as file, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file,
                                                    start_new_session=True) as process:
        try:
            while process.poll() is None:
                if timed_enough(job, [record["step_time"] for record in step_records(run)[job["warm"]:]]):
                    return None
                if time.monotonic() > end:
                    return f"not done after {seconds:.0f} s"
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise RuntimeError(reason(errors.read_text(), process.returncode))
    return None


def trained(job: dict, mode, seconds: float) -> dict:
    with tempfile.TemporaryDirectory() as name, gpu_smi.sampled() as samples:
        folder = Path(name)
        run = folder / "run"
        # Rows for eight steps, then the same again. One document is many rows long: nearly every row is one sequence.
        n_words = job["length"] * job["rows"] * 8
        recipe = recipe_of(job, mode, folder, [words(n_words // 4 + i) for i in range(4)])
        cut_off = run_until([job["trainer"], "-q", "train", str(recipe)], run, job, seconds)
        all_records, about = step_records(run), run / "run.json"
        notes = json.loads(about.read_text()).get("notes", []) if about.is_file() else []
        records = all_records[job["warm"]:]
        if not records:
            raise TimeoutError(cut_off or "it logged no step")
        ended = (run / "metrics.jsonl").stat().st_mtime
    gpu = samples.summary(ended - sum(record["step_time"] for record in records), ended)
    losses = {str(record["iter"]): record["loss"] for record in all_records}
    return {"speeds": [record["tokens_per_second"] for record in records], "losses": losses,
            "device_used_bytes": records[-1].get("gpu_used_bytes"), "mode": mode, "notes": notes, "cut_off": cut_off,
            "gpu": gpu, "record": records[-1]}


def peer(job: dict, side: str, seconds: float) -> dict:
    """Times torch in its own process, which frees its memory before our run. Without enough memory, it recomputes."""
    script, end = Path(__file__).with_name("gpu_bench_torch.py"), time.monotonic() + seconds
    for recompute in dict.fromkeys([job["recompute"], True]):
        asked = json.dumps({**job, "side": side, "recompute": recompute})
        with gpu_smi.sampled() as samples:
            try:
                said = call([sys.executable, str(script), asked], end - time.monotonic())
                found = json.loads(said.splitlines()[-1])
                ended = found.pop("ended")
                seconds = sum(job["length"] * job["rows"] / speed for speed in found["speeds"])
                return {**found, "recomputes": recompute, "gpu": samples.summary(ended - seconds, ended)}
            except RuntimeError as error:
                if "out of memory" not in str(error) or recompute or end - time.monotonic() < 20:
                    raise
    raise RuntimeError("no mode to run in")


# The sides, and the seconds that a run of each may take.
SIDES = {"ours": 100, "torch": 90, "torch_compiled": 150, "liger": 120, "torchao_tensorwise": 150, "torchao_rowwise": 150, "nf4": 150}


def applies(side: str, keys: dict) -> bool:
    """True if a side can train such a model: NF4 is for LoRA, and FP8 by torchao for full training."""
    if side == "nf4":
        return is_lora(keys)
    return not (side.startswith("torchao") and is_lora(keys))


def run_side(side: str, job: dict, left: float) -> dict:
    seconds = min(left, SIDES[side])
    return ours(job, seconds) if side == "ours" else peer(job, side, seconds)


def add_round(before: dict | None, found: dict) -> dict:
    """Returns a result with the speeds of earlier rounds."""
    rounds = [*((before or {}).get("rounds", [])), found.pop("speeds")]
    speeds = sorted(speed for speeds in rounds for speed in speeds)
    return {**found, "rounds": rounds, "tokens_per_second": statistics.median(speeds), "slowest": speeds[0], "fastest": speeds[-1]}


def host_ms(side: str, job: dict, left: float) -> float:
    """Returns the milliseconds of a step on rows of 16 tokens: the host takes them to submit its work."""
    short = {**job, "length": 16, "side_seconds": 0, "least_steps": 10}
    return 1e3 * 16 * job["rows"] / statistics.median(run_side(side, short, left)["speeds"])


def memory_of(trainer: str) -> int:
    try:
        gpus = json.loads(call([trainer, "doctor", "--json"], 30))["gpus"]
    except (RuntimeError, TimeoutError):
        gpus = []
    return gpus[0]["memory_bytes"] if gpus else 10**15


def line(row: dict, side: str) -> str:
    result = row[side]
    if "error" in result:
        return f"{row['name']:15} {side:15} {result['error'][-300:]}"
    used = result.get("device_used_bytes") or 0
    chosen = [note for note in result.get("notes", []) if "attention" in note or note.startswith(("experts: ", "precision."))]
    how = [result["model"]] if "model" in result else chosen
    if result.get("recomputes") or result.get("mode", "none") != "none":
        how.append(f"recomputes: {result.get('mode', 'full')}")
    if "host_ms" in result:
        how.append(f"host {result['host_ms']:.1f} of {1e3 * row['rows'] * row['length'] / result['tokens_per_second']:.1f} ms a step")
    if "estimated_bytes" in result:
        how.append(f"estimated {result['estimated_bytes'] / GIB:.1f} GiB")
    if result.get("gpu"):
        how.append(gpu_smi.text(result["gpu"]))
    if result.get("cut_off"):
        how.append(f"cut off: {result['cut_off']}")
    if "failed_round" in result:
        how.append(f"a round failed: {result['failed_round']}")
    if side == "ours" and row.get("mark"):
        how.append(f"{result['tokens_per_second'] / row['mark']:.2f} of {row['mark']:,} ({row['mark_source']})")
    return (f"{row['name']:15} {side:15} {result['tokens_per_second']:9,.0f} tokens/s  MFU {result['mfu']:6.1%}  "
            f"{used / GIB:6.1f} GiB  {'; '.join(how)}")


def compared(rows: list) -> list:
    """Returns a line for each pair of a model and a side of torch, with our speed over the side's. For each model in FP8, returns its
    speed-up over the same model in bf16, and the gap of their training losses at the last step that both took. Data and initial
    weights are equal."""
    ours_by_name = {row["name"]: row["ours"] for row in rows if "record" in row.get("ours", {})}
    lines = []
    for row in rows:
        for side in SIDES:
            if side != "ours" and row["name"] in ours_by_name and "tokens_per_second" in row.get(side, {}):
                ratio = row["ours"]["tokens_per_second"] / row[side]["tokens_per_second"]
                lines.append(f"{row['name']}: {ratio:.2f} times as fast as {side}" + (", SLOWER" if ratio < 1 else ""))
    for name, fp8 in ours_by_name.items():
        base, _, precision = name.rpartition("-")
        bf16 = ours_by_name.get(f"{base}-bf16" if f"{base}-bf16" in ours_by_name else base)
        if precision not in (*FP8, "fp8") or bf16 is None:
            continue
        common = sorted(set(fp8["losses"]) & set(bf16["losses"]), key=int)
        gap = "no step in common"
        if common:
            gap = f"loss of step {common[-1]} {fp8['losses'][common[-1]] - bf16['losses'][common[-1]]:+.4f}"
        lines.append(f"{name}: {fp8['tokens_per_second'] / bf16['tokens_per_second']:.2f} times as fast as bf16, {gap}")
    return lines


def table_of(args, old: dict) -> list:
    """Returns a row for each model, with the results of earlier calls."""
    sizes = dict(length=64, rows=2, steps=MOST_STEPS, warm=1, least_steps=2) if args.quick else dict(
        length=4096, rows=4, steps=MOST_STEPS, warm=3, least_steps=5)
    memory, table = memory_of(args.trainer), []
    for name in args.shapes.split(","):
        case = CASES[name]
        config = case.config
        if args.quick:
            config = {**config, **TINY, **(TINY_EXPERTS if "num_experts" in config else {})}
        job = {**sizes, "config": config, "keys": case.keys, "micro_batch_size": case.micro_batch_size, "device": args.device,
               "trainer": args.trainer, "memory": memory, "side_seconds": args.side_seconds / args.rounds}
        job["recompute"] = torch_recomputes(config, job, memory)
        done = {side: old[name][side] for side in SIDES if side in old.get(name, {})}
        table.append({"name": name, **sizes, "mark": None if args.quick else case.mark, "mark_source": case.mark_source,
                      "times_host": case.times_host, "job": job, **done})
    return table


def measure(row: dict, side: str, left: float) -> dict:
    """Returns the result of a side, or its error."""
    job, before = row["job"], row.get(side, {})
    try:
        if left < 10:
            raise TimeoutError("no time was left")
        began = time.monotonic()
        found = add_round(before, run_side(side, job, left))
        found["mfu"] = found["tokens_per_second"] * flops_per_token(job["config"], job["length"], job["keys"]) / PEAK
    except Exception as error:  # A bench that fails is a line of the table; rounds that were measured stay.
        if "rounds" in before:
            return {**before, "failed_round": f"{type(error).__name__}: {error}"[:300]}
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    left -= time.monotonic() - began
    if row["times_host"] and "host_ms" not in before and left > 10:
        try:
            found["host_ms"] = host_ms(side, job, left)
        except Exception as error:  # The speed was measured.
            print(f"{row['name']} {side}, rows of 16 tokens: {error}", flush=True)
    return {**{key: before[key] for key in ("host_ms", "failed_round") if key in before}, **found}


def main() -> int:
    parser = argument_parser(350)
    parser.description = __doc__
    parser.add_argument("--sides", default="ours,torch,torch_compiled", help="what to run: " + ", ".join(SIDES))
    parser.add_argument("--shapes", default=",".join(DEFAULT), help="which models: " + ", ".join(CASES))
    parser.add_argument("--side-seconds", type=float, default=10, help="least seconds of timed steps of a side")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side, which share its seconds")
    args = parser.parse_args()
    sides = args.sides.split(",")
    unknown = [name for name in sides if name not in SIDES] + [name for name in args.shapes.split(",") if name not in CASES]
    if unknown:
        parser.error(f"no side or model has the name {', '.join(unknown)}")
    if args.quick:
        args.side_seconds = 0
    end = time.monotonic() + args.seconds
    # Its children end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    old = {row["name"]: row for row in json.loads(args.out.read_text())} if args.out.is_file() else {}
    table = table_of(args, old)
    # Rows of other calls stay in the file.
    kept = [row for name, row in old.items() if name not in args.shapes.split(",")]
    for row in table:
        for side in sides:
            row.pop(side, None)
    for turn in range(args.rounds):
        for place, row in enumerate(table):
            # The side that begins changes: a card that was idle is faster.
            for side in sides if (turn + place) % 2 == 0 else sides[::-1]:
                if not applies(side, row["job"]["keys"]):
                    continue
                row[side] = measure(row, side, end - time.monotonic())
                print(line(row, side), flush=True)
                args.out.write_text(json.dumps([*kept, *table], indent=1))
    print(*compared([*kept, *table]), sep="\n")
    return 1 if any("error" in row.get("ours", {}) for row in table if "ours" in sides) else 0


if __name__ == "__main__":
    sys.exit(main())
