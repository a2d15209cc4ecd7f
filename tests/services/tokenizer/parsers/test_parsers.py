"""Tool calls and reasoning in a model's text: what each format's parser makes of it, however it is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.parsers.calls import CallTransducer
from services.tokenizer.parsers.hermes import Hermes
from services.tokenizer.parsers.llama3 import Llama3
from services.tokenizer.parsers.mistral import Mistral
from services.tokenizer.parsers.output import OutputParser
from services.tokenizer.parsers.think import ThinkSplitter
from services.tokenizer.parsers.transducer import Piece, Transducer, joined
from shared.channels import CONTENT, REASONING, arguments_of, name_of

NAMES = ("get_weather", "f")
FORMATS: dict[str, Callable[[], Transducer]] = {
    "hermes": lambda: Hermes(NAMES, True),
    "llama3": lambda: Llama3(NAMES, True),
    "mistral": lambda: Mistral(NAMES, True),
    "think": lambda: ThinkSplitter(False),
    "inside": lambda: ThinkSplitter(True),
}


def content(text: str) -> Piece:
    return CONTENT, text


def reasoning(text: str) -> Piece:
    return REASONING, text


def call(number: int, name: str, arguments: str) -> list[Piece]:
    return [(name_of(number), name), (arguments_of(number), arguments)]


PLAIN = "Just text with <b>tags</b>, <tool and </tool_call>."
CASES: dict[str, list[tuple[str, list[Piece]]]] = {
    "hermes": [
        (PLAIN, [content(PLAIN)]),
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": [{"b": "}"}]}}\n</tool_call>',
            call(0, "f", '{"a": [{"b": "}"}]}'),
        ),
        (
            'Wait.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {"x": "é\\n"}}</tool_call>\n',
            [content("Wait."), *call(0, "f", "{}"), *call(1, "g", '{"x": "é\\n"}')],
        ),
        # a closing marker inside of a string is text of the string
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\""}}', call(0, "f", '{"a": "</tool_call>\\""}')),
        # arguments first, another key, escapes in the name; the other name of arguments
        ('<tool_call>{"arguments": {"a": 1}, "x": [1, "}"], "name": "\\u0066"}</tool_call>', call(0, "f", '{"a": 1}')),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', call(0, "f", '{"a": 1}')),
        # no arguments, null, JSON in a string, a scalar
        ('<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', call(0, "f", "{}")),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call(0, "f", '{"a": 1}')),
        ('<tool_call>{"name": "f", "arguments": 12}</tool_call>', call(0, "f", "12")),
        # no closing marker; half of one
        ('<tool_call>{"name": "f", "arguments": {}}', call(0, "f", "{}")),
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool_ca', call(0, "f", "{}")),
        # no call at all
        ("<tool_call>f(1)</tool_call> ok", [content("<tool_call>f(1)</tool_call> ok")]),
        ('<tool_call>{"arguments": {}}</tool_call>', [content('<tool_call>{"arguments": {}}</tool_call>')]),
        ('<tool_call>\n{"na', [content('<tool_call>\n{"na')]),
        ("so <tool_c", [content("so <tool_c")]),
        ('<tool_call> <tool_call>{"name": "f"}</tool_call>', [content("<tool_call> "), *call(0, "f", "{}")]),
        # what breaks off later stays arguments
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> so', [*call(0, "f", '{"a": 1'), content("so")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "x', call(0, "f", '{"a": "x')),
        ('<tool_call>{"name": "f", "arguments": "x', call(0, "f", '"x')),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', [*call(0, "f", "{}"), content("}</tool_call>")]),
    ],
    "llama3": [
        ('{"name": "f", "parameters": {"a": 1}}', call(0, "f", '{"a": 1}')),
        ('\n{"type": "function", "name": "f", "parameters": {}}', call(0, "f", "{}")),
        (
            '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"a": 2}};',
            [*call(0, "f", "{}"), *call(1, "get_weather", '{"a": 2}')],
        ),
        ('Sure.<|python_tag|>{"name": "f", "parameters": {}}', [content("Sure."), *call(0, "f", "{}")]),
        # an answer that is JSON of its own, or Python
        ('{"city": "Paris"}', [content('{"city": "Paris"}')]),
        ('{"name": "Bob", "age": 4}', [content('{"name": "Bob", "age": 4}')]),
        ("<|python_tag|>print(1)", [content("<|python_tag|>print(1)")]),
        ('So: {"name": "f", "parameters": {}}', [content('So: {"name": "f", "parameters": {}}')]),
        ('{"name": "f", "parameters": {"a": <x>}}', call(0, "f", '{"a": <x>}}')),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
            [*call(0, "f", '{"a": [1]}'), *call(1, "g", "{}")],
        ),
        (
            'Well.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
            [content("Well."), *call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
        ),
        ('[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', call(0, "f", '{"a": 1}')),
        ('[TOOL_CALLS]f{"a": 1}', call(0, "f", '{"a": 1}')),
        ("[TOOL_CALLS]f[OTHER]{}", [content("[TOOL_CALLS]f[OTHER]{}")]),
        ("[TOOL_CALLS][]", [content("[TOOL_CALLS][]")]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1', call(0, "f", '{"a": 1')),
        ("An [TOOL list", [content("An [TOOL list")]),
    ],
    "think": [
        ("<think>\nHm </th ink>.\n</think>\n\nYes.", [reasoning("Hm </th ink>."), content("Yes.")]),
        ("\n<think></think>Yes", [content("Yes")]),
        ("Yes, <think>no</think>", [content("Yes, <think>no</think>")]),
        (" <thi", [content(" <thi")]),
        ("<think>cut off </thi", [reasoning("cut off </thi")]),
    ],
    "inside": [
        ("\nHm.\n</think>\n\nYes.", [reasoning("Hm."), content("Yes.")]),
        ("<think>Hm.</think>Yes.", [reasoning("Hm."), content("Yes.")]),
        ("<thank you", [reasoning("<thank you")]),
        ("</think>Yes", [content("Yes")]),
    ],
}


def parse(parser: Transducer | OutputParser, text: str, cuts: list[int], cut: bool = False) -> list[Piece]:
    pieces: list[Piece] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += parser.feed(text[start:end])
        assert 0 <= parser.held <= end
    pieces += parser.finish(cut)
    assert parser.held == 0
    return joined(pieces)


@pytest.mark.parametrize(
    ("form", "text", "expected"), [(form, *case) for form, cases in CASES.items() for case in cases]
)
def test_a_format(form: str, text: str, expected: list[Piece]) -> None:
    assert parse(FORMATS[form](), text, []) == expected
    assert parse(FORMATS[form](), text, list(range(1, len(text)))) == expected


CUT: list[tuple[type[CallTransducer], str, list[Piece]]] = [
    (Hermes, "so\n\n<tool_c", [content("so")]),
    (Hermes, "so\n\n<to", [content("so")]),
    (Hermes, "if a <t", [content("if a <t")]),  # as likely as not text
    (Hermes, 'so <tool_call>\n{"name": "f", "argu', [content("so"), (name_of(0), "f")]),
    (Hermes, '<tool_call>{"name": "f"}</tool_call>\n<', call(0, "f", "{}")),
    (Hermes, "<tool_call>f(1", [content("<tool_call>f(1")]),  # it was no call before the cut
    (Llama3, '{"name": "get_wea', []),
    (Llama3, '{"type": "function", "na', []),
    (Llama3, '{"name": "Bob', [content('{"name": "Bob')]),  # JSON that is the answer
    (Llama3, '{"type": "circle", "na', [content('{"type": "circle", "na')]),
    (Llama3, '{"name": "f", "parameters": {}}; {"name": "Bo', call(0, "f", "{}")),
    (Llama3, 'Sure.<|python_tag|>{"name": "Bo', [content("Sure.")]),
    (Llama3, "Sure.<|pyth", [content("Sure.")]),
    (Mistral, "so [TOOL_", [content("so")]),
    (Mistral, "[TOOL_CALLS]get_wea", []),
    (Mistral, '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}, {"na', call(0, "f", '{"a": "x"}')),
]


@pytest.mark.parametrize(("form", "text", "expected"), CUT)
def test_a_call_that_is_cut_is_no_content(form: type[CallTransducer], text: str, expected: list[Piece]) -> None:
    """Where the model ended there, it wrote this; where it was cut, nobody is told of markup."""
    assert parse(form(NAMES, True), text, [], cut=True) == expected
    assert parse(form(NAMES, True), text, list(range(1, len(text))), cut=True) == expected


@pytest.mark.parametrize(
    ("form", "before", "between", "key"),
    [
        (Hermes, "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "arguments"),
        (Llama3, "", "; ", "parameters"),
        (Mistral, "[TOOL_CALLS][", ", ", "arguments"),
    ],
)
def test_a_demanded_call_cut_anywhere(form: type[CallTransducer], before: str, between: str, key: str) -> None:
    """Of each call there is nothing before its name is whole, and then so much of its arguments as came."""
    arguments = '{"a": "</tool_call>;[", "b": [1]}'
    text = f'{before}{{"name": "f", "{key}": {arguments}}}{between}{{"name": "get_weather", "{key}": {arguments}}}'
    for end in range(len(text) + 1):
        begun, expected = text[:end], list[Piece]()
        for number, name in enumerate(("f", "get_weather")):
            if f'"{name}"' in begun:
                behind = begun.split(f'"name": "{name}", "{key}": ')[1:]
                expected += call(number, name, behind[0][: len(arguments)] if behind else "")
        pieces = parse(form(NAMES, True, True), begun, [], cut=True)
        assert pieces == [piece for piece in expected if piece[1]], begun


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [(False, "\n<thi", []), (False, "<t", [content("<t")]), (True, "<think", []), (True, "Hm.\n</thi", "Hm.")],
)
def test_a_marker_of_reasoning_that_is_cut(inside: bool, text: str, expected: Any) -> None:
    expected = [reasoning(expected)] if isinstance(expected, str) else expected
    assert parse(OutputParser([ThinkSplitter(inside), Hermes(NAMES, True)]), text, [3], cut=True) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    '{"name": "f", "arguments": {"a": "b"}}', '{"name":', '"parameters": {', '{"a": [1, 2]', "}", "]", "[", ",", ";",
    '"', "\\", "\n", " ", "<", "é😀", "word", "f", "null", "12",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_text_cut_anywhere_gives_the_same_pieces(data: st.DataObject) -> None:
    """After every cut what was given out is what that much text gives in one go, so it only depends on the text."""
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14)))
    tools = data.draw(st.sampled_from([Hermes, Llama3, Mistral]))
    inside, parallel, demanded, cut = (data.draw(st.booleans()) for _ in range(4))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))

    def make() -> OutputParser:
        return OutputParser([ThinkSplitter(inside), tools(NAMES, parallel, demanded)])

    parser, pieces = make(), list[Piece]()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += parser.feed(text[start:end])
        whole = make()
        assert joined(pieces) == joined(whole.feed(text[:end])) and parser.held == whole.held
    pieces += parser.finish(cut)
    assert joined(pieces) == parse(make(), text, [], cut)
    names = [channel for channel, _ in joined(pieces) if channel >= 2 and channel % 2 == 0]
    assert names == [name_of(number) for number in range(len(names))] and (parallel or len(names) <= 1)


MARKERS = ["</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '"']
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6) | st.sampled_from(MARKERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), min_size=1, max_size=3), st.booleans())
def test_well_formed_calls_are_read_as_json_reads_them(arguments: list[dict[str, Any]], ascii: bool) -> None:
    """For every format, as models are taught to write it; the arguments come back byte for byte."""
    written = [json.dumps(one, ensure_ascii=ascii) for one in arguments]
    expected = [piece for number, one in enumerate(written) for piece in call(number, "f", one)]
    texts = {
        "hermes": "\n".join(f'<tool_call>\n{{"name": "f", "arguments": {one}}}\n</tool_call>' for one in written),
        "llama3": "; ".join(f'{{"name": "f", "parameters": {one}}}' for one in written),
        "mistral": "[TOOL_CALLS] [" + ", ".join(f'{{"name": "f", "arguments": {one}}}' for one in written) + "]",
    }
    for form, text in [*texts.items(), ("mistral", "".join(f"[TOOL_CALLS]f[ARGS]{one}" for one in written))]:
        assert parse(FORMATS[form](), text, list(range(3, len(text), 3))) == expected


def test_only_a_prefix_of_a_marker_is_held_back() -> None:
    parser = Hermes(NAMES, True)
    for text, held in (("a", 0), (" ", 1), ("b<", 1), ("b", 0), ("<tool_call", 10), ("s", 0), ("<<tool", 5)):
        parser.feed(text)
        assert parser.held == held, text


def test_arguments_leave_as_they_come() -> None:
    parser = Hermes(NAMES, True)
    parser.feed('<tool_call>{"name": "f", "arguments": ')
    for text in ('{"a', '": ', "1}"):
        assert parser.feed(text) == [(arguments_of(0), text)]


def test_no_second_call_where_one_is_allowed() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>'
    assert parse(Hermes(NAMES, False), text, []) == call(0, "f", "{}")
    assert parse(Hermes(NAMES, True), text, []) == [*call(0, "f", "{}"), *call(1, "f", "{}")]


@pytest.mark.parametrize("inside", [True, False])
def test_what_is_held_back_is_bounded(inside: bool) -> None:
    """Even where a model writes nothing but white space, or the start of a marker again and again."""
    parser = OutputParser([ThinkSplitter(inside), Llama3(NAMES, True)])
    for text in (" " * 5_000, "</think>x", " " * 5_000, "<" * 5_000, "<|python_tag" * 500):
        for character in text:
            parser.feed(character)
            assert parser.held <= 32
