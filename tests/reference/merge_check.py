"""Compares a folder that `trainer merge` wrote with peft's merge_and_unload, tensor by tensor, and the logits of both.

    trainer merge ADAPTER --base BASE --output MERGED --dtype f32
    python tests/reference/merge_check.py BASE ADAPTER MERGED
"""

import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "The quick brown fox jumps over the lazy dog. 1 + 1 = 2."


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def relative(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def main():
    base, adapter, merged = sys.argv[1:4]
    stored = AutoModelForCausalLM.from_pretrained(merged, dtype="auto")
    dtype = stored.dtype
    theirs = PeftModel.from_pretrained(load(base), adapter)
    ids = torch.tensor([AutoTokenizer.from_pretrained(merged)(TEXT)["input_ids"]])
    with torch.no_grad():
        adapted = theirs(ids).logits[0]
        theirs = theirs.merge_and_unload()
        want = {name: value.to(dtype) for name, value in theirs.state_dict().items()}
        got = stored.state_dict()
        assert got.keys() == want.keys(), got.keys() ^ want.keys()
        worst = max((relative(got[name], want[name]), name) for name in want)
        equal = sum(torch.equal(got[name], want[name]) for name in want)
        logits = relative(stored.float()(ids).logits[0], adapted)
    print(f"{merged}: {len(want)} tensors in {dtype}, {equal} of them bit for bit those of peft")
    print(f"  largest relative error of a tensor: {worst[0]:.1e} ({worst[1]})")
    print(f"  relative error of the logits against the adapter's in f32: {logits:.1e}")
    bound = 1e-5 if dtype == torch.float32 else 1e-3
    if worst[0] > bound or (dtype == torch.float32 and logits > 1e-5):
        sys.exit("they differ")


if __name__ == "__main__":
    main()
