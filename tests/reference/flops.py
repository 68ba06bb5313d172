"""Counts the FLOPs of small models with torch and transformers, for trainer/tests/it/flops.rs.

    python tests/reference/flops.py

Each entry has a config, sequence lengths (run one by one, like the sequences of a packed row), and matmul FLOPs of a
forward, of a forward and backward, and of both with frozen weights. torch counts them with eager attention, which computes
all pairs. The unmasked pairs of each layer are listed too. The matmul of the rotary angles is excluded: our RoPE uses a
table.
"""

import json
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

OUT = Path(__file__).resolve().parents[2] / "trainer" / "tests" / "fixtures" / "flops.json"
SMALL = dict(vocab_size=72, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
# name: model type, what its config changes, lengths
MODELS = {
    "llama": ("llama", {}, [24]),
    "llama packed": ("llama", {}, [5, 12, 7]),
    "llama with wide heads": ("llama", dict(head_dim=16, num_key_value_heads=1), [13, 1]),
    "qwen2 tied, grouped": ("qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True), [9, 17]),
    "qwen3 grouped": ("qwen3", dict(num_key_value_heads=2, head_dim=12), [11, 3, 6]),
    "mistral, window 5": ("mistral", dict(num_key_value_heads=2, head_dim=8, sliding_window=5), [3, 5, 16]),
    "mixtral": ("mixtral", dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2), [7, 12]),
    "qwen3_moe, a dense layer": ("qwen3_moe", dict(**EXPERTS, head_dim=12, mlp_only_layers=[1]), [11, 3, 6]),
    "qwen2_moe, a gated shared expert": ("qwen2_moe", dict(**EXPERTS, shared_expert_intermediate_size=28), [9, 17]),
    "glm4_moe, a shared expert": (
        "glm4_moe",
        dict(n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, n_shared_experts=2, head_dim=8,
             first_k_dense_replace=1, partial_rotary_factor=0.5),
        [13, 4],
    ),
}


def operations(model, lengths, work) -> int:
    total = 0
    for length in lengths:
        with FlopCounterMode(display=False) as counter:
            work(model(input_ids=torch.arange(length)[None], use_cache=False).logits)
        total += counter.get_total_flops()
        counts = counter.get_flop_counts()
        total -= sum(sum(count.values()) for name, count in counts.items() if name.endswith("rotary_emb"))
    return total


def forward(logits):
    pass


def with_backward(logits):
    logits.sum().backward()


def frozen(model, lengths) -> int | None:
    """Freezes the weights of all matmuls, tied embeddings included; gradients still reach every input."""
    if model.config.tie_word_embeddings:
        return None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    return operations(model, lengths, with_backward)


@torch.no_grad()
def visible_pairs(model, lengths) -> list[int]:
    pairs = [0] * model.config.num_hidden_layers
    for length in lengths:
        attentions = model(input_ids=torch.arange(length)[None], use_cache=False, output_attentions=True).attentions
        pairs = [n + int((layer[0, 0] > 0).sum()) for n, layer in zip(pairs, attentions)]
    return pairs


def count(name, model_type, changes, lengths) -> dict:
    torch.manual_seed(0)
    config = SMALL | changes
    # The eager implementation multiplies each token with its experts only.
    ways = dict(attn_implementation="eager", experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), **ways)
    return {
        "name": name,
        "config": {"model_type": model_type, **config},
        "lengths": lengths,
        "forward": operations(model, lengths, forward),
        "train": operations(model, lengths, with_backward),
        "visible_pairs": visible_pairs(model, lengths),
        "frozen": frozen(model, lengths),
    }


if __name__ == "__main__":
    counts = [count(name, *how) for name, how in MODELS.items()]
    OUT.write_text("[\n" + ",\n".join(json.dumps(one) for one in counts) + "\n]\n")
