"""Makes candle-ext/parallel/tests/fixtures/mtp with megatron-core's GPTModel: a tiny Qwen3 with two MTP layers, its losses and
all gradients. The model has f32 weights and runs on the CPU.

    python tests/reference/mtp.py
"""

import contextlib
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

TARGET = Path(__file__).resolve().parents[2] / "candle-ext" / "parallel" / "tests" / "fixtures" / "mtp"
LAYERS, MTP_LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LENGTH = 2, 2, 16, 24, 4, 2, 8, 40, 11
IGNORED = -100

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


# Nothing is random: there is no dropout.
CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()


def model():
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=KV_HEADS, kv_channels=HEAD_DIM,
        ffn_hidden_size=FFN, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm", layernorm_epsilon=1e-6, qk_layernorm=True, attention_dropout=0.0, hidden_dropout=0.0,
        mtp_num_layers=MTP_LAYERS, mtp_loss_scaling_factor=0.1, use_cpu_initialization=True, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False, gradient_accumulation_fusion=False,
        params_dtype=torch.float32,
    )
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    gpt = GPTModel(
        config, layer, VOCAB, LENGTH, share_embeddings_and_output_weights=False, position_embedding_type="rope",
        rotary_base=10000, mtp_block_spec=get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False),
    )
    torch.manual_seed(0)
    for name, parameter in gpt.named_parameters():
        is_norm = parameter.dim() == 1
        torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.1 if is_norm else 0.2)
    return gpt.float()


def hub_tensors(tensors):
    """Returns Megatron's parameters, or their gradients, by the names of Hub checkpoints."""
    named = {}
    for name, value in tensors.items():
        value = value.detach()
        if name.startswith("decoder.layers."):
            index, rest = name.removeprefix("decoder.layers.").split(".", 1)
        elif name.startswith("mtp.layers."):
            index, rest = name.removeprefix("mtp.layers.").split(".", 1)
            index, rest = str(LAYERS + int(index)), rest.removeprefix("transformer_layer.")
        else:
            whole = {
                "embedding.word_embeddings.weight": "model.embed_tokens.weight",
                "decoder.final_layernorm.weight": "model.norm.weight",
                "output_layer.weight": "lm_head.weight",
            }
            named[whole[name]] = value
            continue
        layer = f"model.layers.{index}."
        if rest == "self_attention.linear_qkv.weight":
            groups = value.reshape(KV_HEADS, HEADS // KV_HEADS + 2, HEAD_DIM, HIDDEN)
            parts = groups.split([HEADS // KV_HEADS, 1, 1], dim=1)
            for part, rows in zip("qkv", parts):
                named[f"{layer}self_attn.{part}_proj.weight"] = rows.reshape(-1, HIDDEN)
        elif rest == "mlp.linear_fc1.weight":
            named[f"{layer}mlp.gate_proj.weight"], named[f"{layer}mlp.up_proj.weight"] = value.chunk(2)
        else:
            names = {
                "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
                "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
                "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
                "mlp.linear_fc2.weight": "mlp.down_proj.weight",
                "input_layernorm.weight": "input_layernorm.weight",
                "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
                "enorm.weight": "enorm.weight",
                "hnorm.weight": "hnorm.weight",
                "eh_proj.weight": "eh_proj.weight",
                "final_layernorm.weight": "shared_head.norm.weight",
            }
            named[layer + names[rest]] = value
    return {name: value.contiguous().clone() for name, value in named.items()}


def main():
    gpt = model()
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1))
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    mask = (torch.rand(ids.shape) < 0.7).float()
    positions = torch.arange(LENGTH).expand(2, -1)
    future = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    token_losses = gpt(ids, positions, future, labels=labels, loss_mask=mask)
    loss = (token_losses * mask).sum() / mask.sum()
    loss.backward()
    results = {
        "ids": ids.contiguous(), "targets": torch.where(mask > 0, labels, IGNORED), "loss": loss.detach(),
    }
    for depth, value in enumerate(MTPLossLoggingHelper.tracker["values"], 1):
        results[f"mtp_{depth}_loss"] = value.detach().clone()
    grads = hub_tensors({name: parameter.grad for name, parameter in gpt.named_parameters()})
    results |= {f"grad.{name}": grad for name, grad in grads.items()}
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCAB, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "num_nextn_predict_layers": MTP_LAYERS,
    }
    TARGET.mkdir(parents=True, exist_ok=True)
    (TARGET / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(hub_tensors(dict(gpt.named_parameters())), TARGET / "model.safetensors")
    save_file(results, TARGET / "reference.safetensors")


if __name__ == "__main__":
    main()
