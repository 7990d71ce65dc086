"""Chat templates are programs of strangers: what real ones do works, what costs too much is refused before it is done."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from regard import CheckpointError
from regard.models.chat import LONGEST, render

HOSTILE = r"""
{{ 10 ** (10 ** 9) }}
{% for i in range(10000000) %}x{% endfor %}
{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}
{% for i in range(99999) if false %}{% endfor %}{% for j in range(999) %}{% for i in range(99999) if false %}{% endfor %}{% endfor %}
{{ 2 ** 100000000 }}
{{ "x" * 10000000000 }}
{{ [0] * 10000000000 }}
{{ "x" * 9999999 }}
{% set ns = namespace(s="xxxxxxxx") %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}
{% set ns = namespace(s="xxxxxxxx") %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}
{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}
{% set ns = namespace(s={"a":1}) %}{% for i in range(60) %}{% set ns.s = {"a": ns.s, "b": ns.s} %}{% endfor %}{{ ns.s|tojson }}
{% set ns = namespace(s=(1,)) %}{% for i in range(60) %}{% set ns.s = (ns.s, ns.s) %}{% endfor %}{{ ns.s == ns.s }}
{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}
{% set ns = namespace(a=0) %}{% for i in range(60) %}{% set n2 = namespace(a=ns.a, b=ns.a) %}{% set ns.a = n2 %}{% endfor %}{{ ns }}
{{ "%1000000000d" % 1 }}
{{ "%*d" % (1000000000, 1) }}
{{ "%1000000000d"|format(1) }}
{{ "{:1000000000}".format(1) }}
{{ "{:{}}".format(1, 1000000000) }}
{{ "{0:{1}}".format(1, 1000000000) }}
{{ "x"|center(1000000000) }}
{{ "x".center(1000000000) }}
{{ "x".ljust(1000000000) }}
{{ "x".zfill(1000000000) }}
{{ "\t".expandtabs(1000000000) }}
{{ "x"|indent(1000000000, true) }}
{{ ("x\n" * 100000)|indent(4000, true) }}
{{ [1]|batch(1000000000, "x")|list }}
{{ [1]|slice(1000000000)|list }}
{{ 1.5|round(1000000000, "ceil") }}
{{ ("x" * 100000).replace("x", "y" * 100000) }}
{{ ("x" * 100000)|replace("x", "y" * 100000) }}
{{ ("x" * 100000)|replace("", "y" * 100000) }}
{{ ("y" * 100000).join("x" * 100000) }}
{{ ("x" * 100000)|join("y" * 100000) }}
{{ [[1]]|tojson(indent=1000000000) }}
{{ lipsum(n=1000000, max=1000000) }}
{{ (5).to_bytes(10000000000) }}
{{ dict.fromkeys(range(100000)) }}
{{ "x".encode().ljust(10000000000) }}
{{ ("x"|safe).ljust(10000000000) }}
{{ ("x"|escape) * 10000000000 }}
{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}
{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}
{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}
{% set big = "x" * 100000 %}{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + [big[1:]] %}{% endfor %}
{% set big = "x" * 100000 %}{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + [big.upper()] %}{% endfor %}
{% set big = range(99999)|list %}{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + [big|list] %}{% endfor %}
{% set big = "x" * 100000 %}{% for i in range(99999) %}{% set x %}{{ big }}{% endset %}{% endfor %}
{% set big = "x" * 100000 %}{% macro m() %}{{ big }}{% endmacro %}{% for i in range(99999) %}{% set x = m() %}{% endfor %}
{% for i in range(99999) %}{% for j in range(99) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}
{{ [[1],[2]]|sum(start=[]) }}
{% set ns = namespace(a=(1,), b=(2,)) %}{% for i in range(16) %}{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}{% endfor %}{{ ns.a in ([ns.b] * 100000) }}
{% set a = "x" * 99999 %}{% set b = a[1:] ~ "y" %}{{ b in ([a] * 99999) }}
{% set a = "x" * 99999 %}{{ (range(99999) | map("default", "") | map("replace", "", a) | list) | length }}
{% set a = "x" * 99999 %}{{ ([none] * 9999) | map("d", a, true) | sort | length }}
{% set a = "x" * 9999 %}{{ range(9) | batch(4000, [a, a]) | list | sort | length }}
{% set ns = namespace(a=["x"]) %}{% for i in range(40) %}{% set ns.a = [ns.a] + [ns.a] %}{% endfor %}{{ ns.a == ns.a }}
{{ messages.append(1) }}
{{ (1)|xmlattr }}
{{ namespace.__init__.__globals__ }}
{{ cycler.__init__.__globals__ }}
{% include "x" %}
{% import "x" as y %}
{% extends "x" %}
""".strip().splitlines()
DEEP = [
    "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "{% for a in b %}" * 200 + "{% endfor %}" * 200,
    "{% if a %}" * 60 + "{% endif %}" * 60,
    "{{ a" + "|list" * 9000 + " }}",
    "{{ a" + ".b" * 20000 + " }}",
    "{#" * 9000,
    "x" * (LONGEST + 1),
]
READER = """
import json, resource, sys
from pathlib import Path
from regard import CheckpointError
from regard.models import sandbox
from regard.models.chat import render
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (384 << 20),) * 2)
for template in json.load(sys.stdin):
    try:
        said = "wrote " + render(template, [{"role": "user", "content": "hello"}])[:40]
    except CheckpointError as error:
        said = f"refused: {error}"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits as Linux has them")
def test_templates_that_loop_grow_or_nest_are_refused_within_a_third_of_a_gigabyte() -> None:
    given = HOSTILE + DEEP
    done = subprocess.run([sys.executable, "-c", READER], input=json.dumps(given), capture_output=True, text=True, check=False)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(given), done.stderr[-2000:]
    wrong = {t[:80]: s for t, s in zip(given, said, strict=True) if not s.startswith("refused: the chat template")}
    assert not wrong


CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
        {{- tool | tojson(indent=4) }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1, found=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
    {%- set ns.found = ns.found + [message.role] %}
{%- endfor %}
{%- macro show(message, mark='>') %}{{ mark ~ message.role ~ ': ' ~ (message.content | trim | default('', true)) }}{% endmacro %}
{%- for message in messages if message.role != 'tool' %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}{{- call.function.name ~ (call.function.arguments | tojson) }}{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% if not loop.last %}, {% endif %}{% endfor %}{%- endfor %}
    {%- elif '</think>' in (message.content or '') %}{{ message.content.split('</think>')[-1].lstrip('\\n') }}{% continue %}
    {%- else %}{{ show(message, mark='#' * 3) }}{%- endif %}
    {{- loop.index }}/{{ loop.length }}{{ "%02d" | format(loop.index) }}
{%- endfor %}
{{- ns.found | join(', ') }}{{ messages | map(attribute='role') | unique | list | length }}
{{- (messages | selectattr('role', 'equalto', 'user') | list | last).content[:3] | upper | replace('H', 'J') }}
{{- {'a': 1, 'b': messages[0].role} | dictsort }}{{ [1, 2] + [3] }}{{ 7 // 2 }}{{ 2 ** 5 }}{{ ('x', index | default(1)) }}
{%- set note %}  padded {{ 1 + 1 }}{% endset %}{{ note | indent(2) }}{% call(x) show_all() %}{{ x }}{% endcall %}"""
TOOLS = TOOLS.replace("{%- set note %}", "{%- macro show_all() %}{{ caller(3) }}{% endmacro %}{%- set note %}")
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief & <kind>. "},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": "é"}}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "<think>so</think>\n\nfour"},
    {"role": "user", "content": "hi there"},
]


@pytest.mark.parametrize(("template", "talk"), [(CHATML, TALK[:2]), (LLAMA_2, TALK[:2]), (LLAMA_2, TALK[1:2]), (TOOLS, TALK)])
def test_a_budget_changes_nothing_in_what_a_template_writes(template: str, talk: list[dict[str, Any]]) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    plain.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    values = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_generation_prompt": True,
        "tools": [{"name": "f", "of": [1, {"a": None}]}],
    }
    expected = plain.from_string(template).render(messages=talk, **values)
    assert len(expected) > 20
    assert render(template, talk, **values) == expected


def test_a_long_conversation_fits_the_budget() -> None:
    talk = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 2000} for i in range(1000)]
    text = render(CHATML, talk)
    assert len(text) > 10_000_000
    assert render(TOOLS, talk[:300]).count("word") >= 300 * 2000
    gather = "{% set ns = namespace(m=[]) %}{% for m in messages %}{% set ns.m = ns.m + [m] %}{% endfor %}{{ ns.m | length }}"
    assert render(gather, talk) == "1000"
    nested = "{% for m in messages %}{{ (messages | selectattr('role', 'equalto', 'user') | list | length) }}{% endfor %}"
    assert render(nested, talk[:400]) == "200" * 400


def test_a_user_cannot_spend_the_budget_by_what_they_say() -> None:
    talk = [{"role": "user", "content": "{{ 'x' * 10 ** 10 }}{% for i in range(99) %}"}]
    assert talk[0]["content"] in render(CHATML, talk)


@pytest.mark.parametrize(
    "template", ["{{ messages[0].nothing.more }}", "{{ 1 / 0 }}", "{{ messages['x'](1) }}", "{{ [] | first }}{{ 1 + '' }}"]
)
def test_what_jinja_raises_is_our_error(template: str) -> None:
    with pytest.raises(CheckpointError, match="the chat template"):
        render(template, [{"role": "user", "content": "hello"}])
