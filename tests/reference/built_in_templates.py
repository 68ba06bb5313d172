"""Writes what other programs print in the formats of the built-in chat templates.

    python tests/reference/built_in_templates.py GEMMA3 LLAMA_FACTORY

GEMMA3 is a folder with Gemma 3's tokenizer_config.json, LLAMA_FACTORY the folder of llamafactory 0.9.5's source. Needs
transformers, fschat 0.2.36 (its conversation.py alone) and mistral-common[sentencepiece] 1.13.1.

Output: candle-ext/text/tests/fixtures/chat/built_in.json, a list of {template, messages, text}. A text has the generation
prompt if the last message is the user's. BOS is <s>, EOS </s>. FastChat and LLaMA-Factory leave BOS to the tokenizer, so
the script adds it.

The fixtures of chat_goldens.py have the originals of qwen2.5, qwen3 and llama3. LLaMA-Factory's own alpaca has no BOS, and no
empty line after a system message of the chat.
"""

import ast
import importlib.util
import json
import pathlib
import sys

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import MistralRequestValidator, ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from transformers.utils import chat_template_utils

FIXTURES = pathlib.Path(__file__).parents[2] / "candle-ext/text/tests/fixtures/chat"
OUTPUT = FIXTURES / "built_in.json"
QUESTION, SECOND, ANSWER = ("user", "2+2?"), ("user", "And 3+3?"), ("assistant", "4")
SYSTEM = ("system", "Be brief.")
CHATS = [
    [QUESTION],
    [QUESTION, ANSWER],
    [QUESTION, ANSWER, SECOND],
    [SYSTEM, QUESTION],
    [SYSTEM, QUESTION, ANSWER],
    [SYSTEM, QUESTION, ANSWER, SECOND],
]
# Answers without content, of which only qwen3 has a text.
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
REASONING = {"role": "assistant", "content": None, "reasoning_content": "2+2 is 4.", "tool_calls": [CALL]}
WITHOUT_CONTENT = [
    [REASONING],
    [REASONING, {"role": "tool", "content": "4"}, {"role": "user", "content": "And 3+3?"}],
    [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
]


def messages(chat):
    return [{"role": role, "content": content} for role, content in chat]


def ends_with_question(chat):
    return chat[-1][0] == "user"


def gemma(chat, folder):
    template = json.loads((pathlib.Path(folder) / "tokenizer_config.json").read_text())["chat_template"]
    compiled = chat_template_utils._compile_jinja_template(template)
    prompt = ends_with_question(chat)
    return compiled.render(messages=messages(chat), add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>")


def qwen3(messages):
    """Renders with Qwen3's template. Its first version fails on a null content, which later ones take as empty."""
    compiled = chat_template_utils._compile_jinja_template((FIXTURES / "qwen3/chat_template.jinja").read_text())
    prompt = messages[-1]["role"] == "user"
    filled = [message | {"content": message["content"] or ""} for message in messages]
    return compiled.render(messages=filled, add_generation_prompt=prompt)


def mistral(chat):
    tokenizer = MistralTokenizer.v3()
    if not ends_with_question(chat):
        validator = MistralRequestValidator(mode=ValidationMode.finetuning)
        tokenizer = MistralTokenizer(tokenizer.instruct_tokenizer, validator, tokenizer._instruct_request_normalizer)
    text = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages(chat))).text
    return text.replace("▁", " ").replace("<0x0A>", "\n")


def fastchat(name, chat):
    # The package's __init__ needs torch.
    found = importlib.util.find_spec("fastchat").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("conversation", pathlib.Path(found) / "conversation.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    conversation = module.get_conv_template(name)
    if name == "zephyr":
        conversation.system_template = "<|system|>\n{system_message}" if chat[0] == SYSTEM else ""
    for role, content in chat:
        if role == "system":
            conversation.set_system_message(content)
        else:
            conversation.append_message(conversation.roles[role == "assistant"], content)
    if ends_with_question(chat):
        conversation.append_message(conversation.roles[1], None)
    text = conversation.get_prompt()
    # Llama 2 adds the next turn's BOS to the answer, and none to the first turn.
    return "<s>" + text.removesuffix("<s>")


def alpaca(chat, source):
    """Joins the slots of LLaMA-Factory's template, which needs torch to run."""
    tree = ast.parse((pathlib.Path(source) / "src/llamafactory/data/template.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "register_template"]
    of_call = lambda call: {keyword.arg: keyword.value for keyword in call.keywords}
    template = next(t for t in map(of_call, calls) if ast.literal_eval(t["name"]) == "alpaca")
    slots = lambda key: ast.literal_eval(template[key].keywords[0].value)
    filled = lambda key, content: "".join("</s>" if slot == {"eos_token"} else slot.replace("{{content}}", content) for slot in slots(key))
    text = "<s>" + (chat[0][1] + "\n\n" if chat[0] == SYSTEM else ast.literal_eval(template["default_system"]))
    for role, content in chat:
        if role != "system":
            text += filled(f"format_{role}", content)
    return text


def main(gemma3, llama_factory):
    programs = {
        "gemma": lambda chat: gemma(chat, gemma3),
        "mistral": mistral,
        "llama2": lambda chat: fastchat("llama-2", chat),
        "zephyr": lambda chat: fastchat("zephyr", chat),
        "vicuna": lambda chat: fastchat("vicuna_v1.1", chat),
        "alpaca": lambda chat: alpaca(chat, llama_factory),
    }
    lines = [
        json.dumps({"template": name, "messages": messages(chat), "text": program(chat)}, ensure_ascii=False)
        for name, program in programs.items()
        for chat in CHATS
    ]
    for answer in WITHOUT_CONTENT:
        chat = messages([QUESTION]) + answer
        lines.append(json.dumps({"template": "qwen3", "messages": chat, "text": qwen3(chat)}, ensure_ascii=False))
    OUTPUT.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
