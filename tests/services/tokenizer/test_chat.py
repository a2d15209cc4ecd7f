"""Conversations with tools, parts, documents and reasoning as templates get them, against transformers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from services.tokenizer import foreign_template
from services.tokenizer.chat import Conversation, render
from services.tokenizer.config import ChatSettings, TokenizerConfig
from services.tokenizer.foreign_template import ForeignTemplates
from services.tokenizer.parsers.output import OutputFormat
from services.tokenizer.template import ChatTemplate
from services.tokenizer.tokenizer import Tokenizer
from shared.errors import ConfigError, RequestError
from shared.wire import ToolUse
from tests.services.tokenizer import toy

TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "<b>&é", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g"}},
]
# Each is written as its family's templates are, in what they use of the language.
QWEN_LIKE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{%- for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>{{ message.content }}</tool_response>
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
    {%- elif message.role != 'system' or not tools %}<|im_start|>{{ message.role }}
        {%- if message.reasoning_content is string %}<think>{{ message.reasoning_content }}</think>{% endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
<tool_call>{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}}</tool_call>
        {%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
MISTRAL_LIKE = """\
{{- bos_token }}{% if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids have 9 characters') }}
            {%- endif %}
            {{- '[TOOL_CALLS]' ~ call.function.name ~ call.id ~ (call.function.arguments | tojson) }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('ids have 9 characters') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]' ~ message.tool_call_id ~ message.content }}
    {%- else %}[{{ message.role }}]{{ message['content'] }}{% endif %}
{%- endfor %}"""
PARTS = """\
{% for message in messages %}{{ message.role }}:
{%- for part in message['content'] %}[{{ part.type }}={{ part['text'] }}]{% endfor %};
{% endfor %}{% for document in documents or [] %}{{ document.title }}={{ document.text }};{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""

USER = {"role": "user", "content": "What is 1 + 1?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": '{"b": "é", "a": [1, null]}'}},
    {"id": "abcdefghi", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]}  # fmt: skip
RESULTS = [
    {"role": "tool", "tool_call_id": "call12345", "content": "2 <3"},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "none"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
NO_TOOLS = OutputFormat()
HERMES, MISTRAL = OutputFormat("hermes"), OutputFormat("mistral")


def ours(source: str, messages: list[Any], use: ToolUse | None = None, **variables: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    format = MISTRAL if source is MISTRAL_LIKE else HERMES
    return render(template, Conversation(messages, variables, use), format, ChatSettings())


def theirs(library: Library, source: str, messages: list[Any], tools: Any = None, **options: Any) -> str:
    """transformers wants calls' arguments parsed already."""
    oracle = PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<|im_start|>", eos_token="<|im_end|>")
    oracle.chat_template = source
    parsed = json.loads(json.dumps(messages))
    for call in (call for message in parsed for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text: str = oracle.apply_chat_template(parsed, tools=tools, tokenize=False, **options)
    return text


@pytest.mark.parametrize("source", [QWEN_LIKE, MISTRAL_LIKE])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_calls_and_results_as_transformers_renders_them(byte_level: Library, source: str, tools: Any) -> None:
    chat = [SYSTEM, USER, {**CALL, "reasoning_content": "Hm."}, *RESULTS, {"role": "assistant", "content": "2"}, USER]
    use = ToolUse(tools) if tools else None
    assert ours(source, chat, use) == theirs(byte_level, source, chat, tools, add_generation_prompt=True)


def test_no_tools_are_shown_where_none_may_be_called(byte_level: Library) -> None:
    expected = theirs(byte_level, QWEN_LIKE, [USER], add_generation_prompt=True)
    assert ours(QWEN_LIKE, [USER], ToolUse(TOOLS, "none")) == expected


def test_variables_of_requests_and_of_the_server(byte_level: Library) -> None:
    expected = theirs(byte_level, QWEN_LIKE, [USER], add_generation_prompt=True, enable_thinking=False)
    assert ours(QWEN_LIKE, [USER], enable_thinking=False) == expected and expected.endswith("<think></think>")
    template, settings = ChatTemplate(QWEN_LIKE, {}), ChatSettings({"enable_thinking": False})
    assert render(template, Conversation([USER]), HERMES, settings) == expected
    own = Conversation([USER], {"enable_thinking": True})
    assert not render(template, own, HERMES, settings).endswith("<think></think>")


def test_parts_and_documents(byte_level: Library) -> None:
    documents = [{"title": "t", "text": "x"}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [SYSTEM, {"role": "user", "content": parts}]
    listed = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, chat[1]]
    expected = theirs(byte_level, PARTS, listed, documents=documents, add_generation_prompt=True)
    assert ours(PARTS, chat, documents=documents) == expected and "[text=a][text=b]" in expected
    assert "a\nb" in ours(QWEN_LIKE, chat)
    template = ChatTemplate(QWEN_LIKE, {})
    assert "'type'" in render(template, Conversation(chat), HERMES, ChatSettings(content="openai"))


@pytest.mark.parametrize("source", [QWEN_LIKE, PARTS])
@pytest.mark.parametrize(
    "content", ["The answer is", [{"type": "text", "text": "The "}, {"type": "text", "text": "answer"}]]
)
def test_the_final_message_is_continued(byte_level: Library, source: str, content: Any) -> None:
    chat = [USER, {"role": "assistant", "content": content}]
    text = ours(source, chat, continue_final_message=True)
    assert text.endswith("answer is" if isinstance(content, str) else "answer")
    if source is QWEN_LIKE and isinstance(content, str):
        assert text == theirs(byte_level, source, chat, continue_final_message=True)


def test_ids_that_mistrals_templates_refuse_are_made_short(byte_level: Library) -> None:
    long = {"role": "assistant", "content": "", "tool_calls": [{**CALL["tool_calls"][0], "id": "call_" + "x" * 24}]}
    text = ours(MISTRAL_LIKE, [USER, long, {"role": "tool", "tool_call_id": "call_" + "x" * 24, "content": "2"}])
    id = text.split("[TOOL_RESULTS]")[1][:9]
    assert f"[TOOL_CALLS]f{id}" in text


def test_arguments_that_are_no_json_stay_text() -> None:
    """A model that wrote them once must not make its conversation impossible to go on."""
    broken = {"id": "x", "function": {"name": "f", "arguments": '{"a": '}}
    text = ours(QWEN_LIKE, [USER, {"role": "assistant", "content": "", "tool_calls": [broken]}])
    assert json.dumps('{"a": ') in text


def test_a_template_that_knows_no_tools_gets_them_in_words() -> None:
    text = ours(toy.TEMPLATE, [SYSTEM, USER, CALL, *RESULTS], ToolUse(TOOLS))
    system, user, assistant, results, _ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n") and all(
        json.dumps(tool, ensure_ascii=False) in system for tool in TOOLS
    )
    assert "<tool_call>" in system and user.startswith("user\nWhat is")
    assert assistant.count("<tool_call>") == 2 and '"arguments": {"b": "é", "a": [1, null]}' in assistant
    assert results.startswith("user\n<tool_response>\n2 <3\n</tool_response>\n<tool_response>\nnone\n")
    assert ours(toy.TEMPLATE, [USER], ToolUse(TOOLS)).startswith("<|im_start|>system\n")
    assert ours(toy.TEMPLATE, [USER], ToolUse(TOOLS, "none")) == ours(toy.TEMPLATE, [USER])


def test_what_is_refused() -> None:
    for name in ("messages", "tools"):
        with pytest.raises(RequestError) as caught:
            render(ChatTemplate(QWEN_LIKE, {}), Conversation([USER], {name: []}), HERMES, ChatSettings())
        assert caught.value.param == f"chat_template_kwargs.{name}"
    with pytest.raises(RequestError) as caught:
        use, settings = ToolUse(TOOLS), ChatSettings(auto_tools=False)
        render(ChatTemplate(QWEN_LIKE, {}), Conversation([USER], {}, use), HERMES, settings)
    assert caught.value.param == "tool_choice" and "--no-enable-auto-tool-choice" in caught.value.message
    for given in ("[]", "{", '{"messages": []}'):
        with pytest.raises(ConfigError, match="--default-chat-template-kwargs"):
            TokenizerConfig(default_chat_template_kwargs=given)


# ---- how a model writes ----


@pytest.mark.parametrize(
    ("template", "tokens", "tools", "reasoning"),
    [
        (QWEN_LIKE, (), "hermes", "think"),
        (MISTRAL_LIKE, (), "mistral", ""),
        ("{{ tools }}", ("[TOOL_CALLS]",), "mistral", ""),
        ("{{ tools }}", ("<|python_tag|>",), "llama3_json", ""),
        ("{{ tools }}", (), "", ""),
        ("{{ messages[0].content }}", (), "hermes", ""),
        ("{{ messages[0].content.split('</think>') }}", (), "hermes", "think"),
    ],
)
def test_the_format_is_told_from_the_model(template: str, tokens: tuple[str, ...], tools: str, reasoning: str) -> None:
    vocabulary = {token: 7 + number for number, token in enumerate(tokens)}
    knows = ChatTemplate(template, {}).knows_tools
    format = OutputFormat.choose("auto", "auto", template, knows, vocabulary.get)
    assert (format.tools, format.reasoning) == (tools, reasoning)
    assert format.markers == frozenset(vocabulary.values())
    none = OutputFormat.choose("none", "none", template, knows, vocabulary.get)
    assert none == OutputFormat() and none.parser(ToolUse(TOOLS), False) is None
    chosen = OutputFormat.choose("mistral", "deepseek_r1", template, knows, vocabulary.get)
    assert (chosen.tools, chosen.reasoning) == ("mistral", "deepseek_r1")


@pytest.mark.parametrize(
    ("reasoning", "prompt", "continued", "inside"),
    [
        ("think", "<|im_start|>assistant\n<think>\n", None, True),
        ("think", "<|im_start|>assistant\n", None, False),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, False),
        ("deepseek_r1", "<|Assistant|>", None, True),
        ("think", "assistant\n<think>I", "<think>I", True),
        ("think", "assistant\n<think>I</think>So", "<think>I</think>So", False),
        ("deepseek_r1", "assistant\n<think>I</think>So", "<think>I</think>So", False),
        ("think", "assistant\nSo", "So", False),
        ("", "<|im_start|>assistant\n<think>\n", None, False),
    ],
)
def test_reasoning_that_the_prompt_began(reasoning: str, prompt: str, continued: str | None, inside: bool) -> None:
    assert OutputFormat("", reasoning).inside(prompt, continued) == inside


def test_a_template_from_the_command_line(tmp_path: Path, byte_level: Library) -> None:
    folder = toy.save(tmp_path / "model", byte_level)
    file = tmp_path / "own.jinja"
    file.write_text("from a file")
    for given, text in ((str(file), "from a file"), ("{{ 'inline' }}", "inline")):
        template = Tokenizer.load(folder, given).template_for(None)
        assert template is not None and template.render([USER], {}) == text
    with pytest.raises(ConfigError, match="--chat-template /nowhere"):
        Tokenizer.load(folder, "/nowhere")


# ---- templates of requests ----


def test_endless_recursion_is_blamed_on_whose_template_it_is() -> None:
    endless = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    with pytest.raises(RequestError, match=r"^chat_template: the chat template recurses too deeply") as caught:
        foreign(endless)
    assert (caught.value.code, caught.value.param) == ("chat_template_error", "chat_template")
    with pytest.raises(RequestError, match=r"^messages: the chat template recurses too deeply") as caught:
        ChatTemplate(endless, {}).render([USER], {})
    assert (caught.value.code, caught.value.param) == ("chat_template_error", "messages")


def foreign(source: str, **variables: Any) -> str:
    templates = ForeignTemplates({"bos_token": "<s>"}, HERMES, ChatSettings(trusts_requests=True))
    return asyncio.run(templates.render(Conversation([USER], variables, ToolUse(TOOLS), source)))


def test_a_template_of_a_request_renders_as_the_servers_would() -> None:
    assert foreign(QWEN_LIKE, enable_thinking=False) == ours(QWEN_LIKE, [USER], ToolUse(TOOLS), enable_thinking=False)


def test_a_template_of_a_request_needs_trust() -> None:
    with pytest.raises(RequestError, match="--trust-request-chat-template") as caught:
        asyncio.run(ForeignTemplates({}, HERMES, ChatSettings()).render(Conversation([USER], {}, None, "{{ 1 }}")))
    assert (caught.value.status, caught.value.param) == (400, "chat_template")


LONG_LOOP = "{% for a in range(99999) %}"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{% for %}", "not valid Jinja"),
        ("{{ raise_exception('not you') }}", "not you"),
        (f"{LONG_LOOP}{LONG_LOOP}{{% endfor %}}{{% endfor %}}", "1 s of processor time"),
        ("{% macro f(n) %}{{ f(n - 1) + f(n - 1) if n }}{% endmacro %}{{ f(90) }}", "1 s of processor time"),
        ("{{ 'x' * 9999999999 }}", "memory"),
        ("{% set n = namespace(t='x') %}{% for a in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}", "memory|time"),
        ("{{ 'x' * 20000000 }}", "20000000 characters"),
        ("{{ ''.__class__.__mro__ }}", "chat template"),
    ],
)  # fmt: skip
def test_a_hostile_template_is_refused_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch, source: str, complaint: str
) -> None:
    monkeypatch.setattr(foreign_template, "CPU_SECONDS", 1)
    templates = ForeignTemplates({}, HERMES, ChatSettings(trusts_requests=True))
    with pytest.raises(RequestError, match=complaint) as caught:
        asyncio.run(templates.render(Conversation([USER], {}, None, source)))
    assert (caught.value.status, caught.value.code) == (400, "chat_template_error")
