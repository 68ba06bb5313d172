"""Writes trainer/src/checkpoint/tests/quickstart_losses.txt: the losses of a long run of the quickstart, for the loss watchdog.

    trainer train recipes/quickstart.yaml output_dir=runs/long epochs=null train_iters=3000 train_log_iter_interval=1
    python tests/reference/quickstart_losses.py runs/long
"""

import json
import sys
from pathlib import Path

TARGET = Path(__file__).parents[2] / "trainer/src/checkpoint/tests/quickstart_losses.txt"

rows = [json.loads(line) for line in (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines()]
losses = [f"{row['loss']:.4g}" for row in rows if "loss" in row]
TARGET.write_text("".join(" ".join(losses[i : i + 15]) + "\n" for i in range(0, len(losses), 15)))
