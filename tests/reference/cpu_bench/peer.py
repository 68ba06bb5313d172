#!/usr/bin/env python3
"""The other side of each case, by torch and transformers on the CPU: prints its number as the last line.

peers.py passes the job as a JSON object; each job runs in a process of its own. Only work that our side also does is
timed: imports count in `start` only.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

job = json.loads(sys.argv[1])


def model(training: bool = True, dtype: torch.dtype = torch.float32):
    """Loads the model of the job's folder, or creates one with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ways = {"attn_implementation": "sdpa"}
    if has_experts():
        # On the CPU grouped_mm is the faster way to train, and eager the faster way to evaluate.
        ways["experts_implementation"] = "grouped_mm" if training else "eager"
    if "folder" in job and job["what"] != "make":
        made = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=dtype, **ways)
    else:
        settings = dict(job["config"])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        made = AutoModelForCausalLM.from_config(config, dtype=dtype, **ways)
    return made.train(training)


def adapted(of):
    """Adds a LoRA adapter to all linear layers."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(of, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))


def has_experts() -> bool:
    return "num_experts" in job["config"]


def rows():
    return torch.tensor(json.loads(Path(job["ids"]).read_text()))


def optimizer(of):
    return torch.optim.AdamW((p for p in of.parameters() if p.requires_grad), lr=1e-4, weight_decay=0.1)


def loss_of(of, ids):
    """Returns the loss with every token but a row's first as a target. The last logit of a row is masked, which saves a copy.

    In training, a model with experts adds its load-balancing loss.
    """
    balances = has_experts() and of.training
    output = of(input_ids=ids, use_cache=False, **({"output_router_logits": True} if balances else {}))
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    logits = output.logits.float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100)
    return loss + of.config.router_aux_loss_coef * output.aux_loss if balances else loss


def step(of, loss, adamw, micro_batches):
    for ids in micro_batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=job.get("dtype") == "bf16" and not job["lora"]):
            value = loss(of, ids) / len(micro_batches)
        value.backward()
    torch.nn.utils.clip_grad_norm_(of.parameters(), 1.0)
    adamw.step()
    adamw.zero_grad(set_to_none=True)


def train():
    has_bf16_weights = job["dtype"] == "pure-bf16" or (job["dtype"] == "bf16" and job["lora"])
    of = model(dtype=torch.bfloat16 if has_bf16_weights else torch.float32)
    if job["lora"]:
        of = adapted(of)
    if job["recomputed"]:
        of.gradient_checkpointing_enable({"use_reentrant": False})
    adamw = optimizer(of)
    loss = torch.compile(loss_of, dynamic=False) if job["compiled"] else loss_of
    n_rows = job["rows"]
    speeds = []
    for batch in rows().split(n_rows * job["accumulated"]):
        began = time.perf_counter()
        step(of, loss, adamw, batch.split(n_rows))
        speeds.append(batch.numel() / (time.perf_counter() - began))
    speeds = sorted(speeds[job["warm"]:])
    return speeds[len(speeds) // 2]


@torch.no_grad()
def evaluate():
    """Times an evaluation after a warm-up row."""
    of = model(training=False)
    batches = rows().split(1)
    loss_of(of, batches[0]).item()
    began = time.perf_counter()
    for ids in batches:
        loss_of(of, ids).item()
    return sum(ids.numel() - 1 for ids in batches) / (time.perf_counter() - began)


@torch.no_grad()
def decode():
    """Returns the faster of two runs; the first is the warm-up."""
    of = model(training=False, dtype=torch.bfloat16 if job["dtype"] == "bf16" else torch.float32)
    of.generation_config.eos_token_id = None
    of.generation_config.pad_token_id = 0
    prompt, n_new = rows(), job["steps"]
    speeds = []
    for _ in range(2):
        began = time.perf_counter()
        said = of.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n_new, min_new_tokens=n_new,
                           do_sample=False, use_cache=True)
        speeds.append(n_new / (time.perf_counter() - began))
        assert said.shape[1] == prompt.shape[1] + n_new
    return max(speeds)


def start():
    of = model()
    step(of, loss_of, optimizer(of), rows().split(1))
    print("Train iter: 1/1", file=sys.stderr, flush=True)


def trained():
    of = model()
    adamw = optimizer(of)
    step(of, loss_of, adamw, rows().split(1))
    return of, adamw


def sync(path: Path):
    """Syncs the files to disk, as our checkpoints are."""
    for file in [*path.iterdir(), path] if path.is_dir() else [path]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def save():
    of, adamw = trained()
    path = Path(job["path"])
    began = time.perf_counter()
    if job["kind"] == "huggingface":
        of.save_pretrained(path)
    else:
        torch.save({"model": of.state_dict(), "optimizer": adamw.state_dict()}, path)
    sync(path)
    return time.perf_counter() - began


def load():
    of = model()
    adamw = optimizer(of)
    began = time.perf_counter()
    state = torch.load(job["path"])
    of.load_state_dict(state["model"])
    adamw.load_state_dict(state["optimizer"])
    return time.perf_counter() - began


def make():
    model().save_pretrained(job["folder"])


def data():
    """Makes tokens and rows of 1024 with datasets.map, as transformers' run_clm.py (which also copies the labels)."""
    # One process per thread computes already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import datasets
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=job["tokenizer"])
    datasets.disable_progress_bars()

    def group(examples):
        joined = [token for ids in examples["input_ids"] for token in ids]
        whole = len(joined) // 1024 * 1024
        rows = [joined[at:at + 1024] for at in range(0, whole, 1024)]
        return {"input_ids": rows}

    began = time.perf_counter()
    texts = datasets.load_dataset("json", data_files=job["text"], split="train", cache_dir=job["cache"])
    tokens = texts.map(lambda examples: {"input_ids": tokenizer(examples["text"])["input_ids"]}, batched=True,
                      num_proc=job["threads"], remove_columns=["text"])
    tokens.map(group, batched=True, num_proc=job["threads"])
    return os.path.getsize(job["text"]) / 1e6 / (time.perf_counter() - began)


def ceilings():
    """Measures the machine's ceilings: an f32 matmul, and a += b * s over arrays larger than all caches."""
    def best(work):
        times = []
        for _ in range(7):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return min(times)

    n = job["size"]
    a, b, out = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    x, y = torch.zeros(16 * n * n), torch.ones(16 * n * n)
    product, triad = best(lambda: torch.mm(a, b, out=out)), best(lambda: x.add_(y, alpha=2.0))
    return {"gflops": 2 * n**3 / product / 1e9, "gb_per_second": 3 * 4 * x.numel() / triad / 1e9}


if __name__ == "__main__":
    torch.set_num_threads(job["threads"])
    work = {"train": train, "eval": evaluate, "decode": decode, "start": start, "save": save, "load": load,
            "make": make, "data": data, "ceilings": ceilings}
    print(json.dumps(work[job["what"]]()))
