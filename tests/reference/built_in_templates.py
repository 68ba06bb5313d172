"""Writes what other programs print in the formats of the built-in chat templates.

    python tests/reference/built_in_templates.py [GEMMA3 LLAMA_FACTORY]

GEMMA3 is a folder with Gemma 3's tokenizer_config.json, LLAMA_FACTORY the folder of llamafactory 0.9.5's source. Needs
transformers, fschat 0.2.36 (its conversation.py alone) and mistral-common[sentencepiece] 1.13.1.

Output: candle-ext/text/tests/fixtures/chat/built_in.json, a list of {template, messages, text}. A text has the generation
prompt if the last message is the user's or a tool's. built_in_qwen3.json has chats with calls, thinking and null contents, and the
texts of Qwen3's own template. Without arguments, the script writes that file alone, and needs transformers. BOS is <s>, EOS </s>. FastChat and LLaMA-Factory leave BOS to the tokenizer, so
the script adds it.

The fixtures of chat_goldens.py have the originals of qwen2.5, qwen3 and llama3. LLaMA-Factory's own alpaca has no BOS, and no
empty line after a system message of the chat.
"""

import ast
import importlib.util
import json
import pathlib
import sys

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
# Chats with calls, thinking and null contents, which only qwen3 renders.
FUNCTION = {"name": "add", "description": "Adds <two> & more.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


def user(content):
    return {"role": "user", "content": content}


def tool(content):
    return {"role": "tool", "content": content}


def answer(content=None, reasoning=None, calls=()):
    thinking = {} if reasoning is None else {"reasoning_content": reasoning}
    functions = [{"type": "function", "function": {"name": "add", "arguments": arguments}} for arguments in calls]
    return {"role": "assistant", "content": content, **thinking, **({"tool_calls": functions} if functions else {})}


A, B = {"a": 2, "b": [1.5, "é", None]}, {}
ASK, AGAIN, SYSTEM_MESSAGE = user("2+2?"), user("And 3+3?"), {"role": "system", "content": "Be brief."}
QWEN3_CHATS = [
    {"messages": [ASK, answer(None)]},
    {"messages": [ASK, answer(None, "So.")]},
    {"messages": [ASK, answer(None, calls=[A])]},
    {"messages": [ASK, answer(None, "2+2 is 4.", [A])]},
    {"messages": [ASK, answer("I add.", "So.", [A, B])]},
    {"messages": [ASK, answer(None, calls=[A, B]), tool("4"), tool("0")]},
    {"messages": [ASK, answer(None, "2+2 is 4.", [A]), tool("4"), AGAIN]},
    {"messages": [ASK, answer(None, "So.", [A]), tool("4"), answer("4.", "Done.")]},
    {"messages": [ASK, answer(None, "So.", [A]), tool("4"), answer(None, "More.", [B]), tool("0"), answer("4.")]},
    {"messages": [ASK, answer("4.", "\n\nSo.\n"), AGAIN, answer("\n6.\n", "Now 3+3.")]},
    {"messages": [ASK, answer("<think>\nSo.\n</think>\n\n4."), AGAIN, answer("<think>\nNow.\n</think>\n\n6.")]},
    {"messages": [ASK, answer("", ""), AGAIN, answer("6.", "")]},
    {"messages": [SYSTEM_MESSAGE, ASK, answer(None, "So.", [A]), tool("4"), answer("4."), AGAIN], "tools": TOOLS},
    {"messages": [ASK, answer(None, calls=[A]), tool("4"), answer("4."), AGAIN, answer(None, "Now.", [B])], "tools": TOOLS},
    {"messages": [ASK], "tools": TOOLS, "kwargs": {"enable_thinking": False}},
    {"messages": [ASK, answer(None, calls=[A]), tool("4")], "kwargs": {"enable_thinking": False}},
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


def qwen3(chat):
    """Renders with Qwen3's template. Its first version fails on a null content, which later ones take as empty."""
    compiled = chat_template_utils._compile_jinja_template((FIXTURES / "qwen3/chat_template.jinja").read_text())
    prompt = chat["messages"][-1]["role"] != "assistant"
    filled = [message | {"content": message["content"] or ""} for message in chat["messages"]]
    variables = {"tools": chat.get("tools"), **chat.get("kwargs", {})}
    return compiled.render(messages=filled, add_generation_prompt=prompt, **variables)


def write(path, goldens):
    lines = [json.dumps(golden, ensure_ascii=False) for golden in goldens]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def mistral(chat):
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import MistralRequestValidator, ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

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
    goldens = [
        {"template": name, "messages": messages(chat), "text": program(chat)}
        for name, program in programs.items()
        for chat in CHATS
    ]
    write(OUTPUT, goldens)


if __name__ == "__main__":
    write(FIXTURES / "built_in_qwen3.json", [chat | {"text": qwen3(chat)} for chat in QWEN3_CHATS])
    if sys.argv[1:]:
        main(*sys.argv[1:])
