"""What users read of a schema that cannot be used: the words, and where in it the fault is, with llguidance itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.grammar_compiler import serialize
from services.tokenizer.grammar_errors import explained
from shared.grammar import GrammarError, load_vocabulary, new_matcher

OVERLAPPING = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
ONE_OF = '"oneOf" is supported only where no value can fit two of its branches; "anyOf" is'


@pytest.fixture(scope="module")
def vocabulary(builtin_folder: Path) -> Any:
    return load_vocabulary(builtin_folder, 49_152, [2])


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (OVERLAPPING, ONE_OF),
        ({"type": "object", "properties": {"a": {"items": OVERLAPPING}}}, f"{ONE_OF} (at /properties/a/items)"),
        ({"items": {"not": {}}, "const": {"not": 1}}, '"not" is not supported (at /items)'),
        ({"anyOf": [{"if": {}, "then": {}}]}, '"if", "then" are not supported (at /anyOf/0)'),
        ({"anyOf": [{"not": {}}, {"not": {}}]}, '"not" is not supported'),
        ({"items": {"format": "x", "type": "string"}}, 'the format "x" is not supported (at /items)'),
        ({"items": {"type": ["null", "strin"]}}, '"strin" is no type of JSON Schema (at /items)'),
        (
            {"$ref": "http://a.example/b"},
            '"$ref" leads to http://a.example/b, out of the schema, and nothing is fetched',
        ),
        ({"items": {"$ref": "#/$defs/x"}}, '"$ref" leads to "#/$defs/x", which is not in the schema (at /items)'),
        (
            {"type": "integer", "minimum": 5, "maximum": 3},
            "nothing can fit it: minimum (5) is greater than maximum (3)",
        ),
        (
            {"type": "string", "format": "date", "pattern": "^a"},
            "nothing can fit it: its pattern, format and lengths contradict each other",
        ),
        ({"type": "string", "pattern": "(a"}, "a pattern in it is no regular expression: unclosed group"),
        ({"type": "string", "pattern": "(?=a)"}, "look-ahead and look-behind are not supported in regular expressions"),
        ({"type": "object", "properties": 5}, "properties must be an object"),
    ],
)
def test_the_fault_and_its_place(vocabulary: Any, schema: Any, told: str) -> None:
    text = json.dumps(schema)
    with pytest.raises(GrammarError) as caught:
        new_matcher(vocabulary, serialize("json", text))
    assert explained("json", text, str(caught.value)) == told


def test_a_message_is_bounded() -> None:
    schema = json.dumps({"a" * 500: {"type": "b" * 500}})
    assert len(explained("json", schema, f"Invalid type: {'b' * 500}")) == 300


def test_lark_is_told_as_it_is() -> None:
    assert explained("grammar", "start: x", 'unknown name: "x"') == 'unknown name: "x"'
