#!/usr/bin/env python3
"""Times torch on the ops that ops-bench timed, on the same device: gpu_ops_bench.py OPS.json [--device cuda] [--seconds N]

OPS.json is the output of `ops-bench --json`: shapes, rotating input sets, ceilings. The script adds torch's time to each row
and rewrites the file. Torch runs in several variants (eager, compiled, each attention backend, Liger's kernels, torchao's FP8 layers); the fastest
counts and is named. gpu_ops_bench_rows.py describes a row.
"""
import argparse
import collections
import dataclasses
import importlib
import json
import statistics
import time
from pathlib import Path

import torch
import torch._functorch.config
import torch.nn.functional as F

from gpu_ops_bench_rows import HEAD, line

BF16, F32 = torch.bfloat16, torch.float32
# Beginning of the names of compiled variants.
COMPILED = "compiled"
args = argparse.Namespace()


def randn(*shape, grad=False):
    return torch.randn(shape, device=args.device).to(BF16).requires_grad_(grad)


def rand_f32(*shape):
    return torch.rand(shape, device=args.device)


# --- Variants of each op by name: functions that make one input set and return a function that runs it. ---

def differentiable(what, make_inputs, ways):
    """Returns forward or backward of y = way(*inputs) for each variant."""
    def made(way):
        def make():
            inputs = make_inputs()
            if what == "forward":
                return lambda: way(*inputs)
            y = way(*inputs)
            dy = torch.randn_like(y)
            wanted = [x for x in inputs if x.requires_grad]
            return lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)
        return make
    return {name: made(way) for name, way in ways.items()}


def eager_and_compiled(what, make_inputs, f):
    return differentiable(what, make_inputs, {"eager": f, COMPILED: torch.compile(f, dynamic=False)})


def liger(name):
    """Returns a function of Liger's ops; an ImportError without Liger is the variant's failure."""
    module, function = name.split(".")
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function)


def rms_norm(what, t, d):
    make = lambda: (randn(t, d, grad=True), randn(d, grad=True))
    # In place, Liger's backward would overwrite the gradient that every run reads.
    by_liger = lambda x, w: liger("rms_norm.LigerRMSNormFunction").apply(x, w, 1e-6, 0.0, "llama", False)
    return {**eager_and_compiled(what, make, lambda x, w: F.rms_norm(x, (d,), w, 1e-6)),
            **differentiable(what, make, {"liger": by_liger})}


def add_rms_norm(what, t, d):
    return eager_and_compiled(what, lambda: (randn(t, d, grad=True), randn(t, d, grad=True), randn(d, grad=True)),
                              lambda a, b, w: F.rms_norm(a + b, (d,), w, 1e-6))


def rope(what, t, h, k):
    def make():
        angles = rand_f32(t, 1, k // 2)
        return randn(t, h, k, grad=True), angles.cos(), angles.sin()

    def rotate(x, cos, sin):
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return eager_and_compiled(what, make, rotate)


def swiglu(what, t, f):
    # Liger's backward writes into what its forward saved, so only its forward can run again.
    by_liger = {"liger": lambda gate, up: liger("swiglu.LigerSiLUMulFunction").apply(gate, up)}
    make = lambda: (randn(t, f, grad=True), randn(t, f, grad=True))
    return {**eager_and_compiled(what, make, lambda gate, up: F.silu(gate) * up),
            **(differentiable(what, make, by_liger) if what == "forward" else {})}


def add(what, t, d):
    def make():
        a, b = randn(t, d), randn(t, d)
        return lambda: a + b
    return {"eager": make}


def set_rows(what, t, d):
    def make():
        to, x = randn(2 * t, d), randn(t, d)
        rows = 2 * torch.arange(t)
        return lambda: to.index_copy_(0, rows.to(args.device, non_blocking=True), x)
    return {"index_copy_": make}


def dropout(what, t, d):
    return eager_and_compiled(what, lambda: (randn(t, d, grad=True),), lambda x: F.dropout(x, 0.1))


def embedding(what, t, v, d):
    ids = lambda: torch.randint(0, v, (t,), device=args.device)
    if what == "forward":
        return differentiable(what, lambda: (ids(), randn(v, d, grad=True)), {"eager": F.embedding})

    def index_add():
        where, dy, dw = ids(), randn(t, d), torch.zeros(v, d, device=args.device)
        return lambda: dw.index_add_(0, where, dy.float())
    dense = differentiable(what, lambda: (ids(), randn(v, d, grad=True)), {"dense": F.embedding})
    return {**dense, "index_add_": index_add}


def attention(what, t, n_seqs, hq, hkv, k):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def with_backend(backend):
        def run(q, k, v):
            q, k, v = (x.unflatten(0, (n_seqs, -1)).transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=hq != hkv)
        return run
    backends = dict(cudnn=SDPBackend.CUDNN_ATTENTION, flash=SDPBackend.FLASH_ATTENTION,
                    efficient=SDPBackend.EFFICIENT_ATTENTION)
    if args.device == "cpu":
        backends["math"] = SDPBackend.MATH
    make = lambda: tuple(randn(t, heads, k, grad=True) for heads in (hq, hkv, hkv))
    return differentiable(what, make, {name: with_backend(backend) for name, backend in backends.items()})


def linear(what, t, k, n):
    return differentiable(what, lambda: (randn(t, k), randn(n, k)), {"eager": F.linear})


def fp8_linear(what, t, k, n):
    """torchao's linear layer, with the quantization of both operands."""
    def made(recipe):
        def make():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
            config = Float8LinearConfig.from_recipe_name(recipe)
            if args.device == "cpu":
                config = dataclasses.replace(config, emulate=True)
            layer = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False, device=args.device, dtype=BF16))
            layer, x = torch.compile(convert_to_float8_training(layer, config=config), dynamic=False), randn(t, k)

            def run():
                with torch.no_grad():
                    return layer(x)
            return run
        return make
    return {f"{COMPILED} torchao {recipe}": made(recipe) for recipe in ("tensorwise", "rowwise")}


def linear_dx(what, t, k, n):
    def make():
        dy, w = randn(t, n), randn(n, k)
        return lambda: dy @ w
    return {"eager": make}


def linear_dw(what, t, k, n):
    def added(product):
        def make():
            dy, x, dw = randn(t, n), randn(t, k), torch.zeros(n, k, device=args.device)
            return lambda: dw.add_(product(dy.t(), x))
        return make
    return {"bf16, added to f32": added(torch.mm),
            "f32, added": added(lambda a, b: torch.mm(a, b, out_dtype=F32))}


def group_ends(t, e):
    """Ends of e groups of t rows, as in ops-bench: group i has about as many rows as 1 / (i + 8) of them."""
    weights = [sum(1 / (i + 8) for i in range(n)) for n in range(e + 1)]
    # Halves round up, as in Rust.
    return torch.tensor([int(t * weight / weights[e] + 0.5) for weight in weights[1:]], dtype=torch.int32, device=args.device)


def grouped_linear(what, t, k, n, e):
    def make():
        x, w, ends = randn(t, k), randn(e, n, k), group_ends(t, e)
        return lambda: torch._grouped_mm(x, w.mT, offs=ends)
    return {"_grouped_mm": make}


def grouped_linear_dx(what, t, k, n, e):
    def make():
        dy, w, ends = randn(t, n), randn(e, n, k), group_ends(t, e)
        return lambda: torch._grouped_mm(dy, w, offs=ends)
    return {"_grouped_mm": make}


def grouped_linear_dw(what, t, k, n, e):
    def make():
        dy, x, ends = randn(t, n), randn(t, k), group_ends(t, e)
        dw = torch.zeros(e, n, k, device=args.device)
        return lambda: dw.add_(torch._grouped_mm(dy.t(), x, offs=ends))
    return {"bf16, added to f32": make}


def moe_layer(what, t, d, f, e, k):
    """Router, experts by _grouped_mm, weighted sum; the gradients of weights are bf16."""
    def make():
        return (randn(t, d, grad=True), randn(e, d, grad=True), randn(e, 2 * f, d, grad=True),
                randn(e, d, f, grad=True))

    def layer(x, router, gate_up, down):
        weights, experts = torch.softmax(x @ router.t(), -1, dtype=F32).topk(k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        ends = torch.bincount(experts.flatten(), minlength=e).cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x[order // k], gate_up.mT, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends) * weights.flatten()[order, None].to(BF16)
        return torch.zeros_like(x).index_add(0, order // k, y)

    def liger_layer(x, router, gate_up, down):
        weights, experts = torch.softmax(x @ router.t(), -1, dtype=F32).topk(k)
        weights = weights / weights.sum(-1, keepdim=True)
        return liger("fused_moe.LigerFusedMoEFunction").apply(x, gate_up, down, experts.to(torch.int32), weights.to(BF16))
    return differentiable(what, make, {"_grouped_mm": layer, COMPILED: torch.compile(layer, dynamic=False),
                                       "liger": liger_layer})


def dense_mlp(what, t, d, f):
    def mlp(x, gate_up, down):
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)
    make = lambda: (randn(t, d, grad=True), randn(2 * f, d, grad=True), randn(d, f, grad=True))
    return eager_and_compiled(what, make, mlp)


def linear_cross_entropy(what, t, v, d):
    def made(loss):
        def make():
            x, w, dw = randn(t, d, grad=True), randn(v, d, grad=True), torch.zeros(v, d, device=args.device)
            targets = torch.randint(0, v, (t,), device=args.device)

            def run():
                dx, grad_w = torch.autograd.grad(loss(x, w, targets), (x, w))
                dw.add_(grad_w)
                return dx
            return run
        return make
    loss = lambda x, w, targets: F.cross_entropy((x @ w.t()).float(), targets)
    of_liger = lambda x, w, targets: liger("fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction").apply(x, w, targets)
    # The loss comes with statistics.
    by_liger = lambda *inputs: of_liger(*inputs)[0]
    return {"eager": made(loss), COMPILED: made(torch.compile(loss, dynamic=False)), "liger": made(by_liger)}


def adamw(what, n):
    def make():
        p = rand_f32(n).requires_grad_()
        p.grad, copy = rand_f32(n), p.detach().to(BF16)
        optimizer = torch.optim.AdamW([p], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

        def run():
            optimizer.step()
            copy.copy_(p.detach())
        return run
    return {"fused, then copied": make}


def grad_scaler(what, n_sums):
    """Computes a step's gradient norm, its finiteness, and the clipping factor."""
    def make():
        squares, losses = torch.ones(n_sums, device=args.device, dtype=torch.float64), rand_f32(16)

        def run():
            norm = squares.sum().sqrt()
            is_good = norm.isfinite() & losses.isfinite().all()
            return torch.where(is_good, (1.0 / (norm + 1e-6)).clamp(max=1.0), 0.0)
        return run
    return {"eager": make}


def in_place(make):
    return lambda what, n: {"eager": lambda: make(n)}


def copy_to(dtype):
    def make(n):
        to, x = torch.zeros(n, device=args.device, dtype=dtype), rand_f32(n)
        return lambda: to.copy_(x)
    return make


def zero(n):
    x = rand_f32(n)
    return lambda: x.zero_()


def sum_of_squares(what, n):
    def made(f):
        def make():
            x = rand_f32(n)
            return lambda: f(x)
        return make
    squares = lambda x: (x * x).sum()
    return {"vector_norm": made(torch.linalg.vector_norm), COMPILED: made(torch.compile(squares, dynamic=False))}


OPS = {
    "rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "rope": rope, "swiglu": swiglu, "add": add, "dropout": dropout, "embedding": embedding,
    "set_rows": set_rows, "attention": attention, "attention fused": attention, "linear": linear, "linear dx": linear_dx,
    "linear dw": linear_dw, "linear_cross_entropy": linear_cross_entropy, "adamw": adamw, "grad_scaler": grad_scaler,
    "copy_into f32 to bf16": in_place(copy_to(BF16)), "copy_into f32": in_place(copy_to(F32)), "zero_": in_place(zero),
    "sum_of_squares": sum_of_squares, "grouped_linear": grouped_linear,
    "fp8 delayed": fp8_linear, "fp8 current": fp8_linear,
    "grouped_linear dx": grouped_linear_dx, "grouped_linear dw": grouped_linear_dw, "moe layer": moe_layer, "dense mlp": dense_mlp,
}


# --- Timing, as on our side: by device events, without waiting for the device. ---

def batch(runs, kept, n):
    """Returns the milliseconds per run of n runs; a result lives until the next run of its input set."""
    if args.device == "cpu":
        began = time.perf_counter()
    else:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
    for i in range(n):
        kept[i % len(runs)] = runs[i % len(runs)]()
    if args.device == "cpu":
        return 1e3 * (time.perf_counter() - began) / n
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / n


def milliseconds(make, n_sets, *sizes):
    runs = [make(*sizes) for _ in range(n_sets)]
    kept = [None] * n_sets
    batch(runs, kept, max(n_sets, 2))
    once = batch(runs, kept, max(n_sets, 2))
    n = min(max(round((1 if args.quick else 25) / max(once, 1e-6)), 1), 10_000)
    return statistics.median(batch(runs, kept, n) for _ in range(3 if args.quick else 7))


def timed(ways, n_sets):
    times, failed = {}, {}
    for name, make in ways.items():
        try:
            times[name] = milliseconds(make, n_sets)
        except Exception as error:  # The variant is skipped.
            failed[name] = f"{type(error).__name__}: {error}"[:200]
        if args.device != "cpu":
            torch.cuda.empty_cache()
    return times, failed


def told(times, failed):
    if not times:
        return {"torch_failed": failed} if failed else {}
    best = min(times, key=times.get)
    return {"torch_ms": times[best], "torch_how": best, "torch_ways": times, "torch_failed": failed}


def ceilings():
    n_bytes, n = (1 << 20, 128) if args.quick else (2 << 30, 8192)
    copy = milliseconds(copy_to(F32), 1, n_bytes // 4)
    product = milliseconds(lambda n: linear("forward", n, n, n)["eager"](), 1, n)
    return {"copy_bytes_per_second": 2 * n_bytes / copy * 1e3, "product_flops_per_second": 2 * n**3 / product * 1e3}


def ceilings_of(file):
    """Returns the ceilings of the file, or those measured now."""
    if file and file.is_file():
        return json.loads(file.read_text())
    found = ceilings()
    if file:
        file.write_text(json.dumps(found))
    return found


def said(ceilings):
    return (f"copies {ceilings['copy_bytes_per_second'] / 1e9:.0f} GB/s, "
            f"multiplies {ceilings['product_flops_per_second'] / 1e12:.1f} TFLOP/s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ops", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--ceilings", type=Path, help="file of torch's ceilings; it is written if it is missing")
    parser.add_argument("--quick", action="store_true")
    parser.parse_args(namespace=args)
    began = time.monotonic()
    # Backwards run more than once here.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 64
    found = json.loads(args.ops.read_text())
    found["torch"] = torch.__version__
    found["torch_ceilings"] = ceilings_of(args.ceilings)
    print(f"ours: {found['device']}, {said(found['ceilings'])}")
    print(f"torch {torch.__version__}: {said(found['torch_ceilings'])}")
    print(HEAD)
    known = collections.defaultdict(lambda: ({}, {}))
    # Compilation takes most of the time, so every row runs another variant first.
    for is_compiled in (False, True):
        done = set()
        for row in found["rows"]:
            shape = {name: n for name, n in row["shape"].items() if name != "chunk"}
            # Attention and experts: two of our implementations are compared with the same one of torch.
            op = row["op"].removesuffix(" fused").replace(" cutlass", "")
            key = json.dumps([op, row["what"], shape])
            if key not in done and time.monotonic() - began < args.seconds:
                # Rows without a counterpart in torch stay as they are.
                variants = OPS[op](row["what"], **shape) if op in OPS else {}
                ways = {name: make for name, make in variants.items()
                        if name.startswith(COMPILED) == is_compiled}
                for all_of_it, new in zip(known[key], timed(ways, row["n_sets"])):
                    all_of_it.update(new)
            done.add(key)
            row.update(told(*known[key]))
            if is_compiled:
                print(line(row), flush=True)
            args.ops.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
