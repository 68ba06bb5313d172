"""Our side of each case: the command of a program, and the number read from its output."""

import json
import shutil
import statistics
from pathlib import Path

from cases import Case, config
from inputs import Inputs
from process import run, seconds_until

LORA = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


class Ours:
    def __init__(self, trainer: str, evaluator: str, inputs: Inputs):
        self.trainer, self.evaluator, self.inputs = trainer, evaluator, inputs
        self.run_folder = inputs.folder / "run"

    def measure(self, case: Case) -> tuple[float, float]:
        """Returns the case's number and the peak memory in MiB."""
        return getattr(self, case.what)(case)

    def train(self, case: Case, arguments: tuple = ()) -> tuple[float, float]:
        ran = run([self.trainer, "-q", "train", self.recipe(case), *arguments])
        speeds = [record["tokens_per_second"] for record in self.records("tokens_per_second")]
        return statistics.median(speeds[case.warm:]), ran.rss

    def profile(self, case: Case) -> tuple[float, float]:
        return self.train(case, ("--profile", "tottime"))

    def eval(self, case: Case) -> tuple[float, float]:
        rows = self.inputs.rows(case, case.steps)
        ran = run([self.evaluator, "score", "--model", self.inputs.model(case), "--data", rows, "--dtype", case.dtype,
                   "--timings"])
        timings = json.loads(ran.complained.splitlines()[-1])
        assert timings["tokens"] == case.steps * (case.length - 1), timings
        return timings["tokens_per_second"], ran.rss

    def decode(self, case: Case) -> tuple[float, float]:
        prompt = json.loads(self.inputs.rows(case, 1).read_text())["text"]
        ran = run([self.evaluator, "generate", "--raw", "--model", self.inputs.model(case), "--prompt", prompt,
                   "--dtype", case.dtype, "--max-new-tokens", case.steps, "--timings"])
        timings = json.loads(ran.complained.splitlines()[-1])
        assert (timings["prompt_tokens"], timings["new_tokens"]) == (case.length, case.steps), timings
        return timings["tokens_per_second"], ran.rss

    def start(self, case: Case) -> tuple[float, float]:
        recipe = self.recipe(case, model={"name_or_path": str(self.inputs.model(case)), "dtype": "f32"})
        run([self.trainer, "-q", "preprocess", recipe])
        return seconds_until([self.trainer, "train", recipe], "Train iter: 1/")

    def save(self, case: Case) -> tuple[float, float]:
        """Times both kinds of checkpoints, written at the end of one step."""
        kind = {"checkpoint": "sharded", "huggingface": "huggingface"}[case.name.split()[1]]
        folder = self.inputs.folder / f"ours-{kind}"
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint = {"type": kind, "output_dir": str(folder), "save_end_of_training": True}
        ran = run([self.trainer, "-q", "train", self.recipe(case, checkpoint=[checkpoint])])
        (record,) = self.records("save_time")
        return record["save_time"], ran.rss

    def load(self, case: Case) -> tuple[float, float]:
        """Resumes a finished run: everything is read, nothing is trained."""
        folder = self.inputs.folder / "ours-sharded"
        checkpoint = {"type": "sharded", "output_dir": str(folder), "save_end_of_training": True}
        if not folder.exists():
            run([self.trainer, "-q", "train", self.recipe(case, checkpoint=[checkpoint])])
        checkpoint["auto_resume"] = True
        ran = run([self.trainer, "-q", "train", self.recipe(case, checkpoint=[checkpoint])])
        (record,) = self.records("resume_time")
        return record["resume_time"], ran.rss

    def data(self, case: Case) -> tuple[float, float]:
        """Times the whole process: tokens are written to the cache, rows are packed."""
        text = self.inputs.text(case.length)
        recipe = self.inputs.folder / "recipe.yaml"
        cache = self.inputs.folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        recipe.write_text(json.dumps({
            "type": "causal", "device": "cpu", "output_dir": str(self.run_folder),
            "model": {"config": config(case), "dtype": "f32"},
            "tokenizer": {"name_or_path": str(self.inputs.tokenizer(case))},
            "data": {"sources": [str(text)], "max_length": 1024, "truncation": "split", "pack_samples": True,
                     "cache_dir": str(cache)},
        }))
        ran = run([self.trainer, "-q", "preprocess", recipe])
        return text.stat().st_size / 1e6 / ran.seconds, ran.rss

    def recipe(self, case: Case, **keys) -> Path:
        """Returns a recipe of `steps` steps on rows of exactly `length` tokens."""
        rows = self.inputs.rows(case, case.rows * case.accumulated * case.steps)
        shutil.rmtree(self.run_folder, ignore_errors=True)
        path = self.inputs.folder / "recipe.yaml"
        path.write_text(json.dumps({
            "type": "causal", "device": "cpu", "output_dir": str(self.run_folder),
            "model": {"config": config(case), "dtype": "f32" if case.dtype == "f32" else "bf16",
                      "activation_checkpoint": case.recomputed or "none", **({"peft_config": LORA} if case.lora else {})},
            "deepspeed": {"bf16": {"bf16_master_weights_and_grads": case.dtype == "pure-bf16",
                                   "bf16_optimizer_states": case.dtype == "pure-bf16"}},
            "tiled_mlp_compute": bool(case.recomputed),
            "tokenizer": {"name_or_path": str(self.inputs.tokenizer(case))},
            "data": {"sources": [str(rows)], "max_length": case.length, "cache_dir": str(self.inputs.folder / "cache")},
            "micro_batch_size": case.rows, "gradient_accumulation_steps": case.accumulated, "train_iters": case.steps,
            "optimizer": {"learning_rate": 1e-4}, "train_log_iter_interval": 1, "checkpoint": "none", **keys,
        }))
        return path

    def records(self, key: str) -> list[dict]:
        lines = (self.run_folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if key in record]
