#!/usr/bin/env python3
"""Trains with torch and transformers on the batches of a candlewick run and compares the losses step by step.

    trainer preprocess RECIPE --steps 20 --output-format json >batches.jsonl
    trainer train RECIPE exit_iteration=20
    torch_run.py MODEL_FOLDER batches.jsonl RUN/metrics.jsonl [--betas 0.9 0.999] [--weight-decay 0.1] [--clip 1.0]

Each line of batches.jsonl is one step: {"n_targets", "micro_batches": [{"ids", "targets", "cu_seqlens"}]}.
The learning rates are read from metrics.jsonl. f32, eager attention; each sequence is run by itself.
"""
import argparse
import json

import torch
from transformers import AutoModelForCausalLM


def step_loss(model, step):
    total = 0.0
    for micro in step["micro_batches"]:
        ids, targets, cu = micro["ids"], micro["targets"], micro["cu_seqlens"]
        for begin, end in zip(cu, cu[1:]):
            logits = model(torch.tensor([ids[begin:end]])).logits[0].float()
            loss = torch.nn.functional.cross_entropy(
                logits, torch.tensor(targets[begin:end]), ignore_index=-100, reduction="sum"
            )
            loss = loss / step["n_targets"]
            loss.backward()
            total += loss.item()
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("batches")
    parser.add_argument("metrics")
    parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.999))
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager")
    model.train()
    exempt = lambda name: name.endswith("bias") or "norm" in name
    groups = [
        {"params": [p for n, p in model.named_parameters() if not exempt(n)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in model.named_parameters() if exempt(n)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=tuple(args.betas), eps=1e-8)
    ours = [json.loads(line) for line in open(args.metrics)]
    ours = [record for record in ours if "loss" in record]
    steps = [json.loads(line) for line in open(args.batches)]
    worst = 0.0
    for step, record in zip(steps, ours, strict=False):
        optimizer.zero_grad(set_to_none=True)
        loss = step_loss(model, step)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).item()
        for group in optimizer.param_groups:
            group["lr"] = record["lr"]
        optimizer.step()
        difference = abs(loss - record["loss"]) / abs(loss)
        worst = max(worst, difference)
        print(
            f"step {record['iter']:3} torch {loss:.6f} ours {record['loss']:.6f} relative {difference:.2e}"
            f" | grad norm torch {norm:.5f} ours {record['grad_norm']:.5f}",
            flush=True,
        )
    print(f"worst relative difference of the loss over {min(len(steps), len(ours))} steps: {worst:.2e}")
    raise SystemExit(0 if worst <= args.tolerance else 1)


if __name__ == "__main__":
    main()
