"""Writes candle-ext/text/tests/fixtures/jinja.json: templates with the output of Jinja in Python.

    python tests/reference/jinja.py

A row of `templates` has a template, its output as a chat template of transformers, and, if it differs, its output as a
template of an lm-eval task. Null is an error. A row of `refused` has a template that Python renders and we refuse, and
a part of our message.
"""

import json
import pathlib

import jinja2
from transformers.utils import chat_template_utils

FIXTURE = pathlib.Path(__file__).parents[2] / "candle-ext/text/tests/fixtures/jinja.json"

# The file has the variables as they are written here: integers with all digits, floats in any notation.
VARIABLES = """{
"small": 0.00001, "large": 1e16, "huge": 1.5e300, "half": 0.5, "one": 1.0, "third": 0.3333333333333333, "exp": 1e5, "negative": -2.5e-7,
"int": 7, "minus": -3, "wide": 12345678901234567890123, "low": -12345678901234567890, "i128": 170141183460469231731687303715884105727,
"u64": 18446744073709551615, "wei": 115792089237316195423570985008687907853269984665640564039457584007913129639935,
"yes": true, "none": null, "text": "it's", "quotes": "it's \\"x\\"", "odd": "\\u2028\\u00a0\\u200b\\u00e9\\u007f\\\\\\n\\ud83d\\ude00",
"html": "<p class='a'>Tom &amp; <!-- no -->  Jerry</p>", "words": "the quick  brown-fox_1 it's", "tabs": "a\\tbc\\td",
"list": ["a", 1, 1e16, null, true, 0.00001], "dict": {"b": 1e-7, "a": ["it's", {"n": 12345678901234567890123}]}
}"""

NAMES = ["small", "large", "huge", "half", "one", "third", "exp", "negative", "int", "minus", "wide", "low", "i128", "u64",
         "wei", "yes", "none", "text", "quotes", "odd", "html", "list", "dict"]

# Each value in each of these.
FORMS = ["{{ V }}", "{{ V|string }}", "{{ [V] }}", "{{ {'k': V} }}", "{{ (V,) }}", "{{ V ~ '|' ~ V }}", "{{ [V, V]|join(', ') }}", "{{ ','.join([V|string]) }}",
         "{{ V|tojson }}", "{{ V|tojson(indent=2) }}", "{{ '%s' % V }}", "{{ '%r|%5s' % (V, V) }}", "{{ '%s'|format(V) }}", "{{ V|upper }}",
         "{% set x %}{{ V }}{% endset %}{{ x }}", "{{ V is number }}{{ V is integer }}{{ V is float }}{{ V is string }}"]

TEMPLATES = r"""
{{ '%d %i %5d|%-5d|%05d|%+d|% d' % (7, 7, 7, 7, 7, 7, 7) }}
{{ '%d' % 3.7 }}{{ '%d' % -3.7 }}{{ '%d' % true }}
{{ '%d' % wide }}
{{ '%f %.2f %8.3f|%-8.1f|%e %g %g' % (half, half, half, half, half, half, large) }}
{{ '%x %X %o %#x' % (255, 255, 8, 255) }}
{{ '%c%c' % ('a', 66) }}
{{ '%5.1s|' % 'abc' }}
{{ '100%% of %s' % text }}
{{ '%*d|%.*f' % (5, 7, 1, half) }}
{{ '%(b)s %(a)s' % dict }}
{{ '%(x)d' % {'x': 3} }}
{{ '%s %s' % (1,) }}
{{ '%s' % (1, 2) }}
{{ 'x' % 1 }}
{{ 'x' % () }}
{{ '%d' % 'a' }}
{{ '%x' % half }}
{{ '%y' % 1 }}
{{ '%' % 1 }}
{{ '%s' % [1, 'a'] }}
{{ 7 % 3 }} {{ -7 % 3 }} {{ 7.5 % 2 }} {{ -1 % 3 * 2 }} {{ 2 * 7 % 4 }} {{ 7 % 4 % 2 }}
{{ int % 4 == 3 }}{% if int % 2 %}odd{% endif %}{{ (int) % (2 + 3) }}{{ (int + 1) % 3 ~ 'x' }}
{{ 1 % 0 }}
{{ '%s and %s' % ('a' ~ 1, 2 % 2) }}
{{ ('%s' ~ '!') % 3 }}
{{ ('%s' if yes else '%d') % text }}
{{ '%s' % (text if yes else 1) }}
{{ 'a%sb' % text | upper }}
{{ "%s" % dict['a'][0][:2] }}
{{ -int ~ 'x' }}{{ 'x' ~ -int }}{{ 'x' ~ int * 2 }}{{ int * 2 ~ 'x' }}{{ int - 1 ~ 2 }}
{{ (not yes) ~ 'x' }}{{ (1 not in [1]) ~ 'x' }}{{ (int is not none) ~ '!' }}{{ (int is divisibleby 7) ~ '!' }}
{{ not yes ~ 'x' }}
{{ text ~ [half, large][1] ~ dict.b ~ dict['a']|length }}
{{ ('a' ~ 'b') * 2 }}{{ 3 * 'ab' }}{{ 'ab' * -1 }}|{{ [1] * 2 }}{{ (1, 'a') * 2 }}{{ 2 * 3 }}{{ half * 2 }}{{ int * minus }}
{{ 2 ** 3 * 2 }}{{ -2 ** 2 }}{{ 2 * -3 }}{{ (2) * (3) }}
{% macro m(a, b=2 * 3) %}{{ a ~ b }}{{ '%s' % a }}{% endmacro %}{{ m(1) }}{{ m(large, b=small) }}
{% for i in range(3) if i % 2 == 0 %}{{ i * 2 ~ ',' }}{% endfor %}
{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i * 10 % 7 %}{% endfor %}{{ ns.n }}
{{ {'a%s' % 1: 2 ~ 3} }}
{{ [1, 2, 3][int % 4 - 1] }}{{ 'abcdef'[int % 4:int % 4 + 2] }}
{{ nothing ~ 'x' }}
{{ nothing }}|{{ nothing|string }}|
{{ '%s' % nothing }}
{{ text|replace("'", '') }}{{ 'aaa'|replace('a', 'b', 2) }}{{ 'aaa'.replace('a', 'b', 1) }}{{ 'ab'|replace('', '-') }}{{ 12|replace(1, 'x') }}
{{ 'aaa'|replace('a', 'b', count=1) }}
{{ words|wordcount }}{{ ''|wordcount }}{{ 'é1 _ 二三'|wordcount }}
{{ 'ab'|center(7) }}|{{ 'abc'|center(6) }}|{{ 'ab'|center(width=5) }}|{{ 'ab'.center(5, '*') }}|{{ 'abc'.center(6, '*') }}
{{ words|truncate(12) }}|{{ words|truncate(12, true) }}|{{ words|truncate(12, end='…', leeway=0) }}|{{ words|truncate(length=9, killwords=true, leeway=0) }}
{{ 'abcdefgh'|truncate(5, leeway=0) }}{{ 'abcdefgh'|truncate(5) }}
{{ 'a b/é?&~.-_'|urlencode }}|{{ {'a b': 'c/d', 'e': 1}|urlencode }}|{{ [('x', 'y z')]|urlencode }}
{{ html|striptags }}
{{ '<b>x</b>&eacute;&#65;&#x42; a  b'|striptags }}
{{ 1|filesizeformat }} {{ 0|filesizeformat }} {{ 999|filesizeformat }} {{ 1000|filesizeformat }} {{ 1234567|filesizeformat }} {{ 1234567|filesizeformat(true) }} {{ 5e30|filesizeformat }} {{ '13000'|filesizeformat }} {{ 1.5|filesizeformat }}
{{ '7'.zfill(3) }}{{ '-7'.zfill(4) }}{{ 'abc'.zfill(2) }}{{ ''.zfill(2) }}
{{ 'a'.ljust(3) }}|{{ 'a'.rjust(3) }}|{{ 'a'.ljust(3, '.') }}|{{ 'a'.rjust(3, '.') }}
{{ 'abcb'.index('b') }}{{ 'abcb'.rindex('b') }}{{ ['a', 1.5].index(1.5) }}
{{ 'abc'.index('x') }}
{{ ['a'].index('b') }}
{{ 'aBcÉß'.swapcase() }}{{ 'ABC'.casefold() }}
{{ tabs.expandtabs() }}|{{ tabs.expandtabs(4) }}|{{ tabs.expandtabs(0) }}
{{ '12'.isdecimal() }}{{ '1a'.isdecimal() }}{{ ''.isdecimal() }}{{ '٣'.isdecimal() }}{{ '²'.isdecimal() }}
{{ 'a b'.isprintable() }}{{ 'a\n'.isprintable() }}{{ ' '.isspace() }}
{{ range is callable }}{{ text is callable }}{{ dict is callable }}{{ none is callable }}{{ int is callable }}{{ wei is callable }}
{% macro m() %}{% endmacro %}{{ m is callable }}
{% set j = joiner() %}{{ j() }}a{{ j() }}b{{ j() }}c
{% set j = joiner('|') %}{{ j() }}a{{ j() }}b
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}
{{ dict }}{{ {'a': 1}.items()|list }}
{{ dict.b is number }}
{{ range(3) }} {{ range(1, 4) }} {{ range(0, 9, 3) }} {{ range(5, 0, -2) }} {{ [range(2)] }} {{ range(2) ~ '' }} {{ range(3)|string }}
{{ range(3)|list }}{{ range(5, 0, -2)|list }}{{ range(4)|length }}{{ range(4)[1] }}{{ range(4)[-1] }}{{ 2 in range(4) }}{{ range(3)|join(',') }}{{ range(3)|sum }}{{ range(4)|reverse|list }}{{ range(0)|list }}{{ range(3, 1)|list }}{{ range(9)|first }}{{ range(9)|last }}
{{ range(1, 1, 0) }}
{{ range(3)|tojson }}
{% for i in range(3) %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}
{% macro m(kwargs) %}{{ kwargs }}{% endmacro %}{{ m(1) }}
{{ ['b', 'a', 1.5e-7]|join }}|{{ ['b', 'a']|join(d='-') }}|{{ [{'x': large}, {'x': 2}]|join(',', attribute='x') }}|{{ text|join('-') }}|{{ {'a': 1}|join }}
{{ nothing|join(',') }}
{{ 1|join(',') }}
{{ large|lower }}{{ none|upper }}{{ 'hELLO wORLD'|capitalize }}{{ 'hello wORLD-x'|title }}{{ ' x '|trim }}|{{ 'xxaxx'|trim('x') }}{{ yes|lower }}
{{ 'a\nb'|indent }}|{{ 'a\n\nb'|indent(2, true) }}|{{ 'a\n\nb'|indent(width=1, blank=true) }}|{{ 'a\nb'|indent('> ') }}
{{ '%s-%s'|format(1, small) }}{{ '%(a)s'|format(a=large) }}{{ '{} {}'.format(large, text) }}
{{ '3.7'|float }}{{ '1e-7'|float }}{{ 'x'|float }}{{ '12'|int }}{{ '3.9'|int }}{{ wide|int }}{{ wide + 1 }}{{ wide == 12345678901234567890123 }}{{ wide > 5 }}
{{ 10 / 4 }} {{ 10 // 4 }} {{ 1e300 * 1e10 }} {{ 0.1 + 0.2 }} {{ 1e15 }} {{ 123456789.0 * 1000000000 }}
{{ 2.5|round }} {{ 3.14159|round(2) }} {{ 1e20|round }} {{ (0.1 + 0.2)|abs }}
{{ [3, 1.5e-9]|sum }} {{ [small, 1]|min }} {{ [large, 1]|max }} {{ [2, 1.0]|sort }}
{{ [1, 2]|map('string')|join(',') }} {{ [large]|map('string')|list }}
{{ 'a,b'.split(',') }}{{ 'a b  c'.split() }}{{ 'a b c'.rsplit(' ', 1) }}{{ 'a-b-c'.partition('-') }}{{ 'a-b-c'.rpartition('-') }}
{{ '<é & \'>'|tojson }}{{ {'b': 1, 'a': [1, {'d': 2, 'c': none}]}|tojson }}{{ {'b': []}|tojson(indent=1) }}
{{ 'x'.removeprefix('x') ~ 'yx'.removesuffix('x') }}{{ '-'.join([1|string, 'a']) }}
{{ {'a': large}.a }} {{ dict.get('b') }} {{ dict.get('zz') }} {{ dict.items()|list }} {{ dict.keys()|list }} {{ dict.values()|list }}
{{ dict([('a', large), ('b', 2)]) }}
"""


REFUSED = [
    ["{{ {'id': 1}|xmlattr }}", "the filter `xmlattr` is not supported: write"],
    ["{{ words|wordwrap(10) }}", "the filter `wordwrap` is not supported: wrap"],
    ["{{ list|pprint }}", "the filter `pprint` is not supported: use"],
    ["{{ [1]|random }}", "the filter `random` is not supported: its value differs"],
    ["{{ lipsum() }}", "lipsum() makes random text"],
    ["{{ 'ẞtraße'.casefold() }}", "the method `casefold` of strings is not supported; use"],
    ["{{ 'abc'.translate({97: 'x'}) }}", "the method `translate` of strings is not supported; use"],
    ["{{ 'abc'.encode() }}", "the method `encode` of strings is not supported; use"],
    ["{% macro m(a) %}{{ a }}{{ varargs }}{% endmacro %}{{ m(1, 2) }}", "`varargs` of macros is not supported; give"],
    ["{% macro m(a) %}{% if a %}{{ a ~ kwargs }}{% endif %}{% endmacro %}{{ m(1) }}", "`kwargs` of macros is not supported; give"],
]


def environment(source):
    """Renders as lm-eval does, with its StrictUndefined."""
    env = jinja2.Environment(loader=jinja2.BaseLoader(), undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return env.from_string(source).render(**json.loads(VARIABLES))


def chat(source):
    messages = [{"role": "user", "content": "x"}]
    return chat_template_utils.render_jinja_template([messages], chat_template=source, **json.loads(VARIABLES))[0][0]


def output(render, source):
    try:
        return render(source)
    except Exception:
        return None


def main():
    forms = [form.replace("V", name) for form in FORMS for name in NAMES]
    sources = forms + [line for line in TEMPLATES.splitlines() if line]
    rows = []
    for source in sources:
        outputs = [output(render, source) for render in (chat, environment)]
        rows.append(json.dumps([source, *outputs[: 1 if outputs[0] == outputs[1] else 2]], ensure_ascii=False))
    refused = ",\n".join(json.dumps(row, ensure_ascii=False) for row in REFUSED)
    FIXTURE.write_text('{"variables": ' + VARIABLES + ',\n"templates": [\n' + ",\n".join(rows) + '\n],\n"refused": [\n' + refused + "\n]}\n", newline="")
    print(len(rows), "templates,", FIXTURE.stat().st_size, "bytes, jinja2", jinja2.__version__)


if __name__ == "__main__":
    main()
