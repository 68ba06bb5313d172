"""Formats rounds as lines of the table and as JSON."""

import json
import statistics
from pathlib import Path

from cases import Case

HEAD = f"{'case':46} {'ours':>9} {'peer':>9} unit      ratio (lowest to highest)   memory"


class Table:
    """Prints lines immediately and rewrites the JSON file atomically."""

    def __init__(self, path: str | None):
        self.path, self.results = path and Path(path), []

    def add(self, case: Case, peer: str, ours: list[tuple], theirs: list[tuple | None]) -> None:
        """Adds a line. `ours` and `theirs` are the numbers and the memory of each round; None if a peer failed in one."""
        result = compare(case, peer, ours, theirs)
        self.results.append(result)
        print(line(case, result), flush=True)
        if self.path:
            self.path.write_text(json.dumps(self.results, indent=1) + "\n")


def compare(case: Case, peer: str, ours: list[tuple], theirs: list[tuple]) -> dict:
    """Computes the ratios. A ratio above 1 means that we are faster, an rss_ratio below 1 that we need less memory."""
    if None in theirs:
        return named(case, peer) | {"ours": statistics.median(our[0] for our in ours), "peer": None, "ratio": None,
                                    "rss_ratio": None, "rss_mib": max(our[1] for our in ours), "peer_rss_mib": None}
    pairs = [(our[0], their[0]) for our, their in zip(ours, theirs)]
    ratios = [their / our if case.lower_is_better else our / their for our, their in pairs]
    return named(case, peer) | {
        "ours": statistics.median(our for our, _ in pairs),
        "peer": statistics.median(their for _, their in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "rss_ratio": statistics.median(our[1] / their[1] for our, their in zip(ours, theirs)),
        "rss_mib": max(our[1] for our in ours),
        "peer_rss_mib": max(their[1] for their in theirs),
    }


def named(case: Case, peer: str) -> dict:
    return {"name": case.name if peer == "eager" else f"{case.name} compared with {peer}", "unit": case.unit}


def line(case: Case, result: dict) -> str:
    if result["ratio"] is None:
        return f"{result['name']:46} {result['ours']:9.2f} {'ended':>9} {result['unit']:9} {result['rss_mib']:.0f} MiB"
    ratio = f"x{result['ratio']:.3f} ({result['ratio_min']:.3f} to {result['ratio_max']:.3f})"
    end = f"x{result['rss_ratio']:.2f}"
    if case.what == "profile":
        end += f"   overhead {100 * (1 / result['ratio'] - 1):.1f} %"
    return f"{result['name']:46} {result['ours']:9.2f} {result['peer']:9.2f} {result['unit']:9} {ratio:27} {end}"
