#!/usr/bin/env python3
"""torch's side of gpu_bench.py: trains one model for a few steps and prints the results as JSON.

The work equals ours: bf16 weights; bf16 gradients of each row are added to f32 sums when they are ready; fused AdamW over
f32 masters, copied back to the weights.
"""
import contextlib
import json
import sys
import time

import torch
import torch.nn.functional as F


def build(config: dict, recompute: bool):
    """Returns the model from ids to hidden states, its blocks and its name."""
    try:
        import transformers
    except ImportError:
        from torch_decoder import Decoder
        model = Decoder(config)
        model.recompute = recompute
        return model, model.layers, f"torch_decoder.py, torch {torch.__version__}"
    rest = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    made = transformers.AutoConfig.for_model(config["model_type"], **rest)
    made.use_cache, made.return_dict = False, False
    model = transformers.AutoModel.from_config(made, attn_implementation="sdpa")
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    name = f"transformers {transformers.__version__}, torch {torch.__version__}"
    if "num_experts" in config:
        name += f", experts by {getattr(model.config, '_experts_implementation', 'a loop')}"
    return Hidden(model), model.layers, name


class Hidden(torch.nn.Module):
    """A transformers model that returns only the hidden states [1, t, d]."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids)[0]


def loss_of(hidden, head, targets):
    return F.cross_entropy((hidden @ head.t()).float(), targets)


def add_to(total):
    def hook(p):
        total.add_(p.grad)
        p.grad = None
    return hook


def attention_backends():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def train(job: dict) -> dict:
    config, device, length, rows = job["config"], job["device"], job["length"], job["rows"]
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model, blocks, name = build(config, job["recompute"])
    torch.set_default_dtype(torch.float32)
    model.train()
    parameters = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in parameters]
    for p, master in zip(parameters, masters):
        master.grad = torch.zeros_like(master)
        p.register_post_accumulate_grad_hook(add_to(master.grad))
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    # Tied: the head is the embedding.
    head = next(p for p in parameters if p.shape[0] == config["vocab_size"])
    loss = loss_of
    if job["compiled"]:
        for block in blocks:
            block.compile()
        loss = torch.compile(loss_of)
    ids = torch.randint(0, config["vocab_size"], (job["steps"], rows, 1, length + 1), device=device)

    def step(i):
        for row in ids[i]:
            (loss(model(row[:, :-1])[0], head, row[0, 1:]) / rows).backward()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
            torch._foreach_zero_([master.grad for master in masters])

    on_gpu = device != "cpu"
    times = []
    with attention_backends() if on_gpu else contextlib.nullcontext():
        for i in range(job["steps"]):
            began = time.perf_counter()
            step(i)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    speeds = sorted(length * rows / seconds for seconds in times[job["warm"]:])
    result = {"tokens_per_second": speeds[len(speeds) // 2], "slowest": speeds[0], "fastest": speeds[-1],
              "first_step_seconds": times[0], "model": name}
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        result |= {"device_used_bytes": total - free, "peak_allocated_bytes": torch.cuda.max_memory_allocated()}
    return result


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
