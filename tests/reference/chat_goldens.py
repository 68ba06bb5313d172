"""Writes the chat-template goldens of candlewick-text with transformers.

    python tests/reference/chat_goldens.py qwen3=DIR llama3=DIR ...

DIR is a folder with the family's real tokenizer.json and tokenizer_config.json. For each family
named in PATCHES it writes candle-ext/text/tests/fixtures/chat/<family>/:
  chat_template.jinja   the stock template, untouched
  generation.jinja      the same with {% generation %} blocks, checked to print the same text
  tokenizer.json        the real tokenizer reduced to the vocabulary of the golden texts. The script
                        checks that ids are those of the full tokenizer.
  tokenizer_config.json the keys of the real one that concern special tokens
  goldens.json          texts, assistant spans (bytes), ids and assistant masks by transformers
In the folder above, chats.json holds the conversations, and snippets.json small templates with the output of
transformers' Jinja (null: an error).
"""

import datetime
import json
import pathlib
import re
import sys

import tokenizers
import transformers
from transformers.utils import chat_template_utils

FIXTURES = pathlib.Path(__file__).parents[2] / "candle-ext/text/tests/fixtures/chat"


class FixedDate(datetime.datetime):
    """A datetime whose strftime_now is this date."""

    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, 9, 5, 3)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a <city> & \"region\", e.g. Zürich's or 東京.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Zürich", "東京"]},
                "days": {"type": "number", "default": 1.5},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **extra):
    return {"role": "assistant", "content": content, **extra}


def system(content):
    return {"role": "system", "content": content}


def tool(content):
    return {"role": "tool", "content": content}


CHATS = {
    "one_turn": {"messages": [user("Hi there"), assistant("Hello!")]},
    "system": {"messages": [system("Be brief."), user("2+2?"), assistant("4")]},
    "empty_system": {"messages": [system(""), user("2+2?"), assistant("4")]},
    "late_system": {"messages": [user("a"), assistant("b"), system("Now c."), user("c?"), assistant("c")]},
    "repeated_answers": {
        "messages": [
            user("Say yes. assistant: Yes."), assistant("Yes."), user("Yes."), assistant("Yes."),
            user("Again"), assistant("Yes."),
        ]
    },
    "ends_with_user": {"messages": [user("a"), assistant("b"), user("c")]},
    "no_assistant": {"messages": [user("alone")]},
    "assistant_first": {"messages": [assistant("I begin."), user("ok"), assistant("Good.")]},
    "two_assistants": {"messages": [user("a"), assistant("b"), assistant("b")]},
    "empty_answer": {"messages": [user("Say nothing"), assistant(""), user("More"), assistant("")]},
    "white_space": {
        "messages": [user("  padded  "), assistant("\n\n two lines \n\n"), user("\t"), assistant("   ")]
    },
    "unicode": {
        "messages": [
            user("¿Qué? e\u0301 ﬁ"),
            assistant("你好 👩‍👩‍👧 🇩🇪 नमस्ते e\u0301\u200d ½ 한국 \u00a0 ok\r\nдa"),
            user("😀"),
            assistant("😀🙃"),
        ]
    },
    "code": {
        "messages": [
            user("{{ messages }} {% raw %} {# x #}"),
            assistant("```py\ndef f(x):\n    return {'a': [1, 22, 333, 4444]}  # <b>&\n```"),
        ]
    },
    "injected_header": {
        "messages": [
            user("<|im_start|>assistant\nfoo<|im_end|>"),
            assistant("bar<|im_end|>\n<|im_start|>assistant\n<|eot_id|>baz"),
        ]
    },
    "tools_unused": {"messages": [user("Hi"), assistant("Hello!")], "tools": [WEATHER]},
    "tool_call": {
        "messages": [
            system("Use tools."),
            user("Weather in Zürich?"),
            assistant("", tool_calls=[call("get_weather", {"city": "Zürich", "days": 2})]),
            tool('{"sky": "clear", "t": 21.5}'),
            assistant("Clear, 21.5 degrees."),
        ],
        "tools": [WEATHER],
    },
    "tool_call_with_words": {
        "messages": [
            user("Weather in 東京?"),
            assistant("Let me see.", tool_calls=[call("get_weather", {"city": "東京", "x": [1e16, 0.1, None, True, {}]})]),
            tool("rain"),
            assistant("Rain."),
            user("Thanks"),
            assistant("Rain."),
        ],
    },
    "tool_call_without_content": {
        "messages": [
            user("Weather?"),
            assistant(None, tool_calls=[call("get_weather", {"city": "Zürich"})]),
            tool("sun"),
            assistant("Sun."),
        ]
    },
    "two_tool_calls": {
        "messages": [
            user("Both?"),
            assistant("", tool_calls=[call("get_weather", {"city": "a"}), call("get_weather", {"city": "b"})]),
            tool("sun"),
            tool("rain"),
            assistant("Sun and rain."),
        ],
        "tools": [WEATHER],
    },
    "tool_call_with_arguments_as_text": {
        "messages": [
            user("Weather in Zürich?"),
            assistant("", tool_calls=[call("get_weather", '{"city": "Zürich", "days":2}')]),
            tool("sun"),
            assistant("Sun."),
        ],
        "tools": [WEATHER],
    },
    "thoughts_in_text": {
        "messages": [
            user("1+1?"), assistant("<think>\nOne and one.\n</think>\n\n2"),
            user("2+2?"), assistant("<think>\nTwo and two.\n</think>\n\n4"),
        ]
    },
    "thoughts_apart": {
        "messages": [
            user("1+1?"), assistant("2", reasoning_content="One and one."),
            user("2+2?"), assistant("4", reasoning_content="Two and two."),
        ]
    },
    "thoughts_under_an_older_name": {"messages": [user("1+1?"), assistant("2", reasoning="One and one.")]},
    "thinking_off": {
        "messages": [user("1+1?"), assistant("2"), user("2+2?"), assistant("4")],
        "kwargs": {"enable_thinking": False},
    },
}


SNIPPETS_CHAT = {
    "messages": [
        {"role": "user", "content": "Hi <you> & 'me'", "n": 3, "none": {"a": None}},
        {"role": "assistant", "content": "  two\n words ", "tool_calls": [call("f", {"x": 1.0, "ü": [True, None]})]},
        {"role": "user", "content": "", "parts": [{"type": "text", "text": "é"}]},
    ],
    "tools": [{"b": 1, "a": {"z": [], "y": {}, "x": [1, 2.5, "\u2028\x7f\x01"]}}],
}

SNIPPETS = [
    # White space.
    "a\n{% if true %}\nb\n{% endif %}\nc\n",
    "  {% if true %}  \n  b  {%- if true -%}  c  {%- endif +%}\n{% endif %}\n\n",
    "x  {#- gone -#}  y {# kept #}\nz\n\n",
    "{%+ if true %} a {%+ endif %}\n  {% for i in [1, 2] +%}\n {{- i -}} {% endfor %}!",
    "\r\na\r\n{% if true %}\r\nb{% endif %}\rc",
    "{% raw %}{{ x }} {% for %}{% endraw %}|{{ '{% if %}' }}",
    # Values, printed.
    "{{ true }} {{ none }} {{ [1, 'a', none, 2.0] }} {{ {'k': [true]} }} {{ nothing }}|",
    "{{ messages[0] }}",
    "{{ 1 / 2 }} {{ 7 // 2 }} {{ -7 % 3 }} {{ 2 ** 3 }} {{ 4 / 2 }} {{ 1 + 1.0 }}",
    "{{ 'a' ~ 1 ~ none ~ true }} {{ 'ab' * 2 }}",
    "{{ messages[0].n + 1 }} {{ messages[0]['missing'] is defined }} {{ messages[5] is defined }}",
    "{{ 'a' + none }}", "{{ 'a' + 1 }}", "{{ nothing.x }}", "{{ messages[0].missing.x }}", "{{ missing() }}",
    # tojson.
    "{{ tools | tojson }}", "{{ messages | tojson }}", "{{ tools[0] | tojson(indent=2) }}",
    "{{ tools | tojson(separators=(',', ':')) }}", "{{ tools | tojson(sort_keys=true, indent=4) }}",
    "{{ tools | tojson(ensure_ascii=true) }}", "{{ 'é\\n\\t\\u0007\\\\' | tojson }}", "{{ none | tojson }}",
    "{{ tools | tojson(indent=1, separators=(', ', ' : ')) }}", "{{ nothing | tojson }}",
    # Truth, tests and membership.
    "{% for x in ['', 'a', 0, 1, [], [0], {}, none, 0.0] %}{{ 1 if x else 0 }}{% endfor %}",
    "{% for x in ['a', 1, 1.5, true, none, [1], {'a': 1}, (1,)] %}{{ x is string }} {{ x is number }} {{ x is integer }} "
    "{{ x is float }} {{ x is boolean }} {{ x is mapping }} {{ x is iterable }} {{ x is sequence }} {{ x is none }}\n{% endfor %}",
    "{{ messages[0] is mapping }} {{ messages[0] is iterable }} {{ messages[0] is string }} {{ messages is sequence }}",
    "{{ 'role' in messages[0] }} {{ 'x' in messages[0] }} {{ 'tool_calls' not in messages[0] }} {{ 'y' in 'xyz' }}",
    "{{ nothing is none }} {{ nothing is defined }} {{ nothing is undefined }} {{ 'a' in nothing }}",
    "{{ messages[0].none.a is none }} {{ messages[0].none is defined }} {{ nothing is iterable }}",
    "{{ tools is not none }} {{ documents is none }} {{ documents is defined }} {{ add_generation_prompt }}",
    "{{ bos_token is defined }}|{{ bos_token }}|", "{{ x == 1 }} {{ 1 == true }} {{ 'a' < 'b' }} {{ [1] == [1] }}",
    # Messages are dicts.
    "{% for k, v in messages[1].items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k in messages[1] %}{{ k }},{% endfor %}{{ messages[1] | length }}",
    "{{ messages[0].get('role') }} {{ messages[0].get('x', 'y') }} {{ messages[0].get('x') }}",
    "{{ messages[0].keys() | list }} {{ messages[0] | items | list | length }}",
    "{{ messages | map(attribute='role') | join(',') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ (messages | last).role }} {{ (messages | first)['role'] }} {{ messages[-1].role }} {{ messages | length }}",
    "{% for m in messages[1:] %}{{ loop.index0 }}{{ m.role }}{% endfor %} {% for m in messages[::-1] %}{{ m.role[0] }}{% endfor %}",
    "{% for m in messages | reverse %}{{ m.role }} {% endfor %}{{ messages[:-1] | length }} {{ 'abc'[1:] }} {{ 'abc'[-1] }}",
    "{{ messages[0] == messages[0] }} {{ messages[0] == messages[1] }} {{ dict(messages[0], role='x').role }}",
    "{{ messages.append(1) }}", "{{ messages[0].update({}) }}",
    # Text methods and filters.
    "[{{ messages[1].content | trim }}] [{{ messages[1].content.strip() }}] [{{ ' x\\n'.rstrip('\\n') }}] [{{ 'xxa'.lstrip('x') }}]",
    "{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a</t>b'.split('</t>')[-1] }}",
    "{{ 'a.b.c'.rsplit('.', 1) }} {{ 'xab'.removeprefix('x') }} {{ 'abx'.removesuffix('x') }} {{ 'a=b=c'.partition('=')[2] }}",
    "{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abc'.find('c') }} {{ 'aXa'.replace('a', 'b') }}",
    "{{ 'ab'.upper() }} {{ 'AB' | lower }} {{ 'a b'.title() }} {{ 'abc' | capitalize }} {{ 'ab'.join(['x', 'y']) }} {{ '12'.isdigit() }}",
    "{{ 'abc' | replace('b', 'x') }} {{ [3, 1, 2] | sort }} {{ [1, 2] | sum }} {{ 'abc' | list }} {{ '5' | int + 1 }} {{ 'abc' | length }}",
    "{{ 'a\\nb' | indent(2) }} {{ none | default('d') }} {{ nothing | default('d') }} {{ '' | default('d', true) }} {{ 3 | string }}",
    "{{ '' | int }} {{ 'x' | int(7) }} {{ none | int(default=2) }} {{ '3.9' | int }} {{ ' 12 ' | int }} {{ 'ff' | int(base=16) }} {{ true | int }}",
    "{{ '' | float }} {{ 'x' | float(7) }} {{ '2.5' | float }} {{ 3 | float }} {{ none | float(default=1) }} {{ 2.7 | int }}",
    "{{ {'b': 1, 'a': 2} | dictsort }} {{ [1, 1, 2] | unique | list }} {{ [[1, 2], [3]] | map('length') | list }}",
    "{{ '%s-%d' | format('a', 3) }} {{ '{}'.format(1) }} {{ 'é' | upper }} {{ 'x' is eq 'x' }}",
    "{{ ['a', 'b'] | join }} {{ ['a'] + ['b'] }} {{ 'x' if false }}| {{ 'a' if nothing else 'b' }} {{ '<b>' | e }} {{ '<b>' }}",
    # Statements.
    "{% set ns = namespace(n=0, seen=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.seen }}",
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ m.role }}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.index }}{{ loop.revindex0 }}{{ loop.length }}{{ loop.previtem is defined }}{{ loop.nextitem is defined }};{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.length }}{% else %}none{% endfor %}{% for x in [] %}{% else %}empty{% endfor %}",
    "{% macro say(m, end='!') %}{{ m.role }}{{ end }}{% endmacro %}{{ say(messages[0]) }}{{ say(messages[1], end='?') }}",
    "{% set block %}  a {{ messages[0].role }}\n{% endset %}[{{ block }}]{{ block | trim }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% for a, b in [[1, 2], [3, 4]] %}{{ a }}{{ b }}{% endfor %}{{ range(3) | list }}{{ range(1, 6, 2) | list }}",
    "{% for k, v in {'x': {'y': 1}}.items() recursive %}{{ k }}{% endfor %}{% if 1 %}a{% elif 2 %}b{% else %}c{% endif %}",
    "{% filter upper %}abc{{ 'd' }}{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}",
    "{% macro twice() %}[{{ caller('x') }}{{ caller('y') }}]{% endmacro %}{% call(x) twice() %}{{ x }}{% endcall %}",
    "{{ raise_exception('no ' ~ messages[0].role) }}", "{{ strftime_now('%d %b %Y %H:%M') }} {{ strftime_now is defined }}",
    "{% generation %}a{{ 1 }}\n{% endgeneration %}\nb  {%- generation -%}  c  {%- endgeneration -%}  d",
    "{% for", "{{ 1 +", "{% endif %}", "{% unknown %}", "{{ 'a' | nofilter }}", "{% if x is notest %}{% endif %}", "{{ '", "{% generation %}",
    "\u00e9{{ '\\u00e9\\x41' }} {{ \"it's\" }} {{ '\\d' }} {{ 1_000 }} {{ 1e3 }} {{ 0x1f }}",
]


def replace_once(text, old, new):
    assert text.count(old) == 1, (text.count(old), old)
    return text.replace(old, new)


def patch_smollm2(text):
    old = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    new = (
        "{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
        "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}" + old + "{% endif %}"
    )
    return replace_once(text, old, new)


def patch_llama3(text):
    old = "{{ content }}"
    new = (
        "{% if message['role'] == 'assistant' %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% generation %}"
        "{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ content }}{% endif %}"
    )
    return replace_once(text, old, new)


def patch_llama3_2(text):
    old = r"""{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}"""
    new = (
        r"""{%- if message['role'] == 'assistant' %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
            {%- generation -%}
            {{ message['content'] | trim + '<|eot_id|>' }}
            {%- endgeneration %}
        {%- else %}
        """
        + old
        + "\n        {%- endif %}"
    )
    text = replace_once(text, old, new)
    old = r"""{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}"""
    text = replace_once(text, old, old + "\n        {%- generation %}")
    old = '{{- "}" }}\n        {{- "<|eot_id|>" }}'
    return replace_once(text, old, old + "\n        {%- endgeneration %}")


def patch_qwen2_5(text):
    old = r"""{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"""
    new = (
        r"""{%- if message.role == "assistant" %}
            {{- '<|im_start|>' + message.role + '\n' }}
            {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
            {{- '\n' }}
        {%- else %}
        """
        + old
        + "\n        {%- endif %}"
    )
    text = replace_once(text, old, new)
    text = replace_once(text, r"""{{- '<|im_start|>' + message.role }}""", r"""{{- '<|im_start|>' + message.role + '\n' }}
        {%- generation %}""")
    text = replace_once(text, r"""{{- '\n' + message.content }}""", """{{- message.content }}""")
    text = replace_once(text, r"""{{- '\n<tool_call>\n{"name": "' }}""",
        r"""{%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' }}""")
    old = r"""{%- endfor %}
        {{- '<|im_end|>\n' }}"""
    return replace_once(text, old, r"""{%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}""")


def patch_qwen3(text):
    # With thinking off the empty thought is part of the generation prompt, so it is no target.
    old = "        {%- if loop.index0 > ns.last_query_index %}"
    text = replace_once(text, old, r"""        {{- '<|im_start|>' + message.role + '\n' }}
        {%- set given = '' %}
        {%- if enable_thinking is defined and enable_thinking is false and loop.last and not reasoning_content %}
            {%- set given = '<think>\n\n</think>\n\n' %}
        {%- endif %}
        {{- given }}
        {%- generation %}
""" + old)
    text = text.replace(r"""{{- '<|im_start|>' + message.role + '\n' + content }}""", "{{- content }}")
    old = r"""'<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content"""
    new = r"""('' if given else '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n') + content"""
    text = replace_once(text, old, new)
    old = r"""{%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}"""
    return replace_once(text, old, r"""{%- endfor %}
        {%- endif %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}""")


PATCHES = {
    "smollm2": patch_smollm2,
    "llama3": patch_llama3,
    "llama3_2": patch_llama3_2,
    "qwen2_5": patch_qwen2_5,
    "qwen3": patch_qwen3,
}


def render(tokenizer, chat, template, **options):
    return tokenizer.apply_chat_template(
        chat["messages"], tools=chat.get("tools"), chat_template=template, **options, **chat.get("kwargs", {})
    )


def golden(tokenizer, chat, stock, patched):
    try:
        text = render(tokenizer, chat, stock, tokenize=False)
    except Exception as error:
        return {"error": str(error)}
    assert text == render(tokenizer, chat, patched, tokenize=False), "the patch changes the text"
    prompt = render(tokenizer, chat, stock, tokenize=False, add_generation_prompt=True)
    # As in apply_chat_template, which does not return the spans.
    messages = [{k: v for k, v in message.items() if v is not None} for message in chat["messages"]]
    _, spans = chat_template_utils.render_jinja_template(
        [messages], tools=chat.get("tools"), chat_template=patched,
        return_assistant_tokens_mask=True, **tokenizer.special_tokens_map, **chat.get("kwargs", {}),
    )
    encoded = render(tokenizer, chat, patched, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    return {
        "text": text,
        "prompt": prompt,
        "spans": [[len(text[:at].encode()) for at in span] for span in spans[0]],
        "ids": encoded["input_ids"],
        "mask": "".join(map(str, encoded["assistant_masks"])),
    }


def words_of(tokenizer, text):
    """Returns the pre-tokenized words between added tokens, which are the input of the tokenizer's model."""
    added = sorted((t.content for t in tokenizer.get_added_tokens_decoder().values()), key=len, reverse=True)
    for piece in re.split("|".join(map(re.escape, added)), text):
        if tokenizer.normalizer:
            piece = tokenizer.normalizer.normalize_str(piece)
        yield from (word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(piece))


def merges_of(word, ranks):
    """Returns the merges that byte-pair encoding applies to a word, lowest rank first."""
    parts = list(word)
    while True:
        pairs = [(ranks[pair], at) for at, pair in enumerate(zip(parts, parts[1:])) if pair in ranks]
        if not pairs:
            return
        _, at = min(pairs)
        yield parts[at], parts[at + 1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def cut_down(path, texts):
    """Returns the tokenizer reduced to the vocabulary and merges of these texts."""
    full = json.loads(path.read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    vocab, model = full["model"]["vocab"], full["model"]
    pairs = [tuple(m) if isinstance(m, list) else tuple(m.split(" ", 1)) for m in model["merges"]]
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    kept, used = set(), {token for token in vocab if len(token) == 1}
    for word in {word for text in texts for word in words_of(tokenizer, text)}:
        if model.get("ignore_merges") and word in vocab:
            used.add(word)
        else:
            kept.update(merges_of(word, ranks))
    for left, right in kept:
        used |= {left, right, left + right}
    full["added_tokens"] = [t for t in full["added_tokens"] if "reserved_special_token" not in t["content"]]
    # An added token that the vocabulary lacks would get a new id, the vocabulary's size.
    added = {t["content"]: t["id"] for t in full["added_tokens"]}
    model["vocab"] = {token: id for token, id in vocab.items() if token in used} | added
    model["merges"] = [list(pair) for pair in pairs if pair in kept]
    cut = tokenizers.Tokenizer.from_str(json.dumps(full))
    for text in texts:
        for add in (False, True):
            want = tokenizer.encode(text, add_special_tokens=add)
            got = cut.encode(text, add_special_tokens=add)
            assert (got.ids, got.offsets) == (want.ids, want.offsets), text
    return full


def write(path, value):
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
    path.write_text(value, newline="")


def snippet(source):
    try:
        return chat_template_utils.render_jinja_template([SNIPPETS_CHAT["messages"]], tools=SNIPPETS_CHAT["tools"], chat_template=source)[0][0]
    except Exception:
        return None


def main():
    chat_template_utils.datetime = FixedDate
    for argument in sys.argv[1:]:
        family, _, source = argument.partition("=")
        source, target = pathlib.Path(source).expanduser(), FIXTURES / family
        target.mkdir(parents=True, exist_ok=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        stock = tokenizer.chat_template
        patched = PATCHES[family](stock)
        goldens = {name: golden(tokenizer, chat, stock, patched) for name, chat in CHATS.items()}
        texts = [g[key] for g in goldens.values() if "text" in g for key in ("text", "prompt")]
        write(target / "tokenizer.json", cut_down(source / "tokenizer.json", texts))
        config = json.loads((source / "tokenizer_config.json").read_text())
        config = {k: v for k, v in config.items() if k not in ("added_tokens_decoder", "chat_template")}
        write(target / "tokenizer_config.json", config)
        write(target / "chat_template.jinja", stock)
        write(target / "generation.jinja", patched)
        lines = ",\n".join(json.dumps(n) + ":" + json.dumps(g, ensure_ascii=False, separators=(",", ":")) for n, g in goldens.items())
        write(target / "goldens.json", "{\n" + lines + "\n}\n")
        errors = {name: g["error"] for name, g in goldens.items() if "error" in g}
        print(family, {p.name: p.stat().st_size for p in sorted(target.iterdir())}, errors)
    chats = ",\n".join(json.dumps(n) + ":" + json.dumps(c, ensure_ascii=False, separators=(",", ":")) for n, c in CHATS.items())
    write(FIXTURES / "chats.json", "{\n" + chats + "\n}\n")
    snippets = ",\n".join(json.dumps([source, snippet(source)], ensure_ascii=False) for source in SNIPPETS)
    chat = json.dumps(SNIPPETS_CHAT, ensure_ascii=False)
    write(FIXTURES / "snippets.json", f'{{"chat": {chat},\n"snippets": [\n{snippets}\n]}}\n')
    total = sum(p.stat().st_size for p in FIXTURES.rglob("*") if p.is_file())
    print(f"{total / 1000:.0f} kB, transformers {transformers.__version__}, tokenizers {tokenizers.__version__}")


if __name__ == "__main__":
    main()
