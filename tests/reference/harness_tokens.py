"""Records the input tokens of lm-evaluation-harness for difficult texts. evaluator/tests/it/encoding.rs compares them.

    pip install lm-eval==0.4.13 torch==2.11.0 transformers==5.17.0
    python harness_tokens.py

Writes evaluator/tests/fixtures/harness_tokens.json. The harness's functions make the tokens: its Hugging Face model is
created without weights, and its inputs are recorded.
"""

import json
import random
from pathlib import Path

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

ROOT = Path(__file__).resolve().parents[2]
CHAT = "candle-ext/text/tests/fixtures/chat"
# Without BOS; with a BOS that is named but not added; with one that is added; with none named.
TOKENIZERS = ["recipes/quickstart/tokenizer", f"{CHAT}/smollm2", f"{CHAT}/llama3_2", f"{CHAT}/qwen2_5"]
# All kinds of whitespace, including characters that only Python counts as whitespace.
BLANKS = ["", " ", "  ", "\n", "\n\n", " \n", "\t", "\u00a0", "\u2003", "\x1c", "\x85", "\u200b"]
WORDS = ["The", "cat", "sat", "on", "mats", ",", ".", "?", "2 + 2", "café", "naïve", "\U0001f600", "中文", "it's", "A", ":"]


class Observed(HFLM):
    """The harness's HFLM without weights; it records its inputs."""

    def __init__(self, tokenizer, max_length, add_bos_token):
        LM.__init__(self)
        self.tokenizer = tokenizer
        self.backend = "causal"
        self.add_bos_token = add_bos_token
        self.custom_prefix_token_id = None
        self.enable_thinking = None
        self.logits_cache = False
        self.truncation = False
        self.softmax_dtype = None
        self.batch_size_per_gpu = 1
        self.batch_schedule = 1
        self.batch_sizes = {}
        self._max_length = max_length
        self._device = torch.device("cpu")
        self.seen = []
        self.n_vocab = max(tokenizer.get_vocab().values()) + 1

    def _model_call(self, inps, attn_mask=None, labels=None):
        self.seen.append(inps[0].tolist())
        return torch.zeros(*inps.shape, self.n_vocab)

    def _select_cont_toks(self, logits, contlen=None, inplen=None):
        self.seen[-1] = {"seen": self.seen[-1], "n_targets": contlen}
        return super()._select_cont_toks(logits, contlen=contlen, inplen=inplen)

    def watch(self, what, *args):
        """Returns the model's input for one request; None if the harness fails."""
        self.seen = []
        instance = Instance(what, {}, args, 0, ("", 0, 1))
        try:
            getattr(self, what)([instance], disable_tqdm=True)
        except (AssertionError, IndexError):
            return None
        return self.seen

    def prompt(self, text, max_gen_toks):
        ids, _ = self.tok_batch_encode([text], left_truncate_len=self.max_length - max_gen_toks)
        return [int(id) for id in ids[0]]


def texts(rng, special):
    def text(n):
        return "".join(rng.choice(BLANKS) + rng.choice(WORDS + special) for _ in range(n)) + rng.choice(BLANKS)

    return text


def cases(folder, max_length, add_bos_token):
    kwargs = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / folder, **kwargs)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lm = Observed(tokenizer, max_length, add_bos_token)
    rng = random.Random(f"{folder} {max_length} {add_bos_token}")
    special = [token for token in (tokenizer.bos_token, tokenizer.eos_token) if token]
    text = texts(rng, special)
    pairs = [("", "A"), ("", " A"), (" ", "A"), ("A ", "B"), ("A\n", "B"), ("The cat", " sat"), ("The", "cat"), ("A", "")]
    pairs += [(start + "A", "B") for start in special] + [("", start + "A") for start in special]
    pairs += [(text(rng.randrange(12)), text(rng.randrange(1, 5))) for _ in range(25)]
    rolling = ["", "A"] + [text(rng.randrange(1, 40)) for _ in range(8)]
    prompts = ["A", " A "] + [start + "A" for start in special] + [text(rng.randrange(1, 20)) for _ in range(8)]
    of_pair = [(context, continuation, lm.watch("loglikelihood", context, continuation)) for context, continuation in pairs]
    return {
        "tokenizer": folder,
        "max_length": max_length,
        "add_bos_token": add_bos_token,
        "pairs": [[context, continuation, seen and seen[0]] for context, continuation, seen in of_pair],
        "rolling": [[whole, lm.watch("loglikelihood_rolling", whole)] for whole in rolling],
        "prompts": [[prompt, 5, lm.prompt(prompt, 5)] for prompt in prompts],
    }


def main():
    settings = [(folder, max_length, None) for folder in TOKENIZERS for max_length in (12, 2048)]
    settings += [(TOKENIZERS[2], 16, False), (TOKENIZERS[2], 16, True), (TOKENIZERS[1], 16, True)]
    all_cases = [cases(*setting) for setting in settings]
    path = ROOT / "evaluator/tests/fixtures/harness_tokens.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in all_cases)
    path.write_text(f"[\n{lines}\n]\n")
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
