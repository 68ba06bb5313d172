"""Compares GGUF files of `trainer export` with the model in transformers, by llama.cpp itself.

    trainer export MODEL --format safetensors,gguf-f16,gguf-q8_0,gguf-q4_k_m --output DIR
    python tests/reference/gguf_check.py LIBS DIR DIR/*.gguf

LIBS is a folder with llama.cpp's shared libraries: `bins/linux-x64` of the npm package @node-llama-cpp/linux-x64, or `lib` of
the PyPI package llama-cpp-python. For each file, the script prints the size, the relative norm of the difference of the
logits (each position's mean subtracted), and the positions with the same top-1 token. llama.cpp has to give the token ids
of transformers for every text. For a file of type f16, llama.cpp also quantizes it to Q8_0 and Q4_K_M: its files have to have
the types of ours for each tensor, and their logits are printed, too.
"""

import ctypes
import sys
import tempfile
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
]
TEXTS = PROMPTS + [
    "I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, we'Ve a'lL",
    "3 33 333 3333 33333 3.14e-10 1,000,000 0x1F 12:45",
    "for (int i = 0; i < n; ++i) {\n\t\tx[i] += y[i] << 2; // done\n}\r\n\r\n",
    "  leading,   several    and trailing spaces   ",
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n",
    "Grüße, naïve café: Привет мир. 你好，世界！ こんにちは 안녕하세요 สวัสดี नमस्ते שלום مرحبا",
    "🚀 (normal) 😶\u200d🌫️ (multiple) ✅ 🦙🦙 ½ № Ⅷ ﬁ",
    "<|endoftext|>a<|im_end|>b <|im_start|> c",
    "",
]
FTYPES = {"q8_0": 7, "q4_k_m": 15}


class LlamaCpp:
    """llama.cpp's C API. Parameter structs are opaque: they keep their defaults, and are passed by value."""

    class Opaque(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_byte * 1024)]

    class Batch(ctypes.Structure):
        _fields_ = [("n_tokens", ctypes.c_int32), ("pointers", ctypes.c_void_p * 6)]

    def __init__(self, libs):
        find = lambda stem: str(sorted(Path(libs).glob(f"lib{stem}*.so"), key=lambda path: len(path.name))[0])
        mode = ctypes.RTLD_GLOBAL
        self.base = ctypes.CDLL(find("ggml-base"), mode)
        named = [path for path in Path(libs).glob("libggml*.so") if path.name.split(".")[0] == "libggml"]
        self.ggml = ctypes.CDLL(str(named[0]), mode)
        if hasattr(self.ggml, "ggml_backend_load_all_from_path"):
            self.ggml.ggml_backend_load_all_from_path(str(Path(libs)).encode())
        self.lib = ctypes.CDLL(find("llama."), mode)
        self.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self.lib.llama_log_set(self.quiet, None)
        self.lib.llama_backend_init()
        for name, result in [
            ("llama_model_default_params", self.Opaque),
            ("llama_context_default_params", self.Opaque),
            ("llama_model_quantize_default_params", self.Opaque),
            ("llama_model_load_from_file", ctypes.c_void_p),
            ("llama_init_from_model", ctypes.c_void_p),
            ("llama_model_get_vocab", ctypes.c_void_p),
            ("llama_batch_get_one", self.Batch),
            ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float)),
        ]:
            getattr(self.lib, name).restype = result

    def load(self, path):
        model = self.lib.llama_model_load_from_file(str(path).encode(), self.lib.llama_model_default_params())
        assert model, f"llama.cpp does not load {path}"
        return ctypes.c_void_p(model)

    def tokenize(self, model, text, add_special):
        vocab = ctypes.c_void_p(self.lib.llama_model_get_vocab(model))
        data, ids = text.encode(), (ctypes.c_int32 * 4096)()
        n = self.lib.llama_tokenize(vocab, data, len(data), ids, len(ids), add_special, True)
        return list(ids[:n])

    def logits(self, model, ids):
        """Returns the logits after each token, one token at a time."""
        context = ctypes.c_void_p(self.lib.llama_init_from_model(model, self.lib.llama_context_default_params()))
        # More threads than idle cores wait for each other at every op.
        self.lib.llama_set_n_threads(context, 1, 1)
        vocab = ctypes.c_void_p(self.lib.llama_model_get_vocab(model))
        n_vocab, rows = self.lib.llama_vocab_n_tokens(vocab), []
        for token in ids:
            one = (ctypes.c_int32 * 1)(token)
            assert self.lib.llama_decode(context, self.lib.llama_batch_get_one(one, 1)) == 0
            rows.append(torch.tensor(self.lib.llama_get_logits_ith(context, -1)[:n_vocab]))
        self.lib.llama_free(context)
        return torch.stack(rows)

    def quantize(self, source, target, ftype):
        params = self.lib.llama_model_quantize_default_params()
        ctypes.memmove(ctypes.byref(params), ctypes.byref(ctypes.c_int32(1)), 4)
        ctypes.memmove(ctypes.byref(params, 4), ctypes.byref(ctypes.c_int32(ftype)), 4)
        assert self.lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) == 0


def centered(logits):
    return logits.double() - logits.double().mean(dim=-1, keepdim=True)


def compare(llama, path, prompts, wanted):
    model = llama.load(path)
    lost, total, same, n = 0.0, 0.0, 0, 0
    for ids, want in zip(prompts, wanted):
        got = llama.logits(model, ids)
        lost += (centered(got) - centered(want)).square().sum().item()
        total += centered(want).square().sum().item()
        same += (got.argmax(-1) == want.argmax(-1)).sum().item()
        n += len(ids)
    size = Path(path).stat().st_size / 1e6
    print(f"  {Path(path).name}: {size:.1f} MB, relative norm {(lost / total) ** 0.5:.2e}, same top-1 at {same} of {n}")
    return model


def types(path):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def main():
    libs, folder, files = sys.argv[1], sys.argv[2], sys.argv[3:]
    llama = LlamaCpp(libs)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    with torch.no_grad():
        wanted = [theirs(torch.tensor([ids])).logits[0] for ids in prompts]
    failed = []
    for path in files:
        model = compare(llama, path, prompts, wanted)
        for text in TEXTS:
            for add in (False, True):
                want, got = tokenizer(text, add_special_tokens=add)["input_ids"], llama.tokenize(model, text, add)
                if want != got:
                    failed.append(f"{path}: {text!r} (add_special {add}):\n  {want}\n  {got}")
        ours = {kind: [other for other in files if kind in Path(other).name] for kind in FTYPES}
        if "-f16" in Path(path).name:
            for kind, ftype in FTYPES.items():
                with tempfile.TemporaryDirectory() as temporary:
                    target = Path(temporary) / f"llama.cpp-{kind}.gguf"
                    llama.quantize(path, target, ftype)
                    compare(llama, target, prompts, wanted)
                    for other in ours[kind]:
                        want, got = types(target), types(other)
                        failed += [f"{other}: {name} is {got.get(name)}, llama.cpp's {want[name]}" for name in want if want[name] != got.get(name)]
    print("\n".join(failed) or f"  token ids of {2 * len(TEXTS)} encodings equal those of transformers, types those of llama.cpp")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
