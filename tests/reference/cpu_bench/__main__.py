#!/usr/bin/env python3
"""Benchmarks our programs against their peers on this machine's CPU: cpu_bench TRAINER EVALUATOR [OPTIONS].

scripts/bench lists the options.

A round runs each side once, in processes of their own, with equal data, shapes and number of threads. The ratio of a case
is the median over its rounds, printed with the smallest and the largest.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from cases import CASES, PEERS, QUICK, Case
from golden import golden_file, regressions
from inputs import Inputs
from ours import Ours
from peers import Peers, ceilings
from process import N_THREADS, Failed
from table import HEAD, Table


def main() -> None:
    options = arguments()
    cases = [case for case in (QUICK if options.quick else CASES) if options.only in case.name]
    said = ceilings(256 if options.quick else 2048)
    print(f"{N_THREADS} threads; by torch: f32 product {said['gflops']:.1f} GFLOP/s, triad {said['gb_per_second']:.1f} GB/s")
    print(HEAD, flush=True)
    table = Table(options.json)
    with tempfile.TemporaryDirectory() as folder:
        inputs = Inputs(Path(folder))
        ours = Ours(options.trainer, options.evaluator, inputs)
        peers = Peers(ours, inputs)
        for case in cases:
            others = [peer for peer in options.peers if peer in case.peers]
            if not others:
                continue
            rounds = [(ours.measure(case), [survived(peers, case, peer) for peer in others])
                      for _ in range(options.rounds)]
            for n, peer in enumerate(others):
                table.add(case, peer, [our for our, _ in rounds], [theirs[n] for _, theirs in rounds])
    found = regressions(table.results, options.golden) if options.golden else []
    if found:
        sys.exit("\n".join(["differences from the golden results:", *found]))


def survived(peers: Peers, case: Case, peer: str) -> tuple[float, float] | None:
    """Returns a peer's measurement; None if it failed on a sequence that may be too long for it."""
    try:
        return peers.measure(case, peer)
    except Failed:
        if not case.recomputed:
            raise
        return None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench cpu")
    parser.add_argument("trainer")
    parser.add_argument("evaluator")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--golden", metavar="FILE", type=golden_file)
    parser.add_argument("--only", metavar="TEXT", default="")
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    parser.add_argument("--peers", metavar="LIST", type=peer_list, default=["eager"])
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def peer_list(text: str) -> list[str]:
    chosen = text.split(",")
    for peer in chosen:
        if peer not in PEERS:
            raise argparse.ArgumentTypeError(f"{peer!r} is none of {', '.join(PEERS)}")
    return chosen


if __name__ == "__main__":
    main()
