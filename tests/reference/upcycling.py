"""Makes candle-ext/model/tests/fixtures/upcycling.safetensors with megatron-core's upcycling of one dense MLP.

Tensors of granularity g and e experts are named `g{g}_e{e}.`: `fc1` and `fc2` hold the matrices of all experts, `router` the
rows of a router whose rows hold their own index, `scale` the factor on each matrix. `dense.fc1` and `dense.fc2` are the dense
MLP: gate and up projections one below the other, and the down projection.

    python tests/reference/upcycling.py
"""

from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core.transformer.moe import upcycling_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from safetensors.torch import save_file

TARGET = Path(__file__).resolve().parents[2] / "candle-ext" / "model" / "tests" / "fixtures" / "upcycling.safetensors"
HIDDEN, INTERMEDIATE = 16, 20
CASES = [(1, 3, 2), (2, 6, 2), (2, 4, 4), (4, 8, 4), (5, 10, 5)]


class Module(torch.nn.Module):
    """A module with the given attributes, which megatron's function reads."""

    def __init__(self, **attributes):
        torch.nn.Module.__init__(self)
        for name, value in attributes.items():
            setattr(self, name, value)


class MoeLayer(Module, BaseMoELayer):
    def forward(self, hidden_states):
        raise NotImplementedError


def moe_layer(granularity, n_experts, top_k):
    experts = SequentialMLP.__new__(SequentialMLP)
    torch.nn.Module.__init__(experts)
    config = SimpleNamespace(
        num_moe_experts=n_experts, gated_linear_unit=True, moe_router_topk=top_k, moe_router_pre_softmax=False,
        moe_ffn_hidden_size=INTERMEDIATE // granularity, activation_func=torch.nn.functional.silu,
    )
    rows = torch.arange(n_experts, dtype=torch.float32)[:, None].expand(n_experts, HIDDEN).contiguous()
    router = Module(weight=torch.nn.Parameter(rows))
    group = SimpleNamespace(rank=lambda: 0)
    return MoeLayer(num_local_experts=n_experts, config=config, ep_group=group, experts=experts, router=router)


def dense_model():
    torch.manual_seed(0)
    linear = [
        Module(weight=torch.nn.Parameter(torch.randn(shape)))
        for shape in [(2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    ]
    mlp = Module(linear_fc1=linear[0], linear_fc2=linear[1], config=SimpleNamespace(ffn_hidden_size=INTERMEDIATE))
    return Module(mlp=mlp)


def main():
    dense = dense_model()
    tensors = {f"dense.fc{i}": getattr(dense.mlp, f"linear_fc{i}").weight.detach() for i in [1, 2]}
    for granularity, n_experts, top_k in CASES:
        moe = Module(mlp=moe_layer(granularity, n_experts, top_k))
        state = upcycling_utils.upcycle_state_dict([moe], [dense])["model"]
        name = f"g{granularity}_e{n_experts}"
        for fc in ["fc1", "fc2"]:
            of_experts = [state[f"mlp.experts.local_experts.{i}.linear_{fc}.weight"] for i in range(n_experts)]
            tensors[f"{name}.{fc}"] = torch.stack(of_experts).detach().contiguous()
        tensors[f"{name}.router"] = state["mlp.router.weight"].detach().contiguous()
        tensors[f"{name}.scale"] = torch.tensor(granularity ** (1 / 3))
    save_file(tensors, TARGET)
    print(f"{TARGET.stat().st_size} bytes in {TARGET}")


if __name__ == "__main__":
    main()
