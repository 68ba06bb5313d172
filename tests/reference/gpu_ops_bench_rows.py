"""A row of ops-bench.json as a line of a table: ours, torch's, and how near the ceiling ours is.

`!` is less than 85 % of the ceiling, `h` a device that waited for the host.
"""

HEAD = (f"{'op':21} {'what':8} {'shape':40} {'ours ms':>9} {'fwd ms':>8} {'torch ms':>9} {'ratio':>7} {'speed':>11} "
        f"{'ceiling':>7}")


def line(row):
    shape = " ".join(f"{name}={n}" for name, n in row["shape"].items())
    speed = f"{row['gb_s']:6.0f} GB/s" if row["bound"] == "memory" else f"{row['tflop_s']:6.0f} TF/s"
    torch_ms = row.get("torch_ms")
    beside = f"{torch_ms:9.4f} {torch_ms / row['ms']:6.2f}x" if torch_ms else f"{'-':>9} {'-':>7}"
    flags = "!" if row["fraction_of_ceiling"] < 0.85 else " "
    flags += "h" if row["host_ms"] > 0.9 * (row["ms"] + row["forward_ms"]) else " "
    return (f"{row['op']:21} {row['what'].replace('forward+backward', 'both'):8} {shape:40} {row['ms']:9.4f} "
            f"{row['forward_ms']:8.4f} {beside} {speed} {row['fraction_of_ceiling']:6.1%} {flags} {row.get('torch_how', '')}{te(row)}")


def te(row):
    """Returns TransformerEngine's time of a row, if gpu_te_bench.py has added it."""
    return f" TE {row['te_ms']:.4f} ms {row['te_ms'] / row['ms']:.2f}x" if row.get("te_ms") else ""
