"""Runs tasks on real data with lm-evaluation-harness and with `evaluator run`, one after the other, and compares every answer.

    pip install lm-eval==0.4.13 accelerate torch==2.11.0 transformers==5.17.0
    python harness_tasks.py DATA MODEL EVALUATOR FOLDER [--tasks arc_easy,piqa] [--limit 200]

DATA is as for harness_answers.py, with arc_easy_train.jsonl, openbookqa_train.jsonl and gsm8k/train.jsonl besides; FOLDER is for what
is written. Prints a Markdown row for each task: documents, the largest difference of a log-probability, texts that differ, metrics
that differ at four decimals (above 1 by 1e-4 of their size), and the seconds of both sides. The harness's are of the evaluation alone, with a model that is loaded;
ours are of the whole process. Fails where a log-probability is off by more than 1e-3 or a metric differs.
"""

import argparse
import json
import math
import shutil
import subprocess
import time
from pathlib import Path

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

# The harness's task file, and the files of the splits.
TASKS = {
    "arc_easy": ("arc/arc_easy.yaml", {"train": "arc_easy_train", "validation": "arc_easy_test", "test": "arc_easy_test"}),
    "openbookqa": ("openbookqa/openbookqa.yaml",
                   {"train": "openbookqa_train", "validation": "openbookqa_test", "test": "openbookqa_test"}),
    "piqa": ("piqa/piqa.yaml", {"train": "piqa_validation", "validation": "piqa_validation"}),
    "lambada_openai": ("lambada/lambada_openai.yaml", {"test": "lambada_test"}),
    "wikitext": ("wikitext/wikitext.yaml", {"train": "wikitext2_test", "validation": "wikitext2_test", "test": "wikitext2_test"}),
    "gsm8k": ("gsm8k/gsm8k.yaml", {"train": "gsm8k/train", "test": "gsm8k/test"}),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("data", "model", "evaluator", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-gen-toks", type=int, default=256)
    asked = parser.parse_args()
    shutil.rmtree(asked.folder, ignore_errors=True)
    lm = HFLM(pretrained=str(asked.model), dtype="float32", device="cpu", batch_size=asked.batch_size)
    print("| task | documents | largest difference | other texts | other metrics | harness s | ours s | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    is_good = True
    for task in asked.tasks.split(","):
        theirs, their_seconds = harness(asked, lm, task)
        ours, our_seconds = evaluator(asked, task)
        worst, texts, metrics = compare(theirs, ours)
        is_good &= worst <= 1e-3 and not metrics
        cells = [task, str(len({sample["doc_id"] for sample in ours["samples"]})), f"{worst:.1e}", str(texts), ", ".join(metrics) or "none",
                 f"{their_seconds:.1f}", f"{our_seconds:.1f}", f"{their_seconds / our_seconds:.2f}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    raise SystemExit(0 if is_good else 1)


def lay_out(asked, task: str) -> Path:
    """A folder with a file for each split."""
    folder = asked.folder / "data" / task
    folder.mkdir(parents=True, exist_ok=True)
    for split, name in TASKS[task][1].items():
        shutil.copy(asked.data / f"{name}.jsonl", folder / f"{split}.jsonl")
    return folder.resolve()


def harness(asked, lm, task: str) -> tuple[dict, float]:
    data = lay_out(asked, task)
    tasks = asked.folder / "tasks" / task
    tasks.mkdir(parents=True, exist_ok=True)
    original = Path(lm_eval.__file__).parent / "tasks" / TASKS[task][0]
    files = {split: str(data / f"{split}.jsonl") for split in TASKS[task][1]}
    keys = {"task": task, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    (tasks / f"{task}.yaml").write_text(
        f"include: {original}\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    began = time.perf_counter()
    found = lm_eval.simple_evaluate(model=lm, tasks=[task], limit=asked.limit, task_manager=manager, bootstrap_iters=0,
                                    gen_kwargs=f"max_gen_toks={asked.max_gen_toks}" if task == "gsm8k" else None)
    seconds = time.perf_counter() - began
    return {"metrics": found["results"][task], "samples": found["samples"][task]}, seconds


def evaluator(asked, task: str) -> tuple[dict, float]:
    out = asked.folder / "ours" / task
    command = [asked.evaluator, "run", "--model", asked.model, "--tasks", task, "--data", f"{task}={lay_out(asked, task)}",
               "--limit", asked.limit, "--dtype", "f32", "--device", "cpu", "--compat", "lm-eval", "--bootstrap-iters", 0,
               "--log-samples", "--output-path", out, "--report-samples", 0]
    if task == "gsm8k":
        command += ["--gen-kwargs", f"max_gen_toks={asked.max_gen_toks}"]
    began = time.perf_counter()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    (results,) = out.glob("*/results_*.json")
    (samples,) = out.glob("*/samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return {"metrics": json.loads(results.read_text())["results"][task], "samples": rows}, seconds


def compare(theirs: dict, ours: dict) -> tuple[float, int, list]:
    """The largest difference of a log-probability, how many texts differ, and the metrics that do at four decimals."""
    by_doc = {sample["doc_id"]: sample for sample in ours["samples"]}
    worst, texts, seen = 0.0, 0, set()
    for sample in theirs["samples"]:
        # A sample comes once for each filter.
        if sample["doc_id"] in seen:
            continue
        seen.add(sample["doc_id"])
        pairs = zip(flat(sample["resps"]), flat(by_doc[sample["doc_id"]]["resps"]), strict=True)
        for a, b in pairs:
            if isinstance(a, str) and not is_number(a):
                texts += a != b
            elif not isinstance(a, bool) and a not in ("True", "False"):
                # Of long texts the sum of many is as exact as its size lets it be.
                worst = max(worst, abs(float(a) - float(b)) / max(1.0, abs(float(a)) / 100))
    names = [name for name, value in theirs["metrics"].items() if isinstance(value, float) and not math.isnan(value)]
    # A perplexity of thousands has no four decimals: it multiplies the rounding of what it is the exponential of.
    differ = [name for name in names
              if abs(value_of(ours, name) - theirs["metrics"][name]) > max(5e-5, 1e-4 * abs(theirs["metrics"][name]))]
    return worst, texts, differ


def value_of(ours: dict, name: str) -> float:
    value = ours["metrics"].get(name)
    return value if isinstance(value, float) else math.inf if value is None else float(value)


def flat(resps):
    for item in resps:
        if isinstance(item, (list, tuple)):
            yield from flat(item)
        else:
            yield item


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("True", "False")
    return True


if __name__ == "__main__":
    main()
