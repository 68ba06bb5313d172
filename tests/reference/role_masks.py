"""Writes loss masks by role, of the last turn and of the ends of turns, with transformers' chat templates.

    python tests/reference/role_masks.py

It reads the tokenizers, templates and goldens.json that chat_goldens.py wrote into
candle-ext/text/tests/fixtures/chat/<family>/ and writes role_masks.json there. For each conversation it has ranges of
target tokens, [first, end):
  user, system, tool   roles_to_train of this one role
  last                 masking_strategy: train_on_last
  none, all, last_eos  train_on_eos: none, all and last, on the assistant's turns

A content is located as in axolotl: the conversation is rendered again with other contents in its place, and the texts
differ there only.
"""

import json
import os

import transformers
from chat_goldens import CHATS, FIXTURES, FixedDate, render
from transformers.utils import chat_template_utils

END = {"smollm2": "<|im_end|>", "llama3": "<|eot_id|>", "llama3_2": "<|eot_id|>", "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>"}
DUMMIES = ("Q dummy Q", "Z other Z")


def content_range(tokenizer, chat, template, text, idx):
    """Returns the characters of a message's content, without white space at its ends; None if it is not printed."""
    content = chat["messages"][idx]["content"]
    if not isinstance(content, str) or not content.strip():
        return None
    texts = []
    for dummy in DUMMIES:
        messages = [m | {"content": dummy} if at == idx else m for at, m in enumerate(chat["messages"])]
        texts.append(render(tokenizer, chat | {"messages": messages}, template, tokenize=False))
    first = len(os.path.commonprefix(texts))
    behind = len(os.path.commonprefix([t[::-1] for t in texts]))
    if texts[0] == texts[1]:
        return None
    assert text[:first] == texts[0][:first] and text[len(text) - behind :] == texts[0][len(texts[0]) - behind :], text
    found = text[first : len(text) - behind]
    start = first + len(found) - len(found.lstrip())
    return start, start + len(found.strip())


def tokens_in(offsets, ranges):
    """Returns ranges of the tokens that overlap ranges of characters."""
    hit = [any(a < end and start < b for a, b in ranges) for start, end in offsets]
    runs, start = [], None
    for at, is_hit in enumerate(hit + [False]):
        if is_hit and start is None:
            start = at
        elif not is_hit and start is not None:
            runs.append([start, at])
            start = None
    return runs


def masks(tokenizer, chat, template, golden, end):
    text = golden["text"]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert encoded["input_ids"] == golden["ids"]
    offsets = [tuple(o) for o in encoded["offset_mapping"]]
    in_bytes = {len(text[:at].encode()): at for at in range(len(text) + 1)}
    spans = [(in_bytes[a], in_bytes[b]) for a, b in golden["spans"]]
    found = {}
    for role in ("user", "system", "tool"):
        ranges = []
        for idx, message in enumerate(chat["messages"]):
            if message["role"] == role and (content := content_range(tokenizer, chat, template, text, idx)):
                ranges.append(content)
                after = content[1] + len(text[content[1] :]) - len(text[content[1] :].lstrip())
                if text.startswith(end, after):
                    ranges.append((after, after + len(end)))
        found[role] = tokens_in(offsets, ranges)
    words = [(a, b - len(end) if text[a:b].endswith(end) else b) for a, b in spans]
    ends = [(b - len(end), b) for a, b in spans if text[a:b].endswith(end)]
    everywhere = [(at, at + len(end)) for at in range(len(text)) if text.startswith(end, at)]
    found["last"] = tokens_in(offsets, spans[-1:])
    found["none"] = tokens_in(offsets, words)
    found["all"] = tokens_in(offsets, words + everywhere)
    found["last_eos"] = tokens_in(offsets, words + ends[-1:])
    return found


def main():
    chat_template_utils.datetime = FixedDate
    for family, end in END.items():
        folder = FIXTURES / family
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        template = (folder / "chat_template.jinja").read_text()
        goldens = json.loads((folder / "goldens.json").read_text())
        lines = []
        for name, chat in CHATS.items():
            if "error" not in goldens[name]:
                value = masks(tokenizer, chat, template, goldens[name], end)
                lines.append(json.dumps(name) + ":" + json.dumps(value, separators=(",", ":")))
        (folder / "role_masks.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
