"""Makes candle-ext/model/tests/fixtures/fp32_residual: logits, loss and gradients of the fixture `qwen3` in bf16 with an f32
residual stream, as Megatron-LM's `fp32_residual_connection` with norms whose output has the dtype of their weights (Apex'
MixedFusedRMSNorm). Plain torch, on the CPU. Tensors named `rounded.*` are those of attention that rounds its probabilities to
bf16 before their sum divides, as kernels with bf16 matmuls do.

    python tests/reference/fp32_residual.py
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).resolve().parents[2] / "candle-ext" / "model" / "tests" / "fixtures"
MODEL, TARGET = FIXTURES / "qwen3", FIXTURES / "fp32_residual"
IGNORED = -100


def rms_norm(x, weight, eps):
    """Computes in f32; the result has the weight's dtype."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * weight.float()).to(weight.dtype)


def head_norm(x, weight, eps):
    """Rounds as transformers does: x is bf16 here."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def attention(x, get, config, window, rounds):
    t, k = x.shape[0], config["head_dim"]
    heads = lambda name: F.linear(x, get(f"self_attn.{name}_proj.weight")).view(t, -1, k)
    q = head_norm(heads("q"), get("self_attn.q_norm.weight"), config["rms_norm_eps"])
    key = head_norm(heads("k"), get("self_attn.k_norm.weight"), config["rms_norm_eps"])
    value = heads("v")
    frequencies = config["rope_parameters"]["rope_theta"] ** -(torch.arange(0, k, 2) / k)
    angles = torch.arange(t)[:, None, None] * frequencies
    q, key = rotate(q, angles.cos(), angles.sin()), rotate(key, angles.cos(), angles.sin())
    shared = q.shape[1] // key.shape[1]
    key, value = (y.repeat_interleave(shared, 1).transpose(0, 1) for y in (key, value))
    # Attention and the gated activation compute in f32 from bf16, and are rounded once, as fused kernels do.
    scores = q.float().transpose(0, 1) @ key.float().transpose(1, 2) * k**-0.5
    row, column = torch.arange(t)[:, None], torch.arange(t)
    hidden = (column > row) | (column <= row - window if window else torch.zeros_like(column > row))
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights.to(value.dtype).float() if rounds else weights
    y = (weights @ value.float() / total).transpose(0, 1).flatten(1).to(value.dtype)
    return F.linear(y, get("self_attn.o_proj.weight"))


def normed(ids, weights, config, rounds):
    """Returns the final norm's output for one sequence of ids [t]."""
    eps = config["rms_norm_eps"]
    x = F.embedding(ids, weights["model.embed_tokens.weight"]).float()
    for layer in range(config["num_hidden_layers"]):
        get = lambda name: weights[f"model.layers.{layer}.{name}"]
        is_sliding = config["layer_types"][layer] == "sliding_attention"
        window = config["sliding_window"] if is_sliding else None
        x = x + attention(rms_norm(x, get("input_layernorm.weight"), eps), get, config, window, rounds).float()
        y = rms_norm(x, get("post_attention_layernorm.weight"), eps)
        gate, up = (F.linear(y, get(f"mlp.{name}_proj.weight")).float() for name in ("gate", "up"))
        x = x + F.linear((F.silu(gate) * up).to(y.dtype), get("mlp.down_proj.weight")).float()
        assert x.dtype == torch.float32
    return rms_norm(x, weights["model.norm.weight"], eps)


def results(config, reference, rounds):
    """Returns logits, loss and gradients. The output layer computes f32 logits from bf16."""
    ids, labels, lengths = (reference[name] for name in ("ids", "labels", "lengths"))
    weights = {name: w.to(torch.bfloat16).requires_grad_() for name, w in load_file(MODEL / "model.safetensors").items()}
    logits, losses, n_targets, start = [], 0.0, 0, 0
    for length in lengths.tolist():
        part = slice(start, start + length)
        own = F.linear(normed(ids[part], weights, config, rounds).float(), weights["lm_head.weight"].float())
        targets = labels[part][1:]
        losses = losses + F.cross_entropy(own[:-1], targets, ignore_index=IGNORED, reduction="sum")
        n_targets += (targets != IGNORED).sum()
        logits.append(own)
        start += length
    loss = losses / n_targets
    loss.backward()
    return {f"grad.{name}": w.grad for name, w in weights.items()} | {"logits": torch.cat(logits), "loss": loss}


def main():
    config = json.loads((MODEL / "config.json").read_text())
    reference = load_file(MODEL / "reference.safetensors")
    tensors = {name: reference[name] for name in ("ids", "labels", "lengths")} | results(config, reference, False)
    tensors |= {f"rounded.{name}": x for name, x in results(config, reference, True).items()}
    TARGET.mkdir(exist_ok=True)
    save_file({name: x.detach().contiguous() for name, x in tensors.items()}, TARGET / "reference.safetensors")


if __name__ == "__main__":
    main()
