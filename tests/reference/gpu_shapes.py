"""Models whose training steps gpu_bench.py times, their FLOPs and their memory in torch."""
from dataclasses import dataclass, field, replace

PEAK = 989.5e12
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model, and its training."""
    config: dict
    # Keys of the recipe, added to those of gpu_bench.recipe_of.
    keys: dict = field(default_factory=dict)
    # Rows of a micro-batch; a step has four rows.
    micro_batch_size: int = 1
    # A published throughput in tokens/s on one H100, and its source.
    mark: int | None = None
    mark_source: str | None = None
    # Steps of 16 tokens a row are timed too: they are as long as the host takes to submit a step.
    times_host: bool = False


def llama(d: int, f: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool, theta: float, positions: int) -> dict:
    return dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=d, intermediate_size=f,
                num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
                max_position_embeddings=positions, rms_norm_eps=1e-5, rope_theta=theta, tie_word_embeddings=tied)


def qwen2(d: int, f: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> dict:
    return dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=d, intermediate_size=f,
                num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
                max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=tied)


LLAMA_1B = {**llama(2048, 8192, 16, 32, 8, 128256, True, 500000.0, 131072), "head_dim": 64}
SMOLLM2_135M = llama(576, 1536, 30, 9, 3, 49152, True, 100000.0, 8192)
SMOLLM2_1_7B = llama(2048, 8192, 24, 32, 32, 49152, True, 130000.0, 8192)
LLAMA_8B = llama(4096, 14336, 32, 32, 8, 128256, False, 500000.0, 131072)
QWEN_0_5B = qwen2(896, 4864, 24, 14, 2, 151936, True)
QWEN_7B = qwen2(3584, 18944, 28, 28, 4, 152064, False)
QWEN3_4B = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=2560, intermediate_size=9728,
                num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0,
                tie_word_embeddings=True)
# Six layers of Qwen3-30B-A3B, and a dense model with equal FLOPs per token: its MLPs are as wide as a token's eight experts.
QWEN_MOE = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144,
                num_hidden_layers=6, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
                max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False,
                num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True)
DENSE_TWIN = {**{key: QWEN_MOE[key] for key in QWEN3_4B}, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=600)
TINY_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)

BF16_STATE = {"deepspeed": {"bf16": {"bf16_optimizer_states": True}}}
LORA = {"model": {"peft_config": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1, "target_modules": "all-linear"}}}
# Sections `precision` of models in FP8. `auto` keeps layers in bf16 that are slower in FP8.
FP8 = {recipe: {"precision": {"recipe": recipe}} for recipe in ("delayed", "current", "blockwise")} | {
    "auto": {"precision": {"recipe": "delayed", "exclude_slower_modules": True}}}
NEMO = "NeMo Automodel, LoRA of rank 16"
BASES = {"4B": Case(QWEN3_4B), "8B": Case(LLAMA_8B, BF16_STATE)}
# Names of the models that are timed by default.
DEFAULT = ("Llama-3.2-1B", "SmolLM2-1.7B", "Qwen3-4B")
CASES = {
    "Llama-3.2-1B": Case(LLAMA_1B), "SmolLM2-1.7B": Case(SMOLLM2_1_7B), "Qwen3-4B": Case(QWEN3_4B),
    "1.7B-mb2": Case(SMOLLM2_1_7B, micro_batch_size=2), "4B-mb2": Case(QWEN3_4B, micro_batch_size=2),
    "8B-bf16-moments": Case(LLAMA_8B, BF16_STATE, mark=6667,
                            mark_source="torchtitan, full fine-tuning with FSDP and torch.compile, bf16"),
    "8B-LoRA": Case(LLAMA_8B, LORA, mark=12473, mark_source=NEMO),
    "7B-LoRA": Case(QWEN_7B, LORA, mark=14110, mark_source=NEMO),
    # The frozen weights multiply in FP8.
    "8B-LoRA-fp8": Case(LLAMA_8B, {**LORA, **FP8["delayed"]}),
    "0.5B-LoRA": Case(QWEN_0_5B, LORA, times_host=True), "135M-LoRA": Case(SMOLLM2_135M, LORA, times_host=True),
    "MoE-dense-twin": Case(DENSE_TWIN),
    "MoE": Case(QWEN_MOE, {"model": {"experts_implementation": "auto"}}),
    "MoE-cutlass": Case(QWEN_MOE, {"model": {"experts_implementation": "cutlass"}}),
    "MoE-fused": Case(QWEN_MOE, {"model": {"experts_implementation": "fused"}}),
    "MoE-delayed": Case(QWEN_MOE, FP8["delayed"]),
    # Fits in the memory of an H100.
    "MoE-4-layers": Case({**QWEN_MOE, "num_hidden_layers": 4}, {"model": {"experts_implementation": "auto"}}),
} | {f"{name}-{precision}": replace(case, keys={**case.keys, **FP8.get(precision, {})})
     for name, case in BASES.items() for precision in ("bf16", *FP8)}


def is_lora(keys: dict) -> bool:
    return "peft_config" in keys.get("model", {})


def n_weights(c: dict, n_experts: int | None = None) -> int:
    """Returns the number of weights in matmuls, the head included: with tied embeddings, nearly all. Of a mixture of experts,
    n_experts counts; default: all."""
    d, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim", d // heads)
    attention = d * head_dim * (2 * heads + 2 * c["num_key_value_heads"])
    mlp = 3 * d * c["intermediate_size"]
    if "num_experts" in c:
        mlp = 3 * d * c["moe_intermediate_size"] * (n_experts or c["num_experts"]) + d * c["num_experts"]
    return c["num_hidden_layers"] * (attention + mlp) + c["vocab_size"] * d


def flops_per_token(c: dict, length: int, keys: dict) -> float:
    """Returns the FLOPs of a token: forward, dx and dw of each weight, and causal attention. A frozen weight has no dw."""
    heads = c["num_attention_heads"]
    head_dim = c.get("head_dim", c["hidden_size"] // heads)
    per_weight = 4 if is_lora(keys) else 6
    return per_weight * n_weights(c, c.get("num_experts_per_tok")) + 6 * c["num_hidden_layers"] * heads * head_dim * length


def torch_recomputes(c: dict, job: dict, memory_bytes: int) -> bool:
    """True if torch must recompute. Bytes: the states of a weight; per token and layer about 10 d + 4 f + 6 h k, and for LoRA the
    input of each linear layer after its dropout, with its mask."""
    head_dim = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    d, f, tokens = c["hidden_size"], c["intermediate_size"], job["length"] * job["micro_batch_size"]
    a_token = 2 * (10 * d + 4 * f + 6 * head_dim * c["num_attention_heads"])
    if is_lora(job["keys"]):
        a_token += 3 * (6 * d + f)
    # Logits and their gradients in f32, and the memory of libraries.
    logits = 3 * 4 * c["vocab_size"] * tokens
    states = torch_state_bytes(job["keys"]) * n_weights(c)
    return states + c["num_hidden_layers"] * a_token * tokens + logits + 2 * GIB > memory_bytes


def torch_state_bytes(keys: dict) -> int:
    """Returns torch's bytes of a weight with its gradient, master and moments; bf16 moments come without masters."""
    if is_lora(keys):
        return 2
    return 8 if "deepspeed" in keys else 18
