#!/usr/bin/env python3
"""Runs lm-evaluation-harness on tiny tasks and records prompts, samples, scores and tables.

    $ pip install lm-eval==0.4.13 langdetect nltk immutabledict
    $ python tests/reference/lm_eval_tasks.py

reads evaluator/tests/fixtures/lm_eval/{tasks,data} and writes evaluator/tests/fixtures/lm_eval/expected. No model is
needed: responses are computed from a hash of the request (see `Canned`), here and in the test that reads the files.
Built-in tasks are compared with the harness's task files of that name, on our data.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[2] / "evaluator/tests/fixtures/lm_eval"
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DISABLE_MULTIPROC": "1"}
os.environ["HF_HOME"] = tempfile.mkdtemp()

import lm_eval  # noqa: E402
import numpy as np  # noqa: E402
import yaml  # noqa: E402
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.loggers import EvaluationTracker  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval.utils import make_table  # noqa: E402

HARNESS = Path(lm_eval.__file__).parent / "tasks"

SUMS = ["It is 18.\n#### 18", " 18", "so #### 7", "$1,200.", "no number", "-10 or 7", "#### 2.5 ", "#### 1200", "7"]
LETTERS = ["(A) it is", "I say the big, dog", "a tree house.", ": C", "Two or 3", "(b)", "The Cat", "one", "x", ": D?", "zzz", "(A)\n(D)"]
BBH = ["False", "So the answer is True. Or not", "(A)", "I think May 2 too", ": B", "not plausible, no", "YES", "It is -1 or 20",
       "twenty", "the answer is 2. ", "fig apple pear fig", "b a b", "05/02."]
MATH = ["It is $\\frac12$", "0.5", "$\\sqrt3$", "x = 7", "7", "$a$ and $\\sqrt{3}$"]
PRO = ["so the answer is (A).", "answer is B", "Answer: C", "the answer is (C", "(A)"]
IFEVAL = ["One part******another, part", "one part******another part", "The answer is yes", "* is it?\n* yes\n<<Title>> *high* the end.",
          '"quoted is the END."', '```json\n{"a": [1]}\n```', "Answer. My answer is no.\n***\nsecond", "first [x] eee\n\nsecond e Section 1 a Section 2 b\nP.S. end",
          "", "*\nanswer is is is\n*"]

# Name: tasks, options of the run, and for built-in tasks their file in the harness and our data.
CASES = {
    # scikit-learn is slow with 2000 resamples; the other cases have fewer.
    "choices": {"tasks": ["fx_choices", "fx_many"], "num_fewshot": 2, "bootstrap_iters": 2000},
    "zero_shot": {"tasks": ["fx_choices", "fx_last_word", "fx_rolling", "fx_inputs"]},
    "inputs": {"tasks": ["fx_inputs"], "num_fewshot": 2},
    "generate": {"tasks": ["fx_generate"], "answers": SUMS, "limit": 5},
    "letters": {"tasks": ["fx_letters", "fx_targets", "fx_texts", "fx_choice_text"], "answers": LETTERS + ["yes", "no"], "num_fewshot": 0},
    "listed": {"tasks": ["fx_listed"], "answers": SUMS, "limit": 0.3},
    "groups": {"tasks": ["fx_all"]},
    "chat": {"tasks": ["fx_choices", "fx_inputs", "fx_letters"], "answers": LETTERS, "num_fewshot": 1, "chat": True, "system_instruction": "Be short."},
    "chat_turns": {"tasks": ["fx_many", "fx_letters", "fx_generate"], "answers": LETTERS, "num_fewshot": 2, "chat": True, "fewshot_as_multiturn": True, "limit": 2},
    "described": {"tasks": ["fx_many"], "num_fewshot": 1, "system_instruction": "Think.\n"},
    "arc": {"tasks": ["arc_easy", "arc_challenge"], "files": {"arc_easy": "arc/arc_easy", "arc_challenge": "arc/arc_challenge"}, "data": "arc", "num_fewshot": 2},
    "boolq": {"tasks": ["boolq"], "files": {"boolq": "super_glue/boolq/default"}, "data": "boolq", "num_fewshot": 1},
    "gsm8k": {"tasks": ["gsm8k", "gsm8k_cot_zeroshot"], "files": {"gsm8k": "gsm8k/gsm8k", "gsm8k_cot_zeroshot": "gsm8k/gsm8k-cot-zeroshot"}, "data": "gsm8k", "answers": SUMS + ["The answer is 7."]},
    "hellaswag": {"tasks": ["hellaswag"], "files": {"hellaswag": "hellaswag/hellaswag"}, "data": "hellaswag", "num_fewshot": 1},
    "lambada": {"tasks": ["lambada_openai"], "files": {"lambada_openai": "lambada/lambada_openai"}, "data": "lambada"},
    "openbookqa": {"tasks": ["openbookqa"], "files": {"openbookqa": "openbookqa/openbookqa"}, "data": "openbookqa"},
    "piqa": {"tasks": ["piqa"], "files": {"piqa": "piqa/piqa"}, "data": "piqa"},
    "sciq": {"tasks": ["sciq"], "files": {"sciq": "sciq/sciq"}, "data": "sciq"},
    "truthfulqa": {"tasks": ["truthfulqa_mc1", "truthfulqa_mc2"], "files": {"truthfulqa_mc1": "truthfulqa/truthfulqa_mc1", "truthfulqa_mc2": "truthfulqa/truthfulqa_mc2"}, "data": "truthfulqa", "num_fewshot": 5},
    "wikitext": {"tasks": ["wikitext"], "files": {"wikitext": "wikitext/wikitext"}, "data": "wikitext"},
    "winogrande": {"tasks": ["winogrande"], "files": {"winogrande": "winogrande/default"}, "data": "winogrande", "num_fewshot": 2},
    "mmlu": {"tasks": ["mmlu_anatomy", "mmlu_high_school_us_history"], "files": {"mmlu_anatomy": "mmlu/default/mmlu_anatomy", "mmlu_high_school_us_history": "mmlu/default/mmlu_high_school_us_history"}, "data": "mmlu", "num_fewshot": 2},
    "mmlu_pro": {"tasks": ["mmlu_pro_law", "mmlu_pro_math"], "files": {"mmlu_pro_law": "mmlu_pro/mmlu_pro_law", "mmlu_pro_math": "mmlu_pro/mmlu_pro_math"}, "data": "mmlu_pro", "answers": PRO, "num_fewshot": 2},
    "math": {"tasks": ["hendrycks_math_algebra", "hendrycks_math_precalc"], "files": {"hendrycks_math_algebra": "hendrycks_math/hendrycks_math_algebra", "hendrycks_math_precalc": "hendrycks_math/hendrycks_math_precalc"}, "data": "math", "answers": MATH, "num_fewshot": 1},
    "gpqa": {"tasks": ["gpqa_main_zeroshot"], "files": {"gpqa_main_zeroshot": "gpqa/zeroshot/gpqa_main_zeroshot"}, "data": "gpqa"},
    "gpqa_cot": {"tasks": ["gpqa_main_cot_zeroshot"], "files": {"gpqa_main_cot_zeroshot": "gpqa/cot_zeroshot/gpqa_main_cot_zeroshot"}, "data": "gpqa", "answers": ["The answer is (A).", "wrong one", ": B", "right 3", "(C)"]},
    "bbh": {"tasks": [], "files": {}, "answers": BBH},
    "leaderboard": {"tasks": ["leaderboard_gpqa_main", "leaderboard_musr_murder_mysteries", "leaderboard_mmlu_pro", "leaderboard_ifeval"], "files": {"leaderboard_gpqa_main": "leaderboard/gpqa/gpqa_main_zeroshot", "leaderboard_musr_murder_mysteries": "leaderboard/musr/musr_murder_mysteries", "leaderboard_mmlu_pro": "leaderboard/mmlu_pro/mmlu_pro", "leaderboard_ifeval": "leaderboard/ifeval/ifeval"}, "folders": {"leaderboard_gpqa_main": "leaderboard_gpqa", "leaderboard_musr_murder_mysteries": "leaderboard_musr", "leaderboard_mmlu_pro": "mmlu_pro", "leaderboard_ifeval": "ifeval"}, "answers": IFEVAL, "num_fewshot": 2},
    "ifeval": {"tasks": ["ifeval"], "files": {"ifeval": "ifeval/ifeval"}, "data": "ifeval", "answers": IFEVAL},
}
for setting in ("zeroshot", "cot_zeroshot"):
    for name, data in {"boolean_expressions": "bbh_boolean", "date_understanding": "bbh_date", "sports_understanding": "bbh_sports", "multistep_arithmetic_two": "bbh_arith", "word_sorting": "bbh_sort"}.items():
        task = f"bbh_{setting}_{name}"
        CASES["bbh"]["tasks"].append(task)
        CASES["bbh"]["files"][task] = f"bbh/{setting}/{name}"
        CASES["bbh"].setdefault("folders", {})[task] = data
for case in CASES.values():
    case.setdefault("bootstrap_iters", 200)


def digest(*parts):
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:4], "big")


class Canned(LM):
    """Responses that depend on the request alone. Some log-probabilities are equal on purpose."""

    tokenizer_name = "canned"

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def loglikelihood(self, requests):
        numbers = [digest(*request.args) for request in requests]
        return [(-(number % 40) / 8, number % 3 == 0) for number in numbers]

    def loglikelihood_rolling(self, requests):
        return [-(digest(*request.args) % 1000) / 8 for request in requests]

    def generate_until(self, requests):
        seen, texts = {}, []
        for request in requests:
            repeat = seen[id(request)] = seen.get(id(request), -1) + 1
            texts.append(self.answers[digest(request.args[0], str(repeat)) % len(self.answers)])
        return texts

    def apply_chat_template(self, history, add_generation_prompt=True):
        turns = [f"<{turn['role']}>{turn['content']}</{turn['role']}>" for turn in history]
        if add_generation_prompt:
            return "".join(turns) + "<assistant>"
        return "".join(turns).removesuffix(f"</{history[-1]['role']}>")


def own_tasks(folder):
    """Returns our task files, one per task, with the data path filled in."""
    for path in sorted((FIXTURES / "tasks").glob("*.yaml")):
        whole = yaml.safe_load(path.read_text().replace("DATA/", f"{FIXTURES}/data/"))
        for i, task in enumerate(whole if isinstance(whole, list) else [whole]):
            (folder / f"{path.stem}_{i}.yaml").write_text(yaml.safe_dump(task, allow_unicode=True))


def harness_task(folder, name, file, data):
    """Returns the harness's task file with our data in place of the Hub's."""
    files = {path.stem: str(path) for path in sorted((FIXTURES / "data" / data).glob("*.jsonl"))}
    splits = {"train", "validation", "test", "dev"} - set(files)
    # The harness opens all splits of a task file; those without data here are never read.
    files |= {split: next(iter(files.values())) for split in splits}
    path = HARNESS / f"{file}.yaml"
    config = {"include": str(path), "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


def run(name, case):
    folder = Path(tempfile.mkdtemp())
    own_tasks(folder)
    for task, file in case.get("files", {}).items():
        harness_task(folder, task, file, case.get("folders", {}).get(task, case.get("data")))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=Canned(case.get("answers", ["x"])),
        tasks=case["tasks"],
        task_manager=manager,
        num_fewshot=case.get("num_fewshot"),
        limit=case.get("limit"),
        bootstrap_iters=case["bootstrap_iters"],
        apply_chat_template=case.get("chat", False),
        fewshot_as_multiturn=case.get("fewshot_as_multiturn", False),
        system_instruction=case.get("system_instruction"),
    )
    table = make_table(results) + (("\n" + make_table(results, "groups")) if "groups" in results else "")
    samples = results.pop("samples")
    for records in samples.values():
        for record in records:
            for metric in record["metrics"]:
                if isinstance(record[metric], tuple):
                    record[metric] = [plain(part) for part in record[metric]]
    out = Path(tempfile.mkdtemp())
    tracker = EvaluationTracker(output_path=str(out))
    tracker.general_config_tracker.model_name_sanitized = "canned"
    tracker.save_results_aggregated(results=results, samples=samples)
    for task, records in samples.items():
        tracker.save_results_samples(task_name=task, samples=records)
    saved = json.loads(next(out.glob("canned/results_*.json")).read_text())
    kept = ["results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples", "task_hashes"]
    # Configurations of the harness's tasks contain code; ours do not.
    kept += [] if case.get("files") else ["configs"]
    for config in saved["configs"].values():
        config["metadata"]["config_source"] = "FILE"
    lines = {task: [json.loads(line) for line in next(out.glob(f"canned/samples_{task}_*.jsonl")).read_text().strip("\n").split("\n")] for task in samples}
    shutil.rmtree(folder), shutil.rmtree(out)
    return {"case": case, "table": table, **{key: saved[key] for key in kept if key in saved}, "samples": lines}


def main():
    wanted = sys.argv[1:] or CASES
    (FIXTURES / "expected").mkdir(exist_ok=True)
    for name in wanted:
        found = run(name, CASES[name])
        text = json.dumps(found, ensure_ascii=False, indent=1).replace(str(FIXTURES), "FIXTURES")
        (FIXTURES / f"expected/{name}.json").write_text(text + "\n")
        print(name, len(text), file=sys.stderr)


if __name__ == "__main__":
    main()
