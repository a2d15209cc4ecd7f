"""Grammars are compiled beside everything else, and what is wrong with one costs nobody else anything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer import grammars
from services.tokenizer.grammars import Grammars, json_rule
from shared.errors import RequestError
from shared.grammar import GrammarSpec, load_vocabulary, new_matcher
from shared.wire import Welcome

LIMITS = Welcome(1, 0, 16, 100, 2048, 49_152, [2], "digest")
DEAR = json.dumps({"type": "integer", "multipleOf": 999_983})  # an automaton with a state for each remainder

# All optional: more than a row may hold.
OBJECT = {"type": "object", "properties": {f"property_{number}": {"type": "integer"} for number in range(300)}}


def optional(count: int, **fields: Any) -> dict[str, Any]:
    """An object of so many properties, optional but for what ``fields`` say."""
    return {"type": "object", "properties": {f"property_{number}": {} for number in range(count)}, **fields}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def compiled(runner: asyncio.Runner) -> Iterator[Grammars]:
    from shared.models import locate

    found = Grammars(locate("").folder)
    yield found
    runner.run(_closed(found))


async def _closed(found: Grammars) -> None:
    found.close()
    await asyncio.sleep(0.1)  # the loop still has to learn that its processes are gone


def compile_all(runner: asyncio.Runner, found: Grammars, *wanted: tuple[str, str]) -> list[Any]:
    async def main() -> list[Any]:
        specs = [GrammarSpec(kind, text, f"structured_outputs.{kind}") for kind, text in wanted]
        return await asyncio.gather(*(found.compile(spec, LIMITS) for spec in specs), return_exceptions=True)

    return runner.run(main())


@pytest.fixture(scope="module")
def vocabulary(builtin_folder: Path) -> Any:
    return load_vocabulary(builtin_folder, 49_152, [2])


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json", '{"type": "integer"}', ["7", "-12"], ["07", '"7"', "{}"]),
        (
            "json",
            '{"type": "object"}',
            ["{}", '{"a": [1, {"b": null}]}', '{"a":[1,{"b":null}]}', '{"a": 1,"b":2}'],
            ["[]", '{"a":  1}', '{ "a": 1}', '{"a": 1 }', '{"a" : 1}', '{\n"a": 1}', '{"a":\n1}', '{"a": [1,\t2]}'],
        ),
        ("json", '{"x-guidance": {"whitespace_flexible": true}}', ['{\n  "a": [ 1 ]\n}'], ["{\n"]),
        ("json", '{"x-guidance": {"whitespace_flexible": false}, "type": "array"}', ["[1,2]"], ["[1, 2]"]),
        ("json", "true", ["null", "[1, 2]"], ["nul1"]),
        ("regex", "a[0-9]{2}", ["a12"], ["a1x", "b12"]),
        ("choice", '["yes", "no\\n\\"é", "a/b\\\\"]', ["yes", 'no\n"é', "a/b\\"], ["yess", "no"]),
        ("grammar", 'start: "a" B+\nB: /[0-9]/', ["a1", "a123"], ["ab", "1"]),
        ("grammar", 'root ::= "a" [0-9]+', ["a1", "a123"], ["ab", "1"]),
        ("grammar", f'start: "f:" {json_rule({"const": 1})}', ["f:1"], ["f:2", "f: 1"]),
    ],
)
def test_each_kind_means_what_it_says(
    runner: asyncio.Runner, compiled: Grammars, vocabulary: Any, kind: str, text: str, good: list[str], bad: list[str]
) -> None:
    (grammar,) = compile_all(runner, compiled, (kind, text))
    for output in [*good, *bad]:
        matcher = new_matcher(vocabulary, grammar)
        ids = vocabulary.tokenize_str(output)
        taken = matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()
        assert taken == (output in good), output


def test_a_bad_grammar_is_refused_and_the_next_good_one_is_not(runner: asyncio.Runner, compiled: Grammars) -> None:
    """vllm #43920, #17313."""
    bad = [
        ("json", '{"type": "strin"}', '"strin" is no type of JSON Schema'),
        ("json", '{"not": {}}', '"not" is not supported'),
        ("json", '{"type": "string", "format": "weird"}', 'the format "weird" is not supported'),
        (
            "json",
            '{"$ref": "http://example.com/x.json"}',
            '"$ref" leads to http://example.com/x.json, out of the schema',
        ),
        ("json", "false", "nothing can fit it: schema is false"),
        ("json", '{"$ref": "#"}', "it leaves no way to go on"),
        ("json", '{"type": "integer", "minimum": 5, "maximum": 3}', "nothing can fit it: minimum (5) is greater"),
        ("json", '{"type":"array","items":' * 200 + "{}" + "}" * 200, "it nests too deeply"),
        ("json", "{", "Expecting property name"),
        ("json", "[1]", "must be an object"),
        ("json", json.dumps(OBJECT), "/properties: 300 optional properties in a row, more than 248"),
        ("json", json.dumps({"properties": {"x": {}, "a": OBJECT}}), "/properties/a/properties: 300 optional"),
        ("json", json.dumps({"items": optional(251, additionalProperties=False)}), "/items/properties: 251 optional"),
        ("json", json.dumps({"items": optional(335, required=["property_334"])}), "334 optional properties in a row"),
        ("regex", "(a", "it is no regular expression: unclosed group"),
        ("regex", "(?=a)b", "look-ahead and look-behind are not supported"),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("grammar", "start: <|nope|>", 'unknown special token: "<|nope|>"'),
        ("grammar", "root ::= (", "Expected"),
        ("grammar", "", ""),
        ("nothing", "", "no kind of grammar"),
    ]
    refusals = compile_all(runner, compiled, *((kind, text) for kind, text, _ in bad))
    for (kind, _, why), refusal in zip(bad, refusals, strict=True):
        assert isinstance(refusal, RequestError)
        assert (refusal.status, refusal.param) == (400, f"structured_outputs.{kind}")
        assert why in refusal.message
        assert len(refusal.message) < 400
        assert "\n" not in refusal.message
    (good,) = compile_all(runner, compiled, ("regex", "a+"))
    assert "a+" in good
    fits = [optional(248), optional(250, additionalProperties=False), optional(334, required=["property_333"])]
    fits.append(optional(600, required=["property_0"]))
    for grammar in compile_all(runner, compiled, *(("json", json.dumps(schema)) for schema in fits)):
        assert isinstance(grammar, str), grammar


def test_a_grammar_that_compiles_for_ever_is_refused_and_holds_nobody_up(
    runner: asyncio.Runner, compiled: Grammars
) -> None:
    """vllm #54003: the processor's time has a limit, others are compiled meanwhile, and the refusal is remembered."""
    order: list[str] = []

    async def one(kind: str, text: str) -> Any:
        try:
            return await compiled.compile(GrammarSpec(kind, text, "response_format"), LIMITS)
        except RequestError as error:
            return error
        finally:
            order.append(text)

    async def main() -> tuple[Any, int]:
        slow = asyncio.create_task(one("json", DEAR))
        turns = 0
        while not slow.done():
            await one("regex", f"a{{{turns + 1}}}")
            await asyncio.sleep(0.01)
            turns += 1
        return await slow, turns

    refusal, turns = runner.run(main())
    assert (refusal.status, refusal.param) == (400, "response_format")
    assert "too complex" in refusal.message
    assert turns > 20
    known = compile_all(runner, compiled, ("json", DEAR))[0]
    assert known.message.endswith(refusal.message.partition(":")[2])


def test_a_compiler_that_dies_is_replaced(runner: asyncio.Runner, compiled: Grammars) -> None:
    compile_all(runner, compiled, ("regex", "b+"))
    for compiler in compiled._free:
        assert compiler._process is not None
        os.kill(compiler._process.pid, signal.SIGKILL)
    results = compile_all(runner, compiled, ("regex", "b{2}"), ("regex", "b{3}"), ("regex", "b{4}"))
    results += compile_all(runner, compiled, ("regex", "b{2}"), ("regex", "b{3}"), ("regex", "b{4}"))
    assert all(isinstance(result, str) for result in results[3:])
    for refusal in results[:3]:  # those that the dead ones were asked for; it was not their fault
        assert isinstance(refusal, str) or "failed" in refusal.message


def test_the_same_grammar_is_compiled_once(
    runner: asyncio.Runner, compiled: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = grammars._Compiler.compile

    async def counted(self: Any, kind: str, text: str) -> str:
        asked.append(text)
        return await ask(self, kind, text)

    monkeypatch.setattr(grammars._Compiler, "compile", counted)
    results = compile_all(runner, compiled, *[("regex", "once+")] * 20, ("choice", "[]"), ("choice", "[]"))
    assert len(set(results[:20])) == 1
    compile_all(runner, compiled, ("regex", "once+"), ("choice", "[]"))
    assert sorted(asked) == ["[]", "once+"]


def test_what_is_remembered_is_bounded(compiled: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "REMEMBERED_CHARS", 1000)
    found = Grammars(Path("none"))
    for number in range(50):
        found._remember(("regex", f"{number:050}"), "x" * 50)
    assert list(found._known) == [("regex", f"{number:050}") for number in range(40, 50)]


def test_too_many_that_wait_are_refused(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_WAITING", 0)
    (refusal,) = compile_all(runner, Grammars(Path("none")), ("regex", "c+"))
    assert (refusal.status, refusal.code) == (503, "overloaded")


def test_a_model_without_tokenizer_json_has_no_grammars(runner: asyncio.Runner, tmp_path: Path) -> None:
    found = Grammars(tmp_path)
    (refusal,) = compile_all(runner, found, ("regex", "c+"))
    assert refusal.status == 400
    assert "tokenizer.json" in refusal.message
    runner.run(_closed(found))
