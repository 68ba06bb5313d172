"""Checks that transformers and peft load the files of candlewick-model and give equal results.

    python tests/reference/peft_roundtrip.py                    # the tiny fixtures
    python tests/reference/peft_roundtrip.py MODEL [ADAPTER]    # any model folder, optionally with an adapter
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tiny_models import MOE_ADAPTERS

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "candle-ext" / "model" / "tests" / "fixtures"


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def compare(what, got, want):
    error = ((got - want).norm() / want.norm()).item()
    print(f"  {what}: relative error {error:.1e}")
    return error < 1e-5


def check(model, adapter):
    print(f"{model}{f' with {adapter}' if adapter else ''}")
    torch.manual_seed(0)
    theirs = load(model)
    ids = torch.randint(0, theirs.config.vocab_size, (13,))
    with tempfile.TemporaryDirectory() as out, torch.no_grad():
        command = ["cargo", "run", "-q", "-p", "candlewick-model", "--example", "roundtrip", "--", str(model), out]
        command += [",".join(map(str, ids.tolist()))] + ([str(adapter)] if adapter else [])
        subprocess.run(command, cwd=ROOT, check=True)
        ours = load_file(Path(out) / "logits.safetensors")["logits"]
        again = load(Path(out) / "model")(ids[None]).logits[0]
        if not adapter:
            want = theirs(ids[None]).logits[0]
            return compare("logits", ours, want) & compare("written again", again, want)
        want = PeftModel.from_pretrained(theirs, adapter)(ids[None]).logits[0]
        ok = compare("logits", ours, want) & compare("merged", again, want)
        rewritten = PeftModel.from_pretrained(load(model), Path(out) / "adapter")(ids[None]).logits[0]
        return ok & compare("adapter written again", rewritten, want)


def main():
    given = [Path(arg) for arg in sys.argv[1:]]
    if given:
        cases = [(given[0], given[1] if len(given) > 1 else None)]
    else:
        cases = [(folder, None) for folder in sorted(FIXTURES.iterdir()) if (folder / "config.json").exists()]
        adapted = {"qwen2-lora": "qwen2"} | {name: how["base"] for name, how in MOE_ADAPTERS.items()}
        cases.extend((FIXTURES / base, FIXTURES / adapter) for adapter, base in adapted.items())
    if not all([check(*case) for case in cases]):
        sys.exit("some logits differ")


if __name__ == "__main__":
    main()
