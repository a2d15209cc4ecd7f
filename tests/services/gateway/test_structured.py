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
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "description": "y"}}},
            spec("json", OBJECT, "response_format.json_schema.schema"),
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
