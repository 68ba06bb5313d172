"""Clock, power and temperature of the GPU by nvidia-smi, sampled while something runs."""
import contextlib
import math
import shutil
import statistics
import subprocess
import threading
import time

# Fields of nvidia-smi, and our names. The last has bits: 4 is the power limit, 0x20 and 0x40 are temperatures.
FIELDS = {"clocks.sm": "sm_mhz", "power.draw": "power_w", "temperature.gpu": "temperature_c",
          "clocks_event_reasons.active": "reasons"}


def number(text: str) -> float | None:
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None


class Samples:
    """Samples of a process of nvidia-smi that prints a line every 100 ms."""

    def __init__(self):
        self.rows = []

    def read(self, lines):
        for line in lines:
            values = [number(text.strip()) for text in line.split(",")]
            if len(values) == len(FIELDS):
                self.rows.append({**dict(zip(FIELDS.values(), values)), "at": time.time()})

    def summary(self, since: float = 0, until: float = math.inf) -> dict:
        """Returns the medians of clock and power, the extremes, and the reasons of lower clocks, between two times of time.time()."""
        rows = [row for row in self.rows if since <= row["at"] <= until]
        of = {name: [row[name] for row in rows if row[name] is not None] for name in FIELDS.values()}
        if not of["sm_mhz"]:
            return {}
        found = {"samples": len(rows), "sm_mhz": statistics.median(of["sm_mhz"]), "sm_mhz_min": min(of["sm_mhz"])}
        if of["power_w"]:
            found |= {"power_w": statistics.median(of["power_w"]), "power_w_max": max(of["power_w"])}
        if of["temperature_c"]:
            found["temperature_c"] = max(of["temperature_c"])
        reasons = 0
        for bits in of["reasons"]:
            reasons |= int(bits)
        return {**found, "reasons": f"{reasons:#x}"}


@contextlib.contextmanager
def sampled():
    """Samples the first GPU until the end of the block. Without nvidia-smi there are no samples."""
    samples = Samples()
    program = shutil.which("nvidia-smi")
    if program is None:
        yield samples
        return
    command = [program, "--id=0", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "--loop-ms=100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        reader = threading.Thread(target=samples.read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            yield samples
        finally:
            process.kill()
            reader.join()


def text(summary: dict | None) -> str:
    if not summary:
        return ""
    of = lambda name, unit: f"{summary[name]:.0f} {unit}" if name in summary else ""
    parts = [of("sm_mhz", "MHz"), of("power_w", "W"), of("temperature_c", "°C"), f"reasons {summary['reasons']}"]
    return ", ".join(part for part in parts if part)
