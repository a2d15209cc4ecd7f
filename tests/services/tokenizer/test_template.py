"""Rendered conversations against transformers' apply_chat_template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.tokenizer.template import ChatTemplate
from services.tokenizer.tokenizer import Tokenizer
from shared.errors import ConfigError, RequestError
from tests.services.tokenizer import toy

CHAT = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": '안녕 😀\n"quoted" {{ not.a.template }} {% raw %}'},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "  And now?  "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>&", "parameters": {"type": "object"}}}]

FEATURES = """\
{{ bos_token }}
{%- set ns = namespace(count=0) %}
{%- if tools is not none %}
  {%- for tool in tools %}{{ tool | tojson }}{{ tool | tojson(indent=2) }}{% endfor %}
{%- endif %}
{% for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {% generation %}[{{ loop.index }}|{{ ns.count }}|{{ message['content'] | trim }}]{% endgeneration %}
    {%- if ns.count == 2 %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now("%Y") }}{{ '' if undefined_thing is defined else 'x' }}{{ "a".upper() }}
{{ messages[0].content.split(" ")[-1] }}
{% if add_generation_prompt %}>{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}{% endif %}
"""


def both(library: Library, source: str, messages: list[Any], **options: Any) -> tuple[str, str]:
    oracle = PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<|im_start|>", eos_token="<|im_end|>")
    oracle.chat_template = source
    expected = oracle.apply_chat_template(messages, tokenize=False, **options)
    template = ChatTemplate(source, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    return template.render(messages, options), expected


@pytest.mark.parametrize("source", [toy.TEMPLATE, FEATURES])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"add_generation_prompt": True, "enable_thinking": False},
        {"tools": TOOLS, "add_generation_prompt": True},
    ],
)
def test_as_transformers_renders_it(byte_level: Library, source: str, options: dict[str, Any]) -> None:
    ours, expected = both(byte_level, source, CHAT, **options)
    assert ours == expected


def test_the_final_message_can_be_continued(byte_level: Library) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "The answer is"}]
    ours, expected = both(byte_level, toy.TEMPLATE, chat, continue_final_message=True)
    assert ours == expected
    assert ours.endswith("The answer is")


def test_the_built_in_model(builtin: Tokenizer, builtin_folder: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(builtin_folder)
    template = builtin.template_for(None)
    assert template is not None
    for chat in (CHAT, CHAT[1:2], [{"role": "system", "content": ""}, CHAT[1]]):
        text = template.render(chat, {"add_generation_prompt": True})
        assert text == oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = oracle.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert builtin.encode(text, add_special_tokens=False).ids == ids


def test_a_template_that_raises() -> None:
    template = ChatTemplate(toy.TEMPLATE, {})
    with pytest.raises(RequestError, match="unknown role pirate") as caught:
        template.render([{"role": "pirate", "content": "arr"}], {})
    assert (caught.value.status, caught.value.code) == (400, "chat_template_error")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_cannot_break_out(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}).render(CHAT, {})
    assert caught.value.code == "chat_template_error"


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{% for %}", {})
