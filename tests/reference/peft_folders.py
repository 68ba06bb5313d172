"""Makes adapter folders of peft with tensors besides LoRA factors, in candle-ext/model/tests/fixtures/peft.

Each folder has the adapter as peft saves it, and reference.safetensors: token ids of two sequences, the logits of base
and adapter, and the logits after `merge_and_unload`, computed by torch on CPU in f32 with eager attention. The saved
tensors differ from those of the base model, as after training. Folders in REFUSED have no reference.

    python tests/reference/peft_folders.py [NAME..]
"""

import shutil
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tiny_models import FIXTURES, LENGTHS, drop_location

SAVED = dict(save_embedding_layers=True)
# name: base, number of rows of the embedding layers, arguments of save_pretrained, keys of LoraConfig
FOLDERS = {
    "tied-embedding": ("qwen2", None, SAVED, {}),
    "tied-more-rows": ("qwen2", 43, {}, {}),
    "more-rows": ("llama", 43, {}, {}),
    "fewer-rows": ("llama", 38, {}, {}),
    "lm-head": ("llama", None, {}, dict(modules_to_save=["lm_head"])),
    "both-embeddings": ("llama", None, {}, dict(modules_to_save=["embed_tokens", "lm_head"])),
    "norms-and-o-proj": ("llama", None, {}, dict(modules_to_save=["norm", "o_proj"])),
    "bias-lora-only": ("llama", None, {}, dict(bias="lora_only")),
    "bias-all": ("llama", None, {}, dict(bias="all")),
}
REFUSED = {
    "untied-in-training": ("qwen2", None, {}, dict(modules_to_save=["embed_tokens", "lm_head"])),
    "token-rows": ("llama", None, {}, dict(trainable_token_indices=[3, 7])),
    "lora-bias": ("llama", None, {}, dict(lora_bias=True)),
    "lora-on-lm-head": ("llama", None, {}, dict(target_modules=["q_proj", "lm_head"])),
}


def change(model, saves_embeddings):
    """Changes what training would change: factors, biases and saved modules."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_embedding = saves_embeddings and ("embed_tokens" in name or "lm_head" in name)
            if "lora_B" in name or (parameter.requires_grad and "lora_A" not in name) or is_embedding:
                parameter += 0.2 * torch.randn_like(parameter)


def logits(model, ids):
    with torch.no_grad():
        return torch.cat([model(row[None]).logits[0] for row in ids.split(LENGTHS)]).contiguous()


def make(name, base, n_rows, arguments, keys):
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / base, dtype=torch.float32, attn_implementation="eager")
    if n_rows is not None:
        model.resize_token_embeddings(n_rows, mean_resizing=False)
    config = LoraConfig(**{"r": 2, "lora_alpha": 3, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **keys})
    model = get_peft_model(model.eval(), config)
    change(model, n_rows is not None or bool(arguments))
    folder = FIXTURES / "peft" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, **arguments)
    (folder / "README.md").unlink(missing_ok=True)
    drop_location(folder / "adapter_config.json")
    if name in REFUSED:
        return
    ids = torch.randint(0, min(n_rows or 40, 40), (sum(LENGTHS),))
    if n_rows is not None:
        ids[5] = n_rows - 1
    result = {"ids": ids.int(), "lengths": torch.tensor(LENGTHS), "logits": logits(model, ids)}
    result["merged_logits"] = logits(model.merge_and_unload(), ids)
    difference = (result["merged_logits"] - result["logits"]).norm() / result["logits"].norm()
    n_saved = sum("lora_" not in key for key in load_file(folder / "adapter_model.safetensors"))
    print(f"{name}: {n_saved} tensors besides factors, merged logits differ by {difference:.1e}")
    save_file(result, folder / "reference.safetensors")


def main():
    for name, how in (FOLDERS | REFUSED).items():
        if name in (sys.argv[1:] or [name]):
            make(name, *how)


if __name__ == "__main__":
    main()
