"""A Llama or Qwen3 decoder in plain torch, for training benchmarks without transformers.

t tokens, d model, h heads, k head dim
"""
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.k = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.shared = heads != kv_heads
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(c["hidden_size"], n * self.k, bias=False) for n in (heads, kv_heads, kv_heads))
        self.o_proj = nn.Linear(heads * self.k, c["hidden_size"], bias=False)
        norm = lambda: nn.RMSNorm(self.k, c["rms_norm_eps"]) if c["model_type"] == "qwen3" else nn.Identity()
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x, cos, sin):
        heads = lambda y: y.unflatten(-1, (-1, self.k))
        q, k, v = self.q_norm(heads(self.q_proj(x))), self.k_norm(heads(self.k_proj(x))), heads(self.v_proj(x))
        q, k, v = (y.transpose(1, 2) for y in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, f = c["hidden_size"], c["intermediate_size"]
        self.attention = Attention(c)
        self.gate_proj, self.up_proj = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)
        self.input_norm, self.mlp_norm = nn.RMSNorm(d, c["rms_norm_eps"]), nn.RMSNorm(d, c["rms_norm_eps"])

    def forward(self, x, cos, sin):
        x = x + self.attention(self.input_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Decoder(nn.Module):
    """Maps token ids [1, t] to the hidden states before the head, which is tied to the embedding."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.recompute = False
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids):
        x = self.embed(ids)
        k = self.layers[0].attention.k
        frequencies = self.c["rope_theta"] ** -(torch.arange(0, k, 2, device=ids.device) / k)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return self.norm(x)
