"""Compares results with golden ones of an earlier run, by the names of the cases."""

import json
from pathlib import Path

# The ratio to the peer of one call varies by this much on a virtual machine; the peak memory hardly varies.
SPEED_TOLERANCE, MEMORY_TOLERANCE = 0.15, 0.05


def regressions(results: list[dict], path: Path) -> list[str]:
    """Returns a line for each case that is slower or needs more memory than its golden result, relative to the peer.

    The best round counts for speed. Cases without a golden result, or without a peer's result, are skipped.
    """
    golden = {result["name"]: result for result in json.loads(path.read_text())}
    lines = []
    for result in results:
        known = golden.get(result["name"])
        if known is None or result["ratio"] is None or known["ratio"] is None:
            continue
        if result["ratio_max"] < known["ratio"] * (1 - SPEED_TOLERANCE):
            lines.append(f"{result['name']}: x{result['ratio_max']:.3f} in the best round, golden x{known['ratio']:.3f}")
        if result["rss_ratio"] > known["rss_ratio"] * (1 + MEMORY_TOLERANCE):
            lines.append(f"{result['name']}: memory x{result['rss_ratio']:.2f}, golden x{known['rss_ratio']:.2f}")
    return lines
