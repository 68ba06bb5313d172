"""Writes what transformers computes with each scaling of RoPE: inverse frequencies, attention factors, logits and gradients.

    python tests/reference/rope.py

rope.json has, for each case, config keys, lengths of sequences, and the inverse frequencies and attention factor at each
length. rope.safetensors has logits of the fixture `llama3` with a scaling instead of its own, for two sequences of which each
ran alone in a new model, and the gradients of the first layer's queries and keys. One of the sequences is longer than the
original context.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXTURES = Path(__file__).resolve().parents[2] / "candle-ext" / "model" / "tests" / "fixtures"
SHAPE = dict(model_type="llama", hidden_size=256, num_attention_heads=4, num_hidden_layers=1)
QWEN3 = dict(model_type="qwen3", head_dim=128, rope_theta=1e6, max_position_embeddings=40960)
GLM = dict(model_type="glm4_moe", head_dim=128, rope_theta=1e4, max_position_embeddings=4096)


def yarn(factor=4.0, original=32768, **keys):
    return dict(rope_type="yarn", factor=factor, original_max_position_embeddings=original, **keys)


def long_rope(n_pairs, original, **keys):
    short = [1.0 + 0.05 * i for i in range(n_pairs)]
    long = [1.0 + 0.5 * i * i for i in range(n_pairs)]
    return dict(rope_type="longrope", short_factor=short, long_factor=long, original_max_position_embeddings=original, **keys)


# name: config keys, lengths
FREQUENCIES = {
    "default": (dict(**QWEN3), [10]),
    "linear": (dict(**QWEN3, rope_scaling=dict(rope_type="linear", factor=3.0)), [10]),
    "llama3": (
        dict(**SHAPE, rope_theta=5e5, max_position_embeddings=131072, rope_scaling=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192)),
        [10],
    ),
    "yarn of Qwen3": (dict(**QWEN3, rope_scaling=yarn()), [10, 100000]),
    "yarn in the older spelling": (dict(**QWEN3, rope_scaling=dict(type="yarn", factor=2.0)), [10]),
    "yarn with an attention factor": (dict(**QWEN3, rope_scaling=yarn(attention_factor=1.25)), [10]),
    "yarn with betas": (dict(**QWEN3, rope_scaling=yarn(beta_fast=16.0, beta_slow=2.0)), [10]),
    "yarn without truncation": (dict(**QWEN3, rope_scaling=yarn(truncate=False)), [10]),
    "yarn of DeepSeek": (dict(**QWEN3, rope_scaling=yarn(40.0, 4096, mscale=0.707, mscale_all_dim=1.0)), [10]),
    "yarn without a factor": (
        dict(**{**QWEN3, "max_position_embeddings": 131072}, rope_scaling=yarn(None, 32768)), [10],
    ),
    "yarn with an original context outside": (
        dict(**QWEN3, original_max_position_embeddings=16384, rope_scaling=dict(rope_type="yarn", factor=4.0)), [10],
    ),
    "yarn of half the head": (dict(**GLM, rope_parameters=dict(**yarn(4.0, 4096), rope_theta=1e4)), [10]),
    "yarn in a context of a few rotations": (dict(**SHAPE, rope_scaling=yarn(4.0, 4)), [10]),
    "longrope": (dict(**SHAPE, max_position_embeddings=131072, rope_scaling=long_rope(32, 4096)), [10, 4096, 4097]),
    "longrope with a factor": (dict(**SHAPE, rope_scaling=long_rope(32, 2048, factor=16.0)), [10, 5000]),
    "longrope with an attention factor": (dict(**SHAPE, rope_scaling=long_rope(32, 2048, attention_factor=1.1)), [10, 5000]),
    "dynamic": (
        dict(**SHAPE, max_position_embeddings=2048, rope_scaling=dict(rope_type="dynamic", factor=2.0)),
        [10, 2048, 2049, 5000, 40000],
    ),
}
# Scalings of the fixture `llama3`: 4 pairs, and a context of 128 that becomes 16 here.
LOGITS = {
    "yarn": dict(rope_scaling=yarn(4.0, 16, beta_fast=2.0), max_position_embeddings=64),
    "yarn_mscale": dict(rope_scaling=yarn(8.0, 16, mscale=1.5, mscale_all_dim=0.5, truncate=False)),
    "longrope": dict(rope_scaling=long_rope(4, 16), max_position_embeddings=64),
    "dynamic": dict(rope_scaling=dict(rope_type="dynamic", factor=3.0), max_position_embeddings=16),
    "linear": dict(rope_scaling=dict(rope_type="linear", factor=3.0), max_position_embeddings=16),
}
LENGTHS = [40, 12]


def frequencies(keys, lengths):
    config = AutoConfig.for_model(**keys)
    config.standardize_rope_params()
    kind = config.rope_parameters["rope_type"]
    result = []
    for length in lengths:
        if kind == "default":
            dim = config.head_dim
            inverse, factor = 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)), 1.0
        else:
            # The forward of a model passes the length as a tensor.
            n_tokens = torch.tensor(length) if kind == "dynamic" else length
            beyond = kind != "dynamic" or length > config.max_position_embeddings
            inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=n_tokens if beyond else None)
        result.append({"n_tokens": length, "frequencies": inverse.tolist(), "attention_factor": factor})
    return {"config": keys, "rotations": result}


def logits(overrides, ids, labels):
    config = AutoConfig.from_pretrained(FIXTURES / "llama3")
    scaling = {"rope_theta": config.rope_parameters["rope_theta"], **overrides["rope_scaling"]}
    rows, grads = [], 0
    for row, target in zip(ids.split(LENGTHS), labels.split(LENGTHS)):
        config = AutoConfig.from_pretrained(FIXTURES / "llama3")
        config.max_position_embeddings = overrides.get("max_position_embeddings", config.max_position_embeddings)
        config.rope_parameters = dict(scaling)
        model = AutoModelForCausalLM.from_pretrained(
            FIXTURES / "llama3", config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        output = model(row[None]).logits[0]
        rows.append(output.detach())
        torch.nn.functional.cross_entropy(output[:-1], target[1:], reduction="sum").backward()
        attention = model.model.layers[0].self_attn
        grads = grads + torch.cat([attention.q_proj.weight.grad, attention.k_proj.weight.grad])
    n_targets = sum(length - 1 for length in LENGTHS)
    return torch.cat(rows), grads / n_targets


def main():
    cases = {name: frequencies(*case) for name, case in FREQUENCIES.items()}
    (FIXTURES / "rope.json").write_text(json.dumps({"frequencies": cases, "overrides": LOGITS}, indent=None) + "\n")
    torch.manual_seed(3)
    ids = torch.randint(0, 40, (sum(LENGTHS),))
    tensors = {"ids": ids.int(), "labels": ids.clone(), "lengths": torch.tensor(LENGTHS)}
    for name, overrides in LOGITS.items():
        tensors[f"{name}.logits"], tensors[f"{name}.grad"] = logits(overrides, ids, ids)
    save_file(tensors, FIXTURES / "rope.safetensors")


if __name__ == "__main__":
    main()
