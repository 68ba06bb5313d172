"""Reads adapters with a module for each expert, in the layout of vLLM, without PEFT.

    python tests/reference/per_expert_lora.py                        # makes the fixtures of candle-ext/model
    python tests/reference/per_expert_lora.py BASE ADAPTER           # compares an adapter with ours, and with PEFT

The names are those of vLLM's `FusedMoEWithLoRA`: `base_model.model.` + module + `.lora_A.weight` [r, in] and
`.lora_B.weight` [out, r], with one module for each matrix of each expert, such as `model.layers.0.mlp.experts.0.gate_proj`.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tiny_models import FIXTURES, inputs, reference

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "base_model.model."
EXPERT = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
# The columns of transformers' fused parameter: first the gate projection, then the up projection.
PARTS = {
    "gate_proj": ("gate_up_proj", 0), "w1": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
    "w3": ("gate_up_proj", 1), "down_proj": ("down_proj", None), "w2": ("down_proj", None),
}


class Adapted:
    """A transformers model whose weights are W + scaling B A, as functions of the factors."""

    def __init__(self, model, factors, scaling):
        self.model, self.factors, self.scaling, self.config = model, factors, scaling, model.config

    def named_parameters(self):
        return self.factors.items()

    def zero_grad(self):
        for factor in self.factors.values():
            factor.grad = None

    def __call__(self, *args, **kwargs):
        return torch.func.functional_call(self.model, self.weights(), args, kwargs)

    def weights(self):
        weights = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        for name, a in self.factors.items():
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                delta = self.scaling * self.factors[f"{module}.lora_B.weight"] @ a
                add(weights, module, delta)
        return weights


def add(weights, module, delta):
    expert = EXPERT.fullmatch(module)
    if expert is None:
        name = module.replace("block_sparse_moe", "mlp") + ".weight"
        weights[name] = weights[name] + delta
        return
    layer, index, linear = expert.groups()
    parameter, half = PARTS[linear]
    name = f"{layer}.mlp.experts.{parameter}"
    first = (half or 0) * delta.shape[0]
    update = torch.zeros_like(weights[name])
    update[int(index), first : first + delta.shape[0]] += delta
    weights[name] = weights[name] + update


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def read(folder):
    """Returns factors and scaling of an adapter whose modules all have one rank."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    assert not config["rank_pattern"] and not config["alpha_pattern"] and not config["use_rslora"], config
    factors = load_file(Path(folder) / "adapter_model.safetensors")
    assert all(name.startswith(PREFIX) for name in factors), list(factors)[:3]
    return {name.removeprefix(PREFIX): tensor.float() for name, tensor in factors.items()}, config["lora_alpha"] / config["r"]


def shapes(model, base, linears, others):
    """Yields the modules of an adapter with inputs and outputs."""
    config, module = model.config, "block_sparse_moe" if base == "mixtral" else "mlp"
    weights = dict(model.named_parameters())
    for name in [name for name in weights if name.endswith("experts.down_proj")]:
        n_experts, d, f = weights[name].shape
        layer = name.split(".mlp.")[0]
        for index in range(n_experts):
            for linear in linears:
                down = PARTS[linear][0] == "down_proj"
                yield f"{layer}.{module}.experts.{index}.{linear}", *((f, d) if down else (d, f))
    for other in others:
        for name, weight in weights.items():
            if name.endswith(f"{other}.weight"):
                n_out, n_in = weight.shape
                yield name.removesuffix(".weight").replace(".mlp.gate", f".{module}.gate"), n_in, n_out


def make(name, base, linears, others, targets=None):
    torch.manual_seed(13)
    model, r, alpha = load(FIXTURES / base), 3, 5
    factors = {}
    for module, n_in, n_out in shapes(model, base, linears, others):
        factors[f"{module}.lora_A.weight"] = (torch.randn(r, n_in) * n_in**-0.5).requires_grad_()
        factors[f"{module}.lora_B.weight"] = (0.2 * torch.randn(n_out, r)).requires_grad_()
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file({PREFIX + name: tensor.detach() for name, tensor in factors.items()}, folder / "adapter_model.safetensors")
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=r, lora_alpha=alpha, use_rslora=False, bias="none")
    config |= dict(target_modules=targets or sorted([*linears, *others]), rank_pattern={}, alpha_pattern={}, lora_dropout=0.0)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    adapted = Adapted(model, factors, alpha / r)
    save_file(reference(adapted, *inputs(model.config.vocab_size, None)), folder / "reference.safetensors")


def split(name, source, plain, changes):
    """Writes an adapter of 3-D parameters with a module for each projection of each expert.

    The factors of the parameter `plain` have the plain name; PEFT writes those of another parameter below `base_layer`.
    """
    config, tensors, n_experts = json.loads((FIXTURES / source / "adapter_config.json").read_text()), {}, 6
    factors = load_file(FIXTURES / source / "adapter_model.safetensors")
    for name_of_a in [name for name in factors if name.endswith(".lora_A.weight")]:
        module = name_of_a.removesuffix(".lora_A.weight")
        a, b = factors[name_of_a], factors[f"{module}.lora_B.weight"]
        if ".experts" not in module:
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            continue
        parameter = plain if module.endswith("experts") else "gate_up_proj"
        linears = ("gate_proj", "up_proj") if parameter == "gate_up_proj" else ("down_proj",)
        # A holds the ranks of one expert after those of another; in the columns of B, the expert varies fastest.
        a, b = a.reshape(n_experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, n_experts)
        for index in range(n_experts):
            for linear, rows in zip(linears, b[..., index].chunk(len(linears))):
                of_expert = f"{module.removesuffix('.base_layer')}.{index}.{linear}"
                tensors[f"{of_expert}.lora_A.weight"] = a[index].clone()
                tensors[f"{of_expert}.lora_B.weight"] = rows.clone()
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config |= dict(target_parameters=None) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def compare(what, got, want):
    error = ((got - want).norm() / want.norm()).item()
    print(f"  {what}: relative error {error:.1e}")
    return error < 1e-5


def check(base, adapter):
    print(f"{base} with {adapter}")
    torch.manual_seed(0)
    model = load(base)
    ids = torch.randint(0, model.config.vocab_size, (13,))
    with tempfile.TemporaryDirectory() as out, torch.no_grad():
        command = ["cargo", "run", "-q", "-p", "candlewick-model", "--example", "roundtrip", "--", str(base), out]
        subprocess.run([*command, ",".join(map(str, ids.tolist())), str(adapter)], cwd=ROOT, check=True)
        ours = load_file(Path(out) / "logits.safetensors")["logits"]
        want = Adapted(model, *read(adapter))(ids[None]).logits[0]
        again = Adapted(model, *read(Path(out) / "adapter"))(ids[None]).logits[0]
        merged = load(Path(out) / "model")(ids[None]).logits[0]
        ok = compare("ours", ours, want) & compare("written again", again, want) & compare("merged", merged, want)
        assert ((model(ids[None]).logits[0] - want).norm() / want.norm()).item() > 1e-2, "the adapter does nothing"
    # PEFT converts these names only if all projections have adapters, and not for every model.
    linears = {found.group(3) for found in map(EXPERT.match, read(adapter)[0]) if found}
    if len(linears) < 3:
        return ok
    from peft import PeftModel

    with torch.no_grad():
        peft = PeftModel.from_pretrained(load(base), adapter)(ids[None]).logits[0]
    return ok & compare("peft", peft, want)


def main():
    if sys.argv[1:]:
        base, adapter = map(Path, sys.argv[1:])
        if not check(base, adapter):
            sys.exit("some logits differ")
        return
    make("mixtral-experts-lora", "mixtral", ["w1", "w2", "w3"], ["gate"])
    # One half of the fused parameter, and not the modules of the same name in shared experts and the dense layer.
    make("qwen2_moe-up-lora", "qwen2_moe", ["up_proj"], [], r".*\.experts\.\d+\.up_proj")
    split("olmoe-split-lora", "olmoe-lora", "gate_up_proj", dict(target_modules=["gate_proj", "up_proj"]))
    # The expression leaves the MLP of the dense layer out.
    modules = r".*\.(q_proj|o_proj|mlp\.gate|experts\.\d+\.(gate|up|down)_proj)"
    patterns = dict(rank_pattern={"down_proj": 2}, alpha_pattern={"mlp.gate": 9})
    split("qwen3_moe-split-lora", "qwen3_moe-lora", "down_proj", dict(target_modules=modules) | patterns)


if __name__ == "__main__":
    main()
