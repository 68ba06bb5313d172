"""Compares the logits of a dense model with those of the folder that `trainer upcycle` wrote, in transformers and f32.

    trainer upcycle DENSE --output UPCYCLED --num-experts 8 --num-experts-per-tok 2
    python tests/reference/upcycle_check.py DENSE UPCYCLED
"""

import sys

import torch
from transformers import AutoModelForCausalLM


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True,
    )
    wrong = {name: keys for name, keys in info.items() if keys}
    assert not wrong, f"{folder}: {wrong}"
    return model.eval()


def main():
    dense, upcycled = map(load, sys.argv[1:3])
    torch.manual_seed(0)
    ids = torch.randint(0, dense.config.vocab_size, (1, 64))
    with torch.no_grad():
        want, got = (model(ids).logits[0] for model in (dense, upcycled))
    error = ((got - want).norm() / want.norm()).item()
    print(f"{type(dense).__name__} and {type(upcycled).__name__}: relative error of the logits {error:.1e}")
    if error > 1e-5:
        sys.exit("they differ")


if __name__ == "__main__":
    main()
