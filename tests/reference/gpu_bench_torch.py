#!/usr/bin/env python3
"""A side of torch in gpu_bench.py: trains one model for some seconds and prints the results as JSON.

The work equals ours: bf16 weights; bf16 gradients of each micro-batch are added to f32 sums when they are ready; fused AdamW over
f32 masters, copied back to the weights. LoRA trains adapters in bf16 with f32 masters. Models whose recipe has bf16 moments have no
masters here, and sum gradients in bf16: less work and memory than ours.
"""
import contextlib
import dataclasses
import json
import math
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

# Batches; later steps repeat them.
N_BATCHES = 8


def build(job: dict):
    """Returns the model from ids to hidden states, its blocks and its name."""
    config = job["config"]
    try:
        import transformers
    except ImportError:
        if job["side"] not in ("torch", "torch_compiled") or "peft_config" in job["keys"].get("model", {}):
            raise
        from torch_decoder import Decoder
        model = Decoder(config)
        model.recompute = job["recompute"]
        return model, model.layers, f"torch_decoder.py, torch {torch.__version__}"
    rest = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    made = transformers.AutoConfig.for_model(config["model_type"], **rest)
    made.use_cache, made.return_dict = False, False
    model = transformers.AutoModel.from_config(made, attn_implementation="sdpa")
    if job["recompute"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    name = f"transformers {transformers.__version__}, torch {torch.__version__}"
    if "num_experts" in config and job["side"] != "liger":
        name += f", experts by {getattr(model.config, '_experts_implementation', 'a loop')}"
    return Hidden(model), model.layers, name


class Hidden(nn.Module):
    """A transformers model that returns only the hidden states [b, t, d]."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids)[0]


def version(package: str) -> str:
    from importlib.metadata import version as of
    return f"{package} {of(package)}"


def patch_liger(model_type: str) -> str:
    """Replaces transformers' modules by Liger's, before the model is made. The loss is not among them."""
    from liger_kernel.transformers import monkey_patch
    if model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise RuntimeError(f"Liger has no kernels for {model_type}")
    monkey_patch._apply_liger_kernel(model_type, cross_entropy=False, fused_linear_cross_entropy=False)
    return version("liger-kernel")


def to_float8(blocks, side: str, device: str) -> str:
    """Makes torchao's FP8 layers of the blocks' linear layers. On a CPU the FP8 matmul is emulated."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name(side.removeprefix("torchao_"))
    if device == "cpu":
        config = dataclasses.replace(config, emulate=True)
    for block in blocks:
        convert_to_float8_training(block, config=config)
    return f"{version('torchao')}, {side.removeprefix('torchao_')}"


class LoraOnNf4(nn.Module):
    """A linear layer of NF4 weights with an adapter, as torchtune's LoRALinear."""

    def __init__(self, linear: nn.Linear, lora: dict):
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4
        self.multiply = linear_nf4
        # Blocks of 64 weights, and up to 256 of their scales.
        scaler_block = math.gcd(linear.weight.numel() // 64, 256)
        self.weight = nn.Parameter(to_nf4(linear.weight.detach(), 64, scaler_block), requires_grad=False)
        self.bias = linear.bias
        like = dict(device=linear.weight.device, dtype=linear.weight.dtype)
        self.a = nn.Parameter(torch.randn(lora["r"], linear.in_features, **like) / lora["r"])
        self.b = nn.Parameter(torch.zeros(linear.out_features, lora["r"], **like))
        self.scale, self.dropout = lora["lora_alpha"] / lora["r"], lora["lora_dropout"]

    def forward(self, x):
        y = self.multiply(x, self.weight)
        y = y if self.bias is None else y + self.bias
        x = F.dropout(x, self.dropout, self.training)
        return y + F.linear(F.linear(x, self.a), self.b) * self.scale


def adapt_nf4(blocks, lora: dict) -> str:
    for block in blocks:
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, LoraOnNf4(child, lora))
    return f"LoRA on NF4 of {version('torchao')}"


def adapt_peft(model, lora: dict) -> str:
    """Adds PEFT's adapters to all linear layers; the base is frozen."""
    import peft
    config = peft.LoraConfig(**{key: lora[key] for key in ("r", "lora_alpha", "lora_dropout", "target_modules")})
    # Adapters have the dtype of the model, as ours.
    model.model = peft.get_peft_model(model.model, config, autocast_adapter_dtype=False)
    return version("peft")


def prepared(job: dict):
    """Returns the model, its blocks, the output layer's weight [v, d], and the name of the side."""
    config, side, lora = job["config"], job["side"], job["keys"].get("model", {}).get("peft_config")
    names = [patch_liger(config["model_type"])] if side == "liger" else []
    with torch.device(job["device"]):
        model, blocks, name = build(job)
        head = next(p for p in model.parameters() if p.shape[0] == config["vocab_size"])
        if not config["tie_word_embeddings"]:
            head = nn.Parameter(0.02 * torch.randn_like(head))
        # Liger does not initialize its experts.
        for of, p in model.named_parameters():
            if "experts" in of:
                nn.init.normal_(p, std=0.02)
        if lora:
            head.requires_grad_(False)
            model.requires_grad_(False)
            names.append(adapt_nf4(blocks, lora) if side == "nf4" else adapt_peft(model, lora))
        if side.startswith("torchao"):
            names.append(to_float8(blocks, side, job["device"]))
    return model, blocks, head, ", ".join([name, *names])


def loss_of(hidden, head, targets):
    return F.cross_entropy((hidden @ head.t()).float(), targets)


def loss_by(side: str, compiled: bool):
    """Returns the loss of hidden states [t, d] and the output layer's weight."""
    if side == "liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        fused = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
        return lambda hidden, head, targets: fused(head, hidden, targets)
    return torch.compile(loss_of) if compiled else loss_of


def add_to(total):
    def hook(p):
        total.add_(p.grad)
        p.grad = None
    return hook


class Update:
    """AdamW over f32 masters with f32 sums of gradients, or over the bf16 weights alone."""

    def __init__(self, parameters: list, has_masters: bool, on_gpu: bool):
        self.parameters, self.masters = parameters, parameters
        if has_masters:
            self.masters = [p.detach().float().requires_grad_() for p in parameters]
            for p, master in zip(parameters, self.masters):
                master.grad = torch.zeros_like(master)
                p.register_post_accumulate_grad_hook(add_to(master.grad))
        self.has_masters = has_masters
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=on_gpu or None)

    def step(self):
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        if not self.has_masters:
            return self.optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
            torch._foreach_zero_([master.grad for master in self.masters])


def attention_backends():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def train(job: dict) -> dict:
    device, length, rows, micro = job["device"], job["length"], job["rows"], job["micro_batch_size"]
    on_gpu = device != "cpu"
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    model, blocks, head, name = prepared(job)
    torch.set_default_dtype(torch.float32)
    model.train()
    everything = dict.fromkeys([*model.parameters(), head])
    update = Update([p for p in everything if p.requires_grad], "deepspeed" not in job["keys"], on_gpu)
    compiled = job["side"] in ("torch_compiled", "torchao_tensorwise", "torchao_rowwise", "nf4")
    if compiled:
        for block in blocks:
            block.compile()
    loss = loss_by(job["side"], compiled)
    ids = torch.randint(0, job["config"]["vocab_size"], (N_BATCHES, rows // micro, micro, length + 1), device=device)

    def step(i):
        for batch in ids[i % N_BATCHES]:
            hidden = model(batch[:, :-1]).flatten(0, 1)
            (loss(hidden, head, batch[:, 1:].flatten()) * micro / rows).backward()
        update.step()

    times, submitted = [], []
    with attention_backends() if on_gpu else contextlib.nullcontext():
        while not done(job, times[job["warm"]:]):
            began = time.perf_counter()
            step(len(times))
            submitted.append(time.perf_counter() - began)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    ended = time.time()
    result = {"speeds": [length * rows / seconds for seconds in times[job["warm"]:]], "first_step_seconds": times[0],
              "ended": ended, "submit_ms": 1e3 * sorted(submitted)[len(submitted) // 2], "model": name}
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        result |= {"device_used_bytes": total - free, "peak_allocated_bytes": torch.cuda.max_memory_allocated()}
    return result


def done(job: dict, seconds: list) -> bool:
    return len(seconds) >= job["least_steps"] and sum(seconds) >= job["side_seconds"]


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
