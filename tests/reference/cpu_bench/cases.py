"""The shapes and the list of cases. A case is data; ours.py and peer.py implement it."""

from dataclasses import dataclass

SMALL = dict(model_type="llama", hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
             num_key_value_heads=2, head_dim=64, vocab_size=8192, tie_word_embeddings=False)
SMOLLM2 = dict(model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
               num_attention_heads=9, num_key_value_heads=3, head_dim=64, vocab_size=49152, tie_word_embeddings=True)
QWEN3 = dict(model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
             num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True)
QWEN2 = dict(model_type="qwen2", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
             num_attention_heads=12, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True)
QWEN3_2 = dict(QWEN3, hidden_size=2048, intermediate_size=6144)
SMOLLM2_4 = dict(SMOLLM2, num_hidden_layers=4)
# Qwen3-MoE with 39M active parameters of 215M, and the dense model of equal active FLOPs.
DENSE_512 = dict(model_type="qwen3", hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
                 num_key_value_heads=2, head_dim=64, vocab_size=8192, tie_word_embeddings=False)
MOE_512 = dict(DENSE_512, model_type="qwen3_moe", moe_intermediate_size=256, num_experts=64, num_experts_per_tok=8,
               norm_topk_prob=True, router_aux_loss_coef=0.001)
TINY = dict(SMALL, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16, vocab_size=2048)
TINY_MOE = dict(MOE_512, hidden_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2,
                num_hidden_layers=2, head_dim=16, vocab_size=2048)
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


@dataclass(frozen=True)
class Case:
    """One line of the table. The first word of its name is the operation."""

    name: str
    unit: str
    shape: dict
    # Tokens of a row; a data case's megabytes of text.
    length: int
    # Rows of a micro-batch, micro-batches of a step, steps; an evaluation's rows are `steps`, a decoding's new tokens too.
    rows: int = 1
    accumulated: int = 1
    steps: int = 1
    # f32; bf16 with f32 master weights and moments (torch: autocast); pure-bf16, where these are bf16 too. With LoRA the
    # frozen weights are bf16, and the adapter's master weights f32, as PEFT's adapter.
    dtype: str = "f32"
    # Trains a LoRA adapter of rank 16 on all linear layers.
    lora: bool = False
    # Backward recomputes the layers, ours with this `activation_checkpoint` and tiled MLPs, too.
    recomputed: str = ""
    # The --peers that differ in this case.
    peers: tuple = ("eager",)

    @property
    def what(self) -> str:
        return self.name.split()[0]

    @property
    def warm(self) -> int:
        """Drops the first steps of a run, which touch memory for the first time. A single step is kept."""
        return min(2, self.steps - 1)

    @property
    def lower_is_better(self) -> bool:
        return self.unit == "s"


# Eager torch; torch.compile; an allocator that returns no memory to the system, like ours.
PEERS = ("eager", "compile", "keep")


def train(name: str, shape: dict, rows: int, length: int, accumulated: int, steps: int) -> Case:
    return Case(f"train {name}", "tokens/s", shape, length, rows, accumulated, steps, peers=PEERS)


def train_bf16(name: str, shape: dict, length: int, steps: int) -> list[Case]:
    dtypes = ("bf16", "pure-bf16")
    return [Case(f"train {name} 1x{length} {dtype}", "tokens/s", shape, length, steps=steps, dtype=dtype)
            for dtype in dtypes]


def lora(name: str, shape: dict, length: int, dtype: str, steps: int = 5) -> Case:
    return Case(f"train lora {name} 1x{length} {dtype}", "tokens/s", shape, length, steps=steps, dtype=dtype, lora=True)


def long(name: str, shape: dict, length: int, recomputed: str = "selective") -> Case:
    return Case(f"train {name} 1x{length} {recomputed}", "tokens/s", shape, length, recomputed=recomputed, peers=PEERS[:1])


CASES = [
    train("small 4x256", SMALL, 4, 256, 1, 12),
    train("smollm2-135m 1x512", SMOLLM2, 1, 512, 1, 6),
    train("smollm2-135m 1x1024", SMOLLM2, 1, 1024, 1, 5),
    train("smollm2-135m 4x1024 accumulated", SMOLLM2, 1, 1024, 4, 4),
    train("qwen3-0.6b 1x512", QWEN3, 1, 512, 1, 4),
    *train_bf16("smollm2-135m", SMOLLM2, 512, 8),
    *train_bf16("smollm2-135m", SMOLLM2, 1024, 6),
    *train_bf16("qwen3-0.6b", QWEN3, 512, 5),
    lora("qwen2.5-1.5b", QWEN2, 512, "f32"),
    lora("qwen2.5-1.5b", QWEN2, 512, "bf16"),
    lora("qwen3-1.7b", QWEN3_2, 128, "bf16", 10),
    train("moe 64 experts 1x1024", MOE_512, 1, 1024, 1, 7),
    train("moe's dense twin 1x1024", DENSE_512, 1, 1024, 1, 7),
    train("moe 64 experts 4x2048", MOE_512, 4, 2048, 1, 5),
    train("moe's dense twin 4x2048", DENSE_512, 4, 2048, 1, 5),
    *train_bf16("moe 64 experts", MOE_512, 1024, 7),
    *train_bf16("moe's dense twin", DENSE_512, 1024, 7),
    *(long("4 layers", SMOLLM2_4, 1024 * k) for k in (4, 8, 16, 32, 64, 128)),
    long("smollm2-135m", SMOLLM2, 32768, "full"),
    Case("eval small 1x256", "tokens/s", SMALL, 256, steps=40),
    Case("eval smollm2-135m 1x512", "tokens/s", SMOLLM2, 512, steps=8),
    Case("eval smollm2-135m 1x1024", "tokens/s", SMOLLM2, 1024, steps=4),
    Case("eval moe 64 experts 1x1024", "tokens/s", MOE_512, 1024, steps=8),
    Case("decode small f32", "tokens/s", SMALL, 16, steps=128),
    Case("decode smollm2-135m f32", "tokens/s", SMOLLM2, 16, steps=128),
    Case("decode smollm2-135m bf16", "tokens/s", SMOLLM2, 16, steps=128, dtype="bf16"),
    Case("start smollm2-135m", "s", SMOLLM2, 64),
    Case("save checkpoint smollm2-135m", "s", SMOLLM2, 64),
    Case("save huggingface smollm2-135m", "s", SMOLLM2, 64),
    Case("load checkpoint smollm2-135m", "s", SMOLLM2, 64),
    Case("data 100 MB", "MB/s", SMOLLM2, 100),
    Case("profile small 4x256", "tokens/s", SMALL, 256, rows=4, steps=12),
    Case("profile smollm2-135m 1x512", "tokens/s", SMOLLM2, 512, steps=6),
]

# Tiny shapes with the same code paths, to test the scripts.
QUICK = [
    train("tiny 2x64", TINY, 2, 64, 2, 4),
    train("tiny moe 2x64", TINY_MOE, 2, 64, 2, 4),
    *train_bf16("tiny", TINY, 64, 4),
    lora("tiny", TINY, 64, "bf16"),
    long("tiny", TINY, 128),
    Case("eval tiny 1x64", "tokens/s", TINY, 64, steps=4),
    Case("eval tiny moe 1x64", "tokens/s", TINY_MOE, 64, steps=4),
    Case("decode tiny f32", "tokens/s", TINY, 16, steps=16),
    Case("decode tiny bf16", "tokens/s", TINY, 16, steps=16, dtype="bf16"),
    Case("start tiny", "s", TINY, 64),
    Case("save checkpoint tiny", "s", TINY, 64),
    Case("save huggingface tiny", "s", TINY, 64),
    Case("load checkpoint tiny", "s", TINY, 64),
    Case("data 1 MB", "MB/s", TINY, 1),
    Case("profile tiny 2x64", "tokens/s", TINY, 64, rows=2, steps=8),
]


def config(case: Case) -> dict:
    """Returns the config.json of both sides. Without stop tokens, no generation ends early."""
    return dict(case.shape, architectures=[CLASSES[case.shape["model_type"]]], max_position_embeddings=131072,
                rms_norm_eps=1e-6, rope_theta=10000.0, bos_token_id=None, eos_token_id=None, pad_token_id=0)
