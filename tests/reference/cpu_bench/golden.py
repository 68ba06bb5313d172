"""Compares results with golden ones of an earlier run, by the names of the cases."""

import argparse
import json
from pathlib import Path

# The ratio to the peer of one call varies by this much on a virtual machine; the peak memory hardly varies.
SPEED_TOLERANCE, MEMORY_TOLERANCE = 0.15, 0.05


def golden_file(path: str) -> dict[str, dict]:
    """Reads the results of an earlier run, by name."""
    try:
        return {result["name"]: result for result in json.loads(Path(path).read_text())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{path} has no results of an earlier run: {error}") from error


def regressions(results: list[dict], golden: dict[str, dict]) -> list[str]:
    """Returns a line for each case that is slower or needs more memory than its golden result, relative to the peer.

    The best round counts for speed. Cases without a golden result, or without a peer's result, are skipped. It is an error
    if all are.
    """
    both = [(result, golden[result["name"]]) for result in results if result["name"] in golden]
    both = [(result, known) for result, known in both if result["ratio"] is not None and known["ratio"] is not None]
    if not both:
        return ["no case of this run has a golden result"]
    lines = []
    for result, known in both:
        if result["ratio_max"] < known["ratio"] * (1 - SPEED_TOLERANCE):
            lines.append(f"{result['name']}: x{result['ratio_max']:.3f} in the best round, golden x{known['ratio']:.3f}")
        if result["rss_ratio"] > known["rss_ratio"] * (1 + MEMORY_TOLERANCE):
            lines.append(f"{result['name']}: memory x{result['rss_ratio']:.2f}, golden x{known['rss_ratio']:.2f}")
    return lines
