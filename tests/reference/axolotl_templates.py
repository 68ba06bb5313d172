"""Writes what axolotl's chat templates print where a built-in template of the program has its place.

    python tests/reference/axolotl_templates.py AXOLOTL

AXOLOTL is the folder of axolotl 0.19.0's source. Needs transformers. `trainer convert` maps the names (TEMPLATES of
trainer/src/convert/axolotl/mod.rs).

Output: candle-ext/text/tests/fixtures/chat/axolotl.json, a list of {axolotl, template, messages, tools, text}. Chats that axolotl's
template refuses are left out, and those whose difference `trainer convert` reports. axolotl trains on texts without a generation
prompt.
"""

import json
import pathlib
import sys

from jinja2.exceptions import TemplateError
from transformers.utils import chat_template_utils

OUTPUT = pathlib.Path(__file__).parents[2] / "candle-ext/text/tests/fixtures/chat/axolotl.json"
TEMPLATES = {
    "chatml": "chatml", "llama3": "llama3", "qwen_25": "qwen2.5", "qwen3": "qwen3", "gemma": "gemma", "gemma3": "gemma",
    "gemma3n": "gemma", "mistral_v2v3": "mistral",
}
SYSTEM, QUESTION, ANSWER = ("system", "Be brief."), ("user", "2+2?"), ("assistant", "4")
MORE = [("user", " And 3+3?\n"), ("assistant", "6")]
THOUGHT = ("assistant", "<think>\nA sum.\n</think>\n\n4")
CHATS = [
    [QUESTION, ANSWER], [QUESTION, ANSWER, *MORE], [SYSTEM, QUESTION, ANSWER], [SYSTEM, QUESTION, ANSWER, *MORE],
    [QUESTION, THOUGHT], [QUESTION, THOUGHT, *MORE], [("user", ""), ("assistant", "")],
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOLS = [
    {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "It is 4."},
]


def is_reported(name, messages):
    return name == "mistral_v2v3" and messages[0]["role"] == "system"


def goldens(name, built_in, folder):
    source = (folder / "src/axolotl/utils/chat_templates/templates" / f"{name}.jinja").read_text()
    compiled = chat_template_utils._compile_jinja_template(source)
    chats = [([{"role": role, "content": content} for role, content in chat], None) for chat in CHATS]
    for messages, tools in chats + [(WITH_TOOLS, [TOOL])] * name.startswith("qwen"):
        try:
            text = compiled.render(messages=messages, tools=tools, bos_token="<s>", eos_token="</s>")
        except TemplateError:
            continue
        if not is_reported(name, messages):
            case = {"axolotl": name, "template": built_in, "messages": messages}
            yield case | ({"tools": tools} if tools else {}) | {"text": text}


def main(folder):
    lines = [
        json.dumps(golden, ensure_ascii=False)
        for name, built_in in TEMPLATES.items()
        for golden in goldens(name, built_in, pathlib.Path(folder))
    ]
    OUTPUT.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
