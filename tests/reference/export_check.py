#!/usr/bin/env python3
"""Checks that transformers gives candlewick's log-probabilities from a folder that candlewick exported.

    evaluator score --model FOLDER --dtype f32 --text "..." >scores.json
    export_check.py FOLDER scores.json [--adapter ADAPTER_FOLDER]

scores.json is a list of {"id", "text", "logprob"}. transformers loads the same folder (and peft the adapter) in f32
and gets our ids. Every log-probability must agree within --tolerance (nats).
"""
import argparse
import json

import torch
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("scores")
    parser.add_argument("--adapter")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager")
    if args.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, args.adapter)
    scores = json.load(open(args.scores))
    ids = torch.tensor([[token["id"] for token in scores]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
    theirs = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    ours = torch.tensor([token["logprob"] for token in scores[1:]], dtype=torch.float64)
    worst = (ours - theirs).abs().max().item()
    print(f"{len(ours)} tokens, mean log-probability ours {ours.mean():.6f} transformers {theirs.mean():.6f}")
    print(f"worst difference {worst:.2e}")
    raise SystemExit(0 if worst <= args.tolerance else 1)


if __name__ == "__main__":
    main()
