"""Makes the tiny checkpoints of candle-ext/model/tests/fixtures with transformers and peft.

For each: a model folder, and reference.safetensors with token ids of two sequences, labels, logits, the loss and
every parameter's gradient, computed by torch on CPU in f32 with eager attention. Weights are rounded to the dtype on
disk first. For mixtures of experts it also has transformers' load-balancing loss and the gradients of this loss.

    python tests/reference/tiny_models.py [NAME..]

The name of a model also makes its adapters; the name of an adapter makes it alone, from the model's committed folder.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

FIXTURES = Path(__file__).resolve().parents[2] / "candle-ext" / "model" / "tests" / "fixtures"
LENGTHS = [9, 7]
SMALL = dict(
    vocab_size=40, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
# name: model type, dtype on disk, additional config keys
MODELS = {
    "llama": ("llama", torch.float32, dict(attention_bias=True, mlp_bias=True, pad_token_id=5, head_dim=4)),
    "llama3": ("llama", torch.bfloat16, dict(tie_word_embeddings=True, rope_parameters=LLAMA3, head_dim=8)),
    "mistral": ("mistral", torch.float16, dict(sliding_window=3, head_dim=8)),
    "qwen2": ("qwen2", torch.bfloat16, dict(tie_word_embeddings=True)),
    "qwen3": (
        "qwen3", torch.bfloat16,
        dict(head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=1, rope_theta=1e6),
    ),
}
# Mixtures of experts: per-expert names on disk except for qwen3_moe, whose experts are fused as transformers holds them.
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12)
MOE_MODELS = {
    "mixtral": ("mixtral", torch.float32, dict(num_local_experts=5, num_experts_per_tok=2, head_dim=8)),
    "qwen2_moe": (
        "qwen2_moe", torch.bfloat16,
        dict(**EXPERTS, shared_expert_intermediate_size=10, num_hidden_layers=3, mlp_only_layers=[1]),
    ),
    "qwen3_moe": ("qwen3_moe", torch.bfloat16, dict(**EXPERTS, head_dim=8, norm_topk_prob=True, decoder_sparse_step=2)),
    "olmoe": ("olmoe", torch.float32, dict(num_experts=6, num_experts_per_tok=3)),
    "dots1": (
        "dots1", torch.bfloat16,
        dict(
            n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=2, n_group=4,
            topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.5, first_k_dense_replace=1, head_dim=8,
            num_hidden_layers=3,
        ),
    ),
    "glm4_moe": (
        "glm4_moe", torch.bfloat16,
        dict(
            n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=1, n_group=3,
            topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=1, head_dim=12, attention_bias=True,
            use_qk_norm=True, num_hidden_layers=3, partial_rotary_factor=0.5,
        ),
    ),
}

# Multimodal models: dtype on disk, further keys of the text and keys of the vision tower.
MROPE = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e6)
QWEN_VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=16, patch_size=2, in_channels=1,
)
MULTIMODAL_MODELS = {
    # The keys of the text at the top of config.json, as on the Hub.
    "qwen2_vl": (
        torch.bfloat16, dict(rope_parameters=MROPE, hidden_size=32),
        dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=1, patch_size=2, in_channels=1),
    ),
    # The tensor names that transformers 4.52 wrote.
    "qwen2_5_vl": (
        torch.float32, dict(rope_parameters=MROPE, hidden_size=32, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        QWEN_VISION | dict(window_size=4, fullatt_block_indexes=[0], out_hidden_size=32),
    ),
    "qwen3_vl": (
        torch.bfloat16, dict(rope_parameters=MROPE, head_dim=8),
        QWEN_VISION | dict(deepstack_visual_indexes=[0], num_position_embeddings=16),
    ),
    "mistral3": (
        torch.float16, dict(model_type="mistral", sliding_window=3, head_dim=8),
        dict(
            model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            head_dim=8, patch_size=4, image_size=8,
        ),
    ),
}


def randomise(model):
    """Moves norms and biases away from one and zero, so that a missing one shows."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
        elif name.endswith("bias"):
            parameter.data = 0.3 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn_like(buffer))


def load_balancing(model, ids):
    """transformers' load-balancing loss of both sequences, padded to one length, and its gradients; nothing without one."""
    if not hasattr(model.config, "router_aux_loss_coef"):
        return {}
    rows = ids.split(LENGTHS)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    model.zero_grad()
    loss = model(padded, attention_mask=mask, output_router_logits=True).aux_loss
    loss.backward()
    grads = {f"aux_grad.{name}": p.grad.contiguous() for name, p in model.named_parameters() if p.grad is not None}
    return {"aux_loss": loss.detach()} | {name: grad for name, grad in grads.items() if grad.any()}


def inputs(vocab_size, pad_id):
    ids = torch.randint(0, vocab_size, (sum(LENGTHS),))
    if pad_id is not None:
        ids[3] = ids[11] = pad_id
    labels = ids.clone()
    labels[:3] = -100
    labels[12] = -100
    return ids, labels


def reference(model, ids, labels):
    """Returns logits of each sequence alone, the mean loss over all targets, and its gradient."""
    model.zero_grad()
    logits, losses, n_targets = [], 0.0, 0
    for row, target in zip(ids.split(LENGTHS), labels.split(LENGTHS)):
        row_logits = model(row[None]).logits[0]
        logits.append(row_logits)
        losses = losses + torch.nn.functional.cross_entropy(
            row_logits[:-1], target[1:], ignore_index=-100, reduction="sum"
        )
        n_targets += int((target[1:] != -100).sum())
    loss = losses / n_targets
    loss.backward()
    result = {"ids": ids.int(), "labels": labels, "lengths": torch.tensor(LENGTHS)}
    result |= {"logits": torch.cat(logits).detach(), "loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            own_name = name.replace("model.language_model.", "model.")
            result[f"grad.{own_name}"] = parameter.grad.contiguous()
    return result


def fuse_experts(folder, model):
    """Replaces the tensors of each expert by the 3-D parameters that transformers holds in memory."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def save_fused(name):
    """Writes fused/NAME, the weights of a model as transformers writes them with `save_original_format=False`."""
    folder = FIXTURES / "fused" / name
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype="auto")
    model.save_pretrained(folder, save_original_format=False)
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            file.unlink()


def older_config(folder):
    """Returns config.json as transformers 4 wrote it: rope_theta, rope_scaling and torch_dtype."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_scaling"] = config.pop("rope_parameters")
    config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2) + "\n")


def make(name, model_type, dtype, extra):
    torch.manual_seed(len(name) * 1000 + sum(map(ord, name)))
    config = AutoConfig.for_model(model_type, **{**SMALL, **extra})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model)
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name == "qwen3_moe":
        fuse_experts(folder, model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if name == "llama3":
        older_config(folder)
    ids, labels = inputs(config.vocab_size, config.pad_token_id)
    save_file(reference(model, ids, labels) | load_balancing(model, ids), folder / "reference.safetensors")
    return model


def flat_config(folder):
    """Writes config.json with the keys of the text at the top, as in older checkpoints of Qwen's multimodal models."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    del text["model_type"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(text | config, indent=2) + "\n")


def make_multimodal(name, dtype, text, vision):
    """Makes a multimodal model, and the reference of its text. Its vision tower gets no gradient."""
    torch.manual_seed(sum(map(ord, name)))
    config = AutoConfig.for_model(name, text_config={**SMALL, **text}, vision_config=vision, tie_word_embeddings=name == "qwen3_vl")
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    randomise(model)
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder, save_original_format=name != "qwen2_5_vl")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name == "qwen2_vl":
        flat_config(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    save_file(reference(model, *inputs(config.text_config.vocab_size, None)), folder / "reference.safetensors")


def save_adapter(name, model, vocab_size):
    """Gives the adapter of a model random values, and saves it with its reference."""
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data = 0.2 * torch.randn_like(parameter)
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    drop_location(folder / "adapter_config.json")
    result = reference(model, *inputs(vocab_size, None))
    named = {key.replace(".default.", ".").replace("grad.base_model.model.", "grad."): t for key, t in result.items()}
    save_file(named, folder / "reference.safetensors")


def make_multimodal_adapter(base):
    """Makes an adapter on the text of a multimodal model, as a PEFT user selects it."""
    torch.manual_seed(13)
    model = AutoModelForImageTextToText.from_pretrained(FIXTURES / base, dtype=torch.float32, attn_implementation="eager")
    vocab_size = model.config.text_config.vocab_size
    modules = [f"model.language_model.layers.{layer}.{module}" for layer in range(2) for module in ["self_attn.q_proj", "mlp.up_proj"]]
    model = get_peft_model(model.eval(), LoraConfig(r=2, lora_alpha=5, task_type="CAUSAL_LM", target_modules=modules))
    save_adapter(f"{base}-lora", model, vocab_size)


def make_adapter(base):
    """Makes an adapter on the qwen2 model with PEFT's variations: ranks, alphas, layers, rank-stabilized scaling."""
    torch.manual_seed(7)
    config = LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, task_type="CAUSAL_LM", layers_to_transform=[1],
        target_modules=["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"],
        rank_pattern={"down_proj": 2}, alpha_pattern={r"self_attn\.k_proj": 9},
    )
    model = get_peft_model(base, config)
    save_adapter("qwen2-lora", model, base.config.vocab_size)


# Adapters of experts: model, how many ranks and which names. `per_expert` has the names of transformers 4.
MOE_ADAPTERS = {
    # Both 3-D parameters of the experts, the router and attention, with two ranks.
    "qwen3_moe-lora": dict(
        base="qwen3_moe", target_modules=["q_proj", "o_proj"], rank_pattern={r"experts\.down_proj": 2},
        alpha_pattern={"mlp.gate.weight": 9}, use_rslora=True,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
    ),
    # One 3-D parameter, whose factors have the plain name.
    "olmoe-lora": dict(base="olmoe", target_modules=[], target_parameters=["experts.gate_up_proj"]),
    # Names of transformers 4, which PEFT converts: rank 2r in memory.
    "mixtral-lora": dict(base="mixtral", target_modules=["k_proj", "w1", "w2", "w3"]),
    # PEFT does not convert the names of this model: they match shared experts and the dense layer alone.
    "qwen2_moe-lora": dict(base="qwen2_moe", target_modules=["gate_proj", "down_proj"]),
    # The gate of the shared expert, a linear layer with one output.
    "qwen2_moe-gate-lora": dict(base="qwen2_moe", target_modules=["k_proj", "shared_expert_gate"]),
}


def make_moe_adapter(name, base, **config):
    """Makes an adapter of experts; see MOE_ADAPTERS. References of gradients are those of PEFT's own factors."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / base, dtype=torch.float32, attn_implementation="eager")
    vocab_size = model.config.vocab_size
    model = get_peft_model(model.eval(), LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **config))
    save_adapter(name, model, vocab_size)


def drop_location(path):
    """Removes values that differ from run to run."""
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = None
    config["target_modules"].sort()
    if config.get("target_parameters"):
        config["target_parameters"].sort()
    path.write_text(json.dumps(config, indent=2) + "\n")


def main():
    models = {name: make(name, *how) for name, how in (MODELS | MOE_MODELS).items() if name in (sys.argv[1:] or [name])}
    for name, how in MULTIMODAL_MODELS.items():
        if name in (sys.argv[1:] or [name]):
            make_multimodal(name, *how)
            if name == "qwen3_vl":
                make_multimodal_adapter(name)
    if "qwen2" in models:
        make_adapter(models["qwen2"])
    for name in models.keys() & MOE_MODELS.keys() - {"qwen3_moe"}:
        save_fused(name)
    for name, how in MOE_ADAPTERS.items():
        if how["base"] in models or name in sys.argv[1:]:
            make_moe_adapter(name, **how)
    total = sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file())
    print(f"{total} bytes in {FIXTURES}")


if __name__ == "__main__":
    main()
