"""Routes random logits with Megatron-LM and transformers, for candle-ext/ops/tests/it/moe/router_fixture.rs.

    pip install torch==2.15.0 transformers==5.23.0 && pip install --no-deps megatron-core==0.16.1
    python tests/reference/moe_router.py

Each case has its settings, the weights as a dense [t, e] matrix (0 for experts that were not chosen), and the gradient
of the logits for the upstream gradient `upstream` of that matrix. Losses have their value and gradient.
"""

import json
from pathlib import Path
from unittest import mock

import torch
from megatron.core.transformer.moe import moe_utils
from transformers import DeepseekV3Config, DeepseekV4Config, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

OUT = Path(__file__).resolve().parents[2] / "candle-ext" / "ops" / "tests" / "fixtures" / "moe_router.json"
T, E = 7, 16

torch.manual_seed(0)
LOGITS = (torch.randn(T, E) * 2).float()
BIAS = (torch.randn(E) * 0.2).float()
UPSTREAM = torch.randn(T, E).float()
IDENTITY = torch.eye(E)


def settings(top_k, score, **changes):
    return dict(top_k=top_k, score=score, order="score_first", normalize=False, groups=None, scaling=1.0, bias=False) | changes


def dense(logits, weights, experts):
    return torch.zeros_like(logits).scatter(1, experts, weights)


def case(name, spec, route, config=None):
    logits = LOGITS.clone().requires_grad_()
    probs = route(logits)
    (probs * UPSTREAM).sum().backward()
    return dict(name=name, settings=spec, config=config, weights=probs.tolist(), grad=logits.grad.tolist())


def config_keys(top_k, score="softmax", pre_softmax=False, groups=None, scaling=None, bias=False):
    """Keys of config.json with the names of Megatron-LM's `TransformerConfig`, for candle-ext/model/tests/it/router_keys.rs."""
    keys = dict(num_experts=E, num_experts_per_tok=top_k, moe_router_score_function=score, moe_router_enable_expert_bias=bias,
                moe_router_topk_scaling_factor=scaling)
    # transformers reads norm_topk_prob: softmax of the selected logits is the normalized softmax of all.
    keys |= dict(moe_router_pre_softmax=pre_softmax, norm_topk_prob=not pre_softmax) if score == "softmax" else {}
    n_groups, n_selected = groups or (None, None)
    return keys | dict(moe_router_num_groups=n_groups, moe_router_group_topk=n_selected)


def megatron(top_k, score="softmax", pre_softmax=False, groups=None, scaling=None, bias=False):
    # Megatron-LM sums the top (k / selected groups) scores of a group.
    limit = groups and dict(n_groups=groups[0], n_selected=groups[1], n_scores_per_group=top_k // groups[1])
    order = "score_first" if pre_softmax or score != "softmax" else "top_k_first"
    spec = settings(top_k, score, order=order, normalize=score != "softmax" and top_k > 1, groups=limit,
                    scaling=scaling or 1.0, bias=bias)
    n_groups, n_selected = groups or (None, None)
    route = lambda logits: moe_utils.topk_routing_with_score_function(
        logits, top_k, use_pre_softmax=pre_softmax, num_groups=n_groups, group_topk=n_selected,
        scaling_factor=scaling, score_function=score, expert_bias=BIAS if bias else None)[0]
    return case(f"megatron {spec}", spec, route, config_keys(top_k, score, pre_softmax, groups, scaling, bias))


def of_router(name, spec, router, config=None):
    # Identity weights make the router's input its logits.
    router.weight.data = IDENTITY.clone()

    def route(logits):
        outputs = router(logits)
        return dense(logits, outputs[1], outputs[2])

    return case(name, spec, route, config)


def deepseek_v3():
    config = DeepseekV3Config(hidden_size=E, n_routed_experts=E, num_local_experts=E, num_experts_per_tok=4, n_group=4,
                              topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5)
    router = DeepseekV3TopkRouter(config)
    router.e_score_correction_bias.copy_(BIAS)
    limit = dict(n_groups=4, n_selected=2, n_scores_per_group=2)
    spec = settings(4, "sigmoid", normalize=True, groups=limit, scaling=2.5, bias=True)
    return of_router("transformers deepseek_v3", spec, router)


def deepseek_v4():
    config = DeepseekV4Config(hidden_size=E, n_routed_experts=E, num_local_experts=E, num_experts_per_tok=4,
                              scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)
    router = DeepseekV4TopKRouter(config)
    router.e_score_correction_bias.copy_(BIAS)
    spec = settings(4, "sqrt_softplus", normalize=True, scaling=1.5, bias=True)
    # megatron-core 0.16.1 has no sqrtsoftplus.
    return of_router("transformers deepseek_v4", spec, router, config_keys(4, "sqrtsoftplus", scaling=1.5, bias=True))


def qwen3_moe():
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=E, num_experts=E, num_experts_per_tok=4, norm_topk_prob=True))
    return of_router("transformers qwen3_moe", settings(4, "softmax", normalize=True), router)


def gpt_oss():
    router = GptOssTopKRouter(GptOssConfig(hidden_size=E, num_local_experts=E, num_experts_per_tok=3))
    return of_router("transformers gpt_oss", settings(3, "softmax", order="top_k_first"), router)


def loss(compute):
    logits = LOGITS.clone().requires_grad_()
    value = compute(logits)
    value.backward()
    return dict(value=value.item(), grad=logits.grad.tolist())


def balance(score, top_k):
    counts = moe_utils.compute_routing_scores_for_aux_loss(LOGITS, top_k, score)[0].sum(0)

    def compute(logits):
        probs = moe_utils.compute_routing_scores_for_aux_loss(logits, top_k, score)[1]
        return moe_utils.switch_load_balancing_loss_func(probs, counts, T, top_k, E, 1.0)

    return dict(score=score, top_k=top_k, counts=counts.tolist()) | loss(compute)


def by_sequence(x, n_sequences):
    """Reorders packed rows to Megatron-LM's layout: the tokens of all sequences in turn."""
    return x.reshape(n_sequences, -1, x.shape[-1]).transpose(0, 1).reshape(-1, x.shape[-1])


def sequence_balance(score, top_k, n_sequences=2, n_tokens=6):
    """`TopKRouter._apply_seq_aux_loss` for packed sequences of equal length."""
    length = n_tokens // n_sequences

    def compute(logits):
        rows = by_sequence(logits[:n_tokens], n_sequences)
        chosen, probs = moe_utils.compute_routing_scores_for_aux_loss(rows, top_k, score)
        counts = chosen.reshape(length, -1).sum(0)
        return moe_utils.switch_load_balancing_loss_func(
            probs.reshape(length, -1), counts, length, top_k, E, 1.0) / n_sequences

    return dict(score=score, top_k=top_k, n_sequences=n_sequences, n_tokens=n_tokens) | loss(compute)


def global_balance(score, top_k, n_micros=2, n_tokens=6):
    """`TopKRouter._apply_global_aux_loss` of micro-batches of equal size: the mean of their losses."""
    def compute(logits):
        sums, losses = torch.zeros(E), []
        for step, rows in enumerate(logits[:n_tokens].chunk(n_micros), 1):
            chosen, probs = moe_utils.compute_routing_scores_for_aux_loss(rows, top_k, score)
            sums = sums + chosen.sum(0)
            losses.append(moe_utils.switch_load_balancing_loss_func(probs, sums / step, len(rows), top_k, E, 1.0))
        return torch.stack(losses).mean()

    return dict(score=score, top_k=top_k, n_micros=n_micros, n_tokens=n_tokens) | loss(compute)


def updated_bias(rate=1e-3):
    counts = moe_utils.topk_routing_with_score_function(LOGITS, 4, score_function="sigmoid", expert_bias=BIAS)[1].sum(0)
    # One expert has the mean.
    counts[0], counts[1:] = 4, torch.where(counts[1:] == 4, 5, counts[1:])
    counts[1] += 4 * E - counts.sum()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    moe_utils.parallel_state.get_tensor_and_data_parallel_group = lambda **_: None
    updated = moe_utils.get_updated_expert_bias(counts.float(), BIAS, rate)
    torch.distributed.destroy_process_group()
    return dict(counts=counts.tolist(), rate=rate, updated=updated.tolist())


def first_of_equals(x, k, dim, sorted):
    """`torch.topk` that chooses the first of equal elements; torch leaves it open, and so does Megatron-LM."""
    values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
    return values[:k], indices[:k]


def capacity(policy, factor, top_k=4):
    probs, chosen = moe_utils.topk_routing_with_score_function(LOGITS, top_k)
    with mock.patch("torch.topk", first_of_equals):
        kept = moe_utils.apply_router_token_dropping(probs, chosen, top_k, factor, policy)[1]
    return dict(policy=policy, factor=factor, top_k=top_k, kept=kept.int().tolist())


def gating_f64(dtype, t=4, d=12, e=6):
    """Logits of a router in f64 (`--moe-router-dtype fp64`); the gradients have the dtype of input and weight."""
    x, w = [torch.randn(n, d).to(dtype).requires_grad_() for n in (t, e)]
    upstream = torch.randn(t, e).float()
    # Without Transformer Engine megatron-core does not define this name.
    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
        logits = moe_utils.router_gating_linear(x, w, None, torch.float64)
        logits.backward(upstream.double())
    numbers = dict(x=x, w=w, upstream=upstream, logits=logits, dx=x.grad, dw=w.grad)
    return dict(dtype=str(dtype).removeprefix("torch.")) | {name: value.tolist() for name, value in numbers.items()}


found = dict(
    logits=LOGITS.tolist(), bias=BIAS.tolist(), upstream=UPSTREAM.tolist(),
    cases=[
        megatron(4), megatron(1, pre_softmax=True), megatron(4, pre_softmax=True, scaling=2.0),
        megatron(4, groups=(4, 2)), megatron(4, pre_softmax=True, groups=(8, 4)),
        megatron(1, "sigmoid"), megatron(4, "sigmoid"), megatron(4, "sigmoid", bias=True, scaling=2.5),
        megatron(4, "sigmoid", groups=(4, 2), bias=True),
        deepseek_v3(), deepseek_v4(), qwen3_moe(), gpt_oss(),
    ],
    load_balancing=[balance("softmax", 1), balance("softmax", 4), balance("sigmoid", 4)],
    sequence_load_balancing=[sequence_balance("softmax", 2), sequence_balance("sigmoid", 4)],
    global_load_balancing=[global_balance("softmax", 2), global_balance("sigmoid", 4)],
    z_loss=loss(lambda logits: moe_utils.z_loss_func(logits, 1.0)),
    sinkhorn=moe_utils.sinkhorn(LOGITS).tolist(),
    capacity=[capacity("probs", 1.0), capacity("probs", 0.5), capacity("probs", 8.0),
              capacity("position", 1.0), capacity("position", 0.5), capacity("position", 1.5)],
    updated_bias=updated_bias(),
    padded=[moe_utils.pad_routing_map(moe_utils.topk_routing_with_score_function(LOGITS, 4)[1].int(), 3).tolist()],
    gating_f64=[gating_f64(torch.float32), gating_f64(torch.bfloat16)],
)
OUT.parent.mkdir(exist_ok=True)
OUT.write_text(json.dumps(found) + "\n")
