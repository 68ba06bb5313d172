#!/usr/bin/env python3
"""Times bf16 matmuls by cuBLASLt's first algorithm, by the fastest, and by torch, in turns: gpu_ceilings.py OPS_BENCH OUT.json

Each matmul runs as a burst (ten runs or 10 ms after a second of idling) and for two seconds, of which the second half counts. The gap
between both is the power limit's; that between the sides is the algorithm's. The shapes are squares, and the linear layers of a 4B
model on 4096 and on 8192 tokens. OUT is written after each. Sustained matmuls have the clock, power and temperature of the GPU.
"""
import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import gpu_smi

# Tokens, inputs and outputs, the most informative first.
SHAPES = [(8192, 8192, 8192), (4096, 4096, 2560), (8192, 4096, 2560), (4096, 9728, 2560), (8192, 9728, 2560),
          (4096, 2560, 19456), (8192, 2560, 19456), (4096, 2560, 6144), (8192, 2560, 6144), (4096, 4096, 4096),
          (2048, 2048, 2048)]
TINY = [(64, 64, 64), (32, 48, 16)]
SIDES = ("first", "tuned", "torch")
KINDS = ("burst", "sustained")
# Seconds at the end of a sustained matmul that count.
COUNTED = 1.0
# Seconds of an answer, at most: the first one opens the device.
ANSWER = 30.0


class OpsBench:
    """A process of `ops-bench --matmuls`."""

    def __init__(self, program: str, device: str, quick: bool, tune: bool):
        environment = {**os.environ, **({"CANDLEWICK_GEMM_TUNE": "1"} if tune else {})}
        if not tune:
            environment.pop("CANDLEWICK_GEMM_TUNE", None)
        command = [program, "--matmuls", "--device", device, *(["--quick"] if quick else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def measure(self, shape: tuple, kind: str) -> dict:
        # A kernel that hangs ends with its process.
        watch = threading.Timer(ANSWER, self.process.kill)
        watch.start()
        try:
            self.process.stdin.write(" ".join(map(str, [*shape, kind])) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watch.cancel()
        try:
            return json.loads(answer)
        except ValueError:
            return {"error": answer.strip() or f"ops-bench ended, or gave no answer in {ANSWER:.0f} s"}

    def end(self):
        self.process.kill()
        self.process.wait()


class Torch:
    """torch in this process."""

    def __init__(self, device: str, quick: bool):
        import torch
        self.torch, self.device = torch, device
        self.idle, self.burst, self.sustained = (0.0, 1e-3, 4e-3) if quick else (1.0, 1e-2, 2.0)

    def seconds(self, x, w, n: int) -> float:
        synchronize = self.torch.cuda.synchronize if self.device != "cpu" else lambda: None
        synchronize()
        began = time.perf_counter()
        for _ in range(n):
            self.torch.nn.functional.linear(x, w)
        synchronize()
        return (time.perf_counter() - began) / n

    def measure(self, shape: tuple, kind: str) -> dict:
        t, k, n = shape
        make = lambda *size: self.torch.randn(size, device=self.device, dtype=self.torch.bfloat16)
        x, w = make(t, k), make(n, k)
        self.seconds(x, w, 2)
        a_run = self.seconds(x, w, 3)
        if kind == "burst":
            time.sleep(self.idle)
            runs = max(10, count(self.burst, a_run))
            a_run = self.seconds(x, w, runs)
        else:
            runs, total, began, batch = 0, 0.0, time.perf_counter(), count(self.sustained / 20, a_run)
            while runs == 0 or time.perf_counter() - began < self.sustained:
                of_batch = self.seconds(x, w, batch) * batch
                if time.perf_counter() - began >= self.sustained / 2:
                    runs, total = runs + batch, total + of_batch
            a_run = total / runs
        return {"tflop_s": 2 * t * k * n / a_run / 1e12, "ms": 1e3 * a_run, "runs": runs}

    def end(self):
        pass


def count(seconds: float, a_run: float) -> int:
    return min(max(round(seconds / max(a_run, 1e-6)), 1), 10_000)


def started(args) -> dict:
    """Returns the sides, or of torch the error of its import."""
    sides = {side: OpsBench(args.ops_bench, args.device, args.quick, side == "tuned") for side in ("first", "tuned")}
    try:
        sides["torch"] = Torch(args.device, args.quick)
    except ImportError as error:
        print(f"torch is not measured: {error}")
    return sides


def line(row: dict) -> str:
    parts = []
    for side in SIDES:
        found = row.get(side)
        if found:
            parts.append(f"{side} {found['error']}" if "error" in found else
                         f"{side} {found['tflop_s']:6.1f} TFLOP/s {gpu_smi.text(found.get('gpu'))}".rstrip())
    return f"{row['t']:5} x {row['k']:5} x {row['n']:5} {row['kind']:9} " + "; ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops_bench")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the script")
    args = parser.parse_args()
    end, rows, sides = time.monotonic() + args.seconds, [], started(args)
    with gpu_smi.sampled() as samples:
        for shape in TINY if args.quick else SHAPES:
            for kind in KINDS:
                # All sides of a row need about three seconds each.
                if time.monotonic() > end - (0 if args.quick else 10):
                    break
                row = dict(zip("tkn", shape), kind=kind)
                # The side that begins changes: the card is cooler for it.
                turn = len(rows) % len(sides)
                for side in [*sides][turn:] + [*sides][:turn]:
                    row[side] = sides[side].measure(shape, kind)
                    # A burst is shorter than the time between two samples.
                    if kind == "sustained":
                        row[side]["gpu"] = samples.summary(time.time() - COUNTED)
                rows.append(row)
                print(line(row), flush=True)
                args.out.write_text(json.dumps(rows, indent=1))
    for side in sides.values():
        side.end()
    failed = [row for row in rows for side in SIDES if "error" in row.get(side, {})]
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
