"""The peers' side of each case: the jobs of peer.py. The peer of profiling is our program without it."""

import json
import shutil

from cases import Case, config
from inputs import Inputs
from ours import Ours
from process import peer_command, run, seconds_until

# Large blocks come from the heap in huge pages and are never returned, so that each page is touched first only once.
KEEP = {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.hugetlb=1"}


class Peers:
    def __init__(self, ours: Ours, inputs: Inputs):
        self.ours, self.inputs = ours, inputs

    def measure(self, case: Case, peer: str) -> tuple[float, float]:
        """Returns the case's number and the peak memory in MiB."""
        if case.what == "profile":
            return self.ours.train(case)
        command = peer_command(case.what, self.job(case) | {"compiled": peer == "compile"})
        if case.what == "start":
            return seconds_until(command, "Train iter: 1/")
        ran = run(command, KEEP if peer == "keep" else None)
        return json.loads(ran.said.splitlines()[-1]), ran.rss

    def job(self, case: Case) -> dict:
        job = {"config": config(case), "rows": case.rows, "accumulated": case.accumulated, "warm": case.warm,
               "recomputed": bool(case.recomputed), "steps": case.steps, "dtype": case.dtype, "lora": case.lora}
        if case.what == "data":
            cache = self.inputs.folder / "peer-cache"
            shutil.rmtree(cache, ignore_errors=True)
            return {"text": str(self.inputs.text(case.length)), "cache": str(cache),
                    "tokenizer": str(self.inputs.tokenizer(case) / "tokenizer.json")}
        n_rows = {"decode": 1, "eval": case.steps}.get(case.what, case.rows * case.accumulated * case.steps)
        job["ids"] = str(self.inputs.ids(case, n_rows))
        if case.what in ("eval", "decode", "start"):
            job["folder"] = str(self.inputs.model(case))
        if case.what in ("save", "load"):
            job |= self.saved(case, job)
        return job

    def saved(self, case: Case, job: dict) -> dict:
        """Returns the folder of a checkpoint; for a load it holds one."""
        kind = case.name.split()[1]
        path = self.inputs.folder / f"peer-{kind}"
        if case.what == "save":
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        elif not path.exists():
            run(peer_command("save", job | {"kind": kind, "path": str(path)}))
        return {"kind": kind, "path": str(path)}


def ceilings(size: int) -> dict:
    """Measures the machine's ceilings with torch."""
    return json.loads(run(peer_command("ceilings", {"size": size})).said.splitlines()[-1])
