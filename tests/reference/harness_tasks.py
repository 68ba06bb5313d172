"""Runs tasks on real data with lm-evaluation-harness and `evaluator run`, alternately, and compares every response.

    pip install lm-eval==0.4.13 accelerate torch==2.11.0 transformers==5.17.0
    python harness_tasks.py DATA MODEL EVALUATOR FOLDER [--tasks arc_easy,piqa] [--limit 200] [--num-fewshot 2]
        [--chat] [--multiturn] [--system TEXT] [--rounds 3] [--keep FILE | --against FILE]

DATA is as for harness_answers.py, with arc_easy_train.jsonl, openbookqa_train.jsonl and also gsm8k/train.jsonl; FOLDER gets the
output. Prints a Markdown row for each task: documents, the largest difference of a log-probability, texts that differ, metrics
that differ at four decimals (above 1 by a relative 1e-4), and the seconds of both sides. The harness's seconds exclude model loading;
ours are of the whole process. Fails if a log-probability is off by more than 1e-3 or a metric differs.

`--keep` writes a summary of the harness's side to a file after each task; the files in `harness_tasks` were made this way.
`--against` compares with such a file and needs no harness; the harness's seconds are then nan.
"""

import argparse
import hashlib
import json
import math
import shutil
import statistics
import subprocess
import time
from pathlib import Path

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
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--multiturn", action="store_true")
    parser.add_argument("--system")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--against", type=Path)
    asked = parser.parse_args()
    shutil.rmtree(asked.folder, ignore_errors=True)
    kept = json.loads(asked.against.read_text()) if asked.against else {}
    lm = None if asked.against else harness_model(asked)
    print("| task | documents | largest difference | other texts | other metrics | harness s | ours s | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    is_good = True
    for task in asked.tasks.split(","):
        theirs, ours, seconds = rounds(asked, lm, task, kept)
        worst, texts, metrics = compare(theirs, ours)
        is_good &= worst <= 1e-3 and not metrics
        cells = [task, str(len(ours["answers"])), f"{worst:.1e}", str(texts), ", ".join(metrics) or "none",
                 *(f"{statistics.median(side):.1f}" for side in zip(*seconds)), spread([a / b for a, b in seconds])]
        print("| " + " | ".join(cells) + " |", flush=True)
        if asked.keep:
            lines = [f"  {json.dumps(task)}: {json.dumps(side)}" for task, side in kept.items()]
            asked.keep.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    raise SystemExit(0 if is_good else 1)


def rounds(asked, lm, task: str, kept: dict) -> tuple[dict, dict, list]:
    """Returns the results of both sides and their seconds in each round."""
    seconds = []
    for _ in range(asked.rounds):
        theirs, their_seconds = (kept[task], math.nan) if asked.against else harness(asked, lm, task)
        ours, our_seconds = evaluator(asked, task)
        seconds.append((their_seconds, our_seconds))
    kept[task] = theirs
    return theirs, ours, seconds


def spread(ratios: list) -> str:
    median = f"{statistics.median(ratios):.2f}"
    return median if len(ratios) == 1 else f"{median} ({min(ratios):.2f} to {max(ratios):.2f})"


def harness_model(asked):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(asked.model), dtype="float32", device="cpu", batch_size=asked.batch_size)


def lay_out(asked, task: str) -> Path:
    """Creates a folder with a file per split."""
    folder = asked.folder / "data" / task
    folder.mkdir(parents=True, exist_ok=True)
    for split, name in TASKS[task][1].items():
        shutil.copy(asked.data / f"{name}.jsonl", folder / f"{split}.jsonl")
    return folder.resolve()


def harness(asked, lm, task: str) -> tuple[dict, float]:
    import lm_eval
    from lm_eval.tasks import TaskManager

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
                                    gen_kwargs=f"max_gen_toks={asked.max_gen_toks}" if task == "gsm8k" else None,
                                    num_fewshot=asked.num_fewshot, apply_chat_template=asked.chat,
                                    fewshot_as_multiturn=asked.multiturn, system_instruction=asked.system)
    seconds = time.perf_counter() - began
    return {"metrics": numbers(found["results"][task]), "answers": answers(found["samples"][task])}, seconds


def numbers(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if isinstance(value, float) and not math.isnan(value)}


def answers(samples: list) -> dict:
    """Returns the responses to each document, texts as hashes. A sample occurs once per filter."""
    return {str(sample["doc_id"]): [short(answer) for answer in flat(sample["resps"])] for sample in samples}


def short(answer):
    """Formats a number with five decimals."""
    if isinstance(answer, bool) or answer in ("True", "False"):
        return str(answer) == "True"
    if isinstance(answer, str) and not is_number(answer):
        return hashlib.sha256(answer.encode()).hexdigest()[:12]
    return round(float(answer), 5)


def evaluator(asked, task: str) -> tuple[dict, float]:
    out = asked.folder / "ours" / task
    shutil.rmtree(out, ignore_errors=True)
    command = [asked.evaluator, "run", "--model", asked.model, "--tasks", task, "--data", f"{task}={lay_out(asked, task)}",
               "--limit", asked.limit, "--dtype", "f32", "--device", "cpu", "--compat", "lm-eval", "--bootstrap-iters", 0,
               "--log-samples", "--output-path", out, "--report-samples", 0]
    if task == "gsm8k":
        command += ["--gen-kwargs", f"max_gen_toks={asked.max_gen_toks}"]
    if asked.num_fewshot is not None:
        command += ["--num-fewshot", asked.num_fewshot]
    command += ["--apply-chat-template"] if asked.chat else []
    command += ["--fewshot-as-multiturn", str(asked.multiturn).lower()] if asked.chat else []
    command += ["--system-instruction", asked.system] if asked.system else []
    began = time.perf_counter()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    (results,) = out.glob("*/results_*.json")
    (samples,) = out.glob("*/samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return {"metrics": json.loads(results.read_text())["results"][task], "answers": answers(rows)}, seconds


def compare(theirs: dict, ours: dict) -> tuple[float, int, list]:
    """Returns the largest log-probability difference, the number of differing texts, and metrics that differ at four decimals."""
    worst, texts = 0.0, 0
    for doc, answered in theirs["answers"].items():
        for a, b in zip(answered, ours["answers"][doc], strict=True):
            if isinstance(a, (bool, str)):
                texts += a != b
            else:
                # A sum over a long text has a relative tolerance.
                worst = max(worst, abs(a - b) / max(1.0, abs(a) / 100))
    # A perplexity of thousands is not exact to four decimals: exp multiplies the rounding of its argument.
    differ = [name for name in theirs["metrics"]
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
