#!/usr/bin/env python3
"""Training steps of a random model by torch and transformers on the CPU: prints tokens/s of each step as a JSON list.

cpu_bench.py calls it with {"config", "rows", "length", "accumulated", "steps"}.
"""
import json
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

work = json.loads(sys.argv[1])
settings = dict(work["config"])
model_type = settings.pop("model_type")
config = AutoConfig.for_model(model_type, **settings, bos_token_id=1, eos_token_id=2, pad_token_id=0)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
speeds = []
for _ in range(work["steps"]):
    began = time.perf_counter()
    for _ in range(work["accumulated"]):
        ids = torch.randint(0, 512, (work["rows"], work["length"] + 1))
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        (loss / work["accumulated"]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
    speeds.append(work["accumulated"] * work["rows"] * work["length"] / (time.perf_counter() - began))
print(json.dumps(speeds))
