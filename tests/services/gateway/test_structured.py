"""What reaches the tokenizer of a wish about the output, and what a client hears when it cannot be granted."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from shared.grammar import GrammarSpec
from tests.services.gateway.background import CHAT, Posted
from tests.services.gateway.pipeline import Pipeline

OBJECT = {"type": "object"}
SCHEMA = {"type": "object", "properties": {"ö": {"const": "b"}, "a": {"type": "null"}}}


def spec(kind: str, text: Any, param: str) -> GrammarSpec:
    return GrammarSpec(
        kind, text if isinstance(text, str) else json.dumps(text, separators=(",", ":"), ensure_ascii=False), param
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, spec("json", OBJECT, "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            spec("json", SCHEMA, "response_format.json_schema.schema"),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, spec("json", SCHEMA, "structured_outputs.json")),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, spec("json", SCHEMA, "structured_outputs.json")),
        ({"structured_outputs": {"json": True}}, spec("json", "true", "structured_outputs.json")),
        ({"structured_outputs": {"json_object": True}}, spec("json", OBJECT, "structured_outputs.json_object")),
        ({"structured_outputs": {"regex": "a+"}}, spec("regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a", "ü"]}}, spec("choice", ["a", "ü"], "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "start: x"}}, spec("grammar", "start: x", "structured_outputs.grammar")),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
            spec("json", {"x-guidance": {"whitespace_pattern": " ?"}}, "structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json": True, "disable_any_whitespace": True, "disable_fallback": True}},
            spec("json", {"x-guidance": {"whitespace_flexible": False}}, "structured_outputs.json"),
        ),
        ({"guided_json": SCHEMA}, spec("json", SCHEMA, "guided_json")),
        ({"guided_regex": "a+"}, spec("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a"]}, spec("choice", ["a"], "guided_choice")),
        ({"guided_grammar": "start: x"}, spec("grammar", "start: x", "guided_grammar")),
    ],
)  # fmt: skip
def test_what_reaches_the_tokenizer(
    pipeline: Pipeline, client: httpx.Client, fields: dict[str, Any], expected: GrammarSpec | None
) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x"})):
        posted = Posted(client, path, {**body, **fields})
        answer = pipeline.tokenizer.submitted()
        assert answer.submit.grammar == expected
        answer.reject(400, "invalid_value", "response_format", "refused by the tokenizer")
        error = posted.response().json()["error"]
        assert (error["param"], error["message"]) == ("response_format", "refused by the tokenizer")


def test_a_grammar_that_cannot_be_followed_is_the_requests_fault(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("{")
    answer.finish("error", message="nothing is left", code="grammar_failed")
    response = posted.response()
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "nothing is left",
        "type": "invalid_request_error",
        "param": None,
        "code": "grammar_failed",
    }


def deep_schema(levels: int) -> dict[str, Any]:
    """Of objects in objects; two levels of JSON each."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


MESSAGE = {"role": "user", "content": "hi"}
DEEP = deep_schema(130)
WISH = {"type": "json_schema", "name": "x", "schema": DEEP}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"structured_outputs": {"json": DEEP}}, "structured_outputs"),
        ("chat/completions", {"structured_outputs": {"json": json.dumps(DEEP)}}, "structured_outputs.json"),
        ("chat/completions", {"guided_json": json.dumps(DEEP)}, "guided_json"),
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": WISH}}, "response_format"),
        ("chat/completions", {"tools": [{"type": "function", "function": {"parameters": DEEP}}]}, "tools"),
        ("chat/completions", {"chat_template_kwargs": DEEP}, "chat_template_kwargs"),
        ("chat/completions", {"metadata": DEEP}, "metadata"),
        ("chat/completions", {"messages": [{**MESSAGE, "tool_calls": [DEEP]}]}, "messages"),
        ("responses", {"text": {"format": WISH}}, "text"),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": DEEP}}}, "output_config"),
    ],
)
def test_what_nests_too_deeply_is_refused_by_name(
    client: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    whole = {"responses": {"input": "hi"}, "messages": {"messages": [MESSAGE], "max_tokens": 1}}.get(path, CHAT)
    response = client.post(f"/v1/{path}", json={**whole, **fields})
    message = response.json()["error"]["message"]
    assert response.status_code == 400, message
    assert message == f"{param}: lists and objects nest deeper than the limit of 200 levels"


def test_a_schema_of_many_levels_reaches_the_tokenizer(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/v1/chat/completions", {**CHAT, "structured_outputs": {"json": deep_schema(99)}})
    answer = pipeline.tokenizer.submitted()
    assert answer.submit.grammar is not None and json.loads(answer.submit.grammar.text) == deep_schema(99)
    answer.reject(400, "invalid_value", "", "enough")
    assert posted.response().status_code == 400
