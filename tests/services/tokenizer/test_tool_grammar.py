"""What an answer may be where calls are demanded or strict: llguidance runs the grammars over a real vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from services.tokenizer.grammar_compiler import serialize
from services.tokenizer.parsers.output import MARKERS, OutputFormat
from services.tokenizer.reasoning_grammar import behind_reasoning
from services.tokenizer.tool_grammar import parameter_specs, tool_grammar
from shared.grammar import GrammarError, GrammarSpec, load_vocabulary, new_matcher
from shared.wire import ToolUse
from tests.services.tokenizer import toy

PARAMETERS = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Place"}, "unit": {"enum": ["C", "F"]}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "string", "maxLength": 8}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
GOOD, BAD = '{"at": "Köln", "unit": "C"}', '{"unit": "C"}'
FORMS = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "%s", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "%s", "arguments": %s}]',
    "mistral tokens": "[TOOL_CALLS]%s[ARGS]%s",
}
BETWEEN = {"hermes": "\n", "llama3_json": "; ", "mistral tokens": ""}


class Model:
    """A vocabulary, with markers as special tokens or without, and how its model writes."""

    def __init__(self, folder: Path, form: str, reasoning: str = "") -> None:
        library = toy.byte_level()
        name = form.split()[0]
        if form != name or reasoning == "tokens":
            markers = [*MARKERS[name], "<think>", "</think>"]
            library.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
        toy.save(folder, library)
        self.library: Library = library
        self.format = OutputFormat(name, "think" if reasoning else "")
        self.vocabulary: LLTokenizer = load_vocabulary(folder, library.get_vocab_size(), [1])
        self.form = form

    def written(self, name: str, arguments: str) -> str:
        return FORMS[self.form] % (name, arguments)

    def takes(self, use: ToolUse, text: str, inside: bool = False) -> bool:
        """Whether ``text`` is a whole answer."""
        spec = tool_grammar(use, self.format, inside, self.library.token_to_id)
        assert spec is not None and spec.param == "tools"
        return self.matches(spec, text)

    def matches(self, spec: GrammarSpec, text: str) -> bool:
        matcher = new_matcher(self.vocabulary, serialize(spec.kind, spec.text))
        ids = self.library.encode(text).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.fixture(params=FORMS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return Model(tmp_path, request.param)


def test_required_is_one_call_or_more(model: Model) -> None:
    use, alone = ToolUse(TOOLS, "required"), ToolUse(TOOLS, "required", parallel=False)
    good, other = model.written("weather", GOOD), model.written("now", "{}")
    assert model.takes(use, good) and model.takes(use, other) and model.takes(alone, good)
    for text in ("", "Sure.", f"Sure. {good}", good[:-1], f"{good} so"):
        assert not model.takes(use, text), text
    for name, arguments in (("weather", BAD), ("weather", "{}"), ("now", GOOD), ("other", GOOD)):
        assert not model.takes(use, model.written(name, arguments)), (name, arguments)
    two = model.written("weather", f'{GOOD}}}, {{"name": "now", "arguments": {{}}')
    if model.form in BETWEEN:
        two = f"{good}{BETWEEN[model.form]}{other}"
    assert model.takes(use, two) and not model.takes(alone, two)
    if model.form in BETWEEN:
        assert model.takes(use, BETWEEN[model.form].join([other] * 16))
        assert not model.takes(use, BETWEEN[model.form].join([other] * 17))


def test_a_named_function_is_called_once(model: Model) -> None:
    use = ToolUse(TOOLS, "function", "weather")
    good = model.written("weather", GOOD)
    assert model.takes(use, good)
    assert not model.takes(use, model.written("now", "{}"))
    assert not model.takes(use, good + BETWEEN.get(model.form, "") + good)


@pytest.mark.parametrize("markers", ["text", "tokens"])
def test_reasoning_comes_before_the_calls(tmp_path: Path, markers: str) -> None:
    model, use = Model(tmp_path, "hermes", markers), ToolUse(TOOLS, "required")
    good = model.written("weather", GOOD)
    assert model.takes(use, f"<think>\nHm. <tool é\n</think>\n\n{good}")
    assert model.takes(use, good) and not model.takes(use, "<think>Hm.</think>Sure.")
    assert model.takes(use, f"Hm.</think>{good}", inside=True)
    assert not model.takes(use, good, inside=True)


@pytest.mark.parametrize("markers", ["text", "tokens"])
@pytest.mark.parametrize(
    ("kind", "text", "good"),
    [
        ("json", json.dumps(PARAMETERS), GOOD),
        ("regex", "[ab]+é", "abé"),
        ("choice", '["yes", "no"]', "no"),
        ("grammar", "start: reasoning\nreasoning: /[0-9]+/", "12"),
        ("grammar", 'root ::= "x" [yz]', "xz"),
    ],
)
def test_reasoning_comes_before_what_any_grammar_holds(
    tmp_path: Path, markers: str, kind: str, text: str, good: str
) -> None:
    model = Model(tmp_path, "hermes", markers)
    for inside, opening in ((True, ""), (True, "<think>"), (False, "<think>")):
        spec = behind_reasoning(GrammarSpec(kind, text, "response_format"), inside, model.library.token_to_id)
        assert spec.param == "response_format"
        assert model.matches(spec, f'{opening}Hm {{"a": é.\n</think>\n\n{good}')
        assert model.matches(spec, good) != inside
        for bad in (f"{opening}Hm.", f"{opening}Hm.</think>", f"{opening}Hm.</think>{good} so", f"Sure. {good}"):
            assert not model.matches(spec, bad), bad


@pytest.mark.parametrize("form", ["hermes", "mistral", "mistral tokens"])
def test_strict_functions_are_called_by_their_schemas(tmp_path: Path, form: str) -> None:
    model = Model(tmp_path, form)
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    use, alone = ToolUse(strict), ToolUse(strict, parallel=False)
    good, loose = model.written("weather", GOOD), model.written("now", '{"any": [1]}')
    for text in ("", "Sure <tool, [TOOL é.", good, loose, f"Sure.\n{good}", f"{good} so", f"{good}\n{loose}"):
        assert model.takes(use, text), text
    assert not model.takes(use, model.written("weather", BAD)) and not model.takes(use, f"So {good[:12]} x")
    assert model.takes(alone, f"Sure.\n{good}") and not model.takes(alone, f"{good}\n{loose}")


def test_no_grammar_where_nothing_is_strict(tmp_path: Path) -> None:
    strict = [{"type": "function", "function": {"name": "f", "strict": True}}]
    for name, tools in (("hermes", TOOLS), ("llama3_json", strict)):
        assert tool_grammar(ToolUse(tools), OutputFormat(name), False, lambda token: None) is None


def test_each_schema_is_checked_by_itself() -> None:
    def names(use: ToolUse) -> list[tuple[str, Any]]:
        return [(spec.param, json.loads(spec.text).get("properties")) for spec in parameter_specs(use)]

    weather = ("tools.0.function.parameters", PARAMETERS["properties"])
    assert names(ToolUse(TOOLS, "required")) == [weather, ("tools.1.function.parameters", {})]
    assert names(ToolUse(TOOLS, "function", "now")) == [("tools.1.function.parameters", {})]


def test_an_object_of_too_many_optional_properties_is_refused_wherever_it_stands() -> None:
    """It would fail when the model came to it, whose grammar is then that of all functions."""
    many = {"type": "object", "properties": {f"p{number}": {} for number in range(300)}}
    deep = {"type": "object", "properties": {"a": {"type": "array", "items": many}}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": deep, "strict": True}}]
    for use in (ToolUse(tools, "required"), ToolUse(tools, "function", "f"), ToolUse(tools)):
        spec = parameter_specs(use)[-1]
        assert spec.param == "tools.1.function.parameters"
        with pytest.raises(GrammarError, match="/properties/a/items/properties: 300 optional properties in a row"):
            serialize(spec.kind, spec.text)


def test_a_schema_that_is_none_is_the_tools_fault() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 5}}}]
    spec = tool_grammar(ToolUse(tools, "required"), OutputFormat("hermes"), False, lambda token: None)
    assert spec is not None and json.dumps({"properties": 5})[1:-1] in spec.text and spec.param == "tools"
