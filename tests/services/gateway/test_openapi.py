"""``/openapi.json`` describes what is served, and answers are as it says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import httpx
import jsonschema_rs
import pytest
from openai.types.responses import InputTokenCountResponse
from starlette.routing import Route

from services.gateway.app import routes
from services.gateway.config import GatewayConfig
from services.gateway.models import Models
from services.gateway.openapi import OPERATIONS, document
from services.gateway.refused import REFUSED
from shared.wire import Query, Reply, SubmitText, decode
from tests.services.gateway.background import CHAT, Posted
from tests.services.gateway.pipeline import Gateway, Pipeline

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def of(method: str, path: str) -> dict[str, Any]:
    return cast(dict[str, Any], document()["paths"][path][method])


def assert_described(response: httpx.Response, method: str, path: str) -> None:
    described = of(method, path)["responses"]
    assert str(response.status_code) in described
    media = response.headers["content-type"].split(";")[0]
    schema = described[str(response.status_code)]["content"][media]["schema"]
    if media == "application/json":
        jsonschema_rs.validate({**schema, "components": document()["components"]}, response.json())


def test_it_describes_every_route() -> None:
    served = {
        (method.lower(), route.path.replace(":path", ""))
        for route in routes(GatewayConfig(), cast(Any, None), Models(["toy"], str))
        if isinstance(route, Route) and route.path not in REFUSED
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = {(operation.method, operation.path) for operation in OPERATIONS}
    assert served - described == {("get", "/openapi.json"), ("get", "/docs")}
    assert not described - served


def test_every_reference_is_there_and_no_name_is_double() -> None:
    told = document()
    names = set(told["components"]["schemas"])
    assert set(re.findall(r"'#/components/schemas/([^']+)'", str(told))) <= names
    assert not [name for name in names if "__" in name]


def test_it_is_what_the_validators_hold(client: httpx.Client) -> None:
    told = client.get("/openapi.json").json()
    assert told == document()
    chat = told["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False and chat["required"] == ["messages"]
    assert chat["properties"]["top_p"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1}
    assert "metadata" in chat["properties"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": ["a", "b"], "echo": True}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"max_tokens": 5, **CHAT}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_as_described(
    pipeline: Pipeline, client: httpx.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    pipeline.tokenizer.automatic(["Hel", "lo"])
    try:
        response = client.post(path, json={**body, "stream": stream})
    finally:
        pipeline.tokenizer.answer = None
    assert response.status_code == 200
    assert_described(response, "post", path)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_refusals_are_as_described(client: httpx.Client, operation: Any) -> None:
    path = operation.path.format(name="unknown")
    wrong = client.post(path, json={"prompt": 5}) if operation.method == "post" else client.get(path + "?cursor=x")
    if operation.path not in ("/metrics", "/internal/status"):
        assert_described(wrong, operation.method, operation.path)
    assert_described(client.put(path), operation.method, operation.path)


def test_render(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/v1/chat/completions/render", {**CHAT, "temperature": 0, "priority": 3})
    source, query = pipeline.tokenizer.expect_from(Query)
    assert query.what == "render"
    submit = decode(query.args["submit"])
    assert isinstance(submit, SubmitText)
    assert submit.messages == CHAT["messages"] and submit.endpoint == "chat"
    prompt = {"prompt": "<Hi>", "tokens": [5, 6], "max_tokens": 77}
    pipeline.tokenizer.send(source, Reply(query.number, 200, prompt))
    told = posted.response()
    assert_described(told, "post", "/v1/chat/completions/render")
    body = told.json()
    assert body["prompt"] == "<Hi>" and body["token_ids"] == [5, 6] and body["priority"] == 3
    assert body["sampling_params"]["max_tokens"] == 77 and body["sampling_params"]["temperature"] == 0
    assert body["request_id"] == told.headers["x-request-id"]


def test_render_of_several_prompts(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/v1/completions/render", {"prompt": ["a", "b"]})
    for text in ("a", "b"):
        source, query = pipeline.tokenizer.expect_from(
            Query, where=lambda one, text=text: decode(one.args["submit"]).prompt == text
        )
        prompt = {"prompt": text, "tokens": [ord(text)], "max_tokens": 16}
        pipeline.tokenizer.send(source, Reply(query.number, 200, prompt))
    told = posted.response()
    assert_described(told, "post", "/v1/completions/render")
    assert [one["token_ids"] for one in told.json()] == [[97], [98]]


def test_count_tokens(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/v1/messages/count_tokens", {**CHAT, "system": "s"})
    source, query = pipeline.tokenizer.expect_from(Query)
    assert [one["role"] for one in decode(query.args["submit"]).messages] == ["system", "user"]
    pipeline.tokenizer.send(source, Reply(query.number, 200, {"prompt": "", "tokens": [1, 2, 3], "max_tokens": 1}))
    told = posted.response()
    assert_described(told, "post", "/v1/messages/count_tokens")
    assert told.json() == {"input_tokens": 3}


def test_input_tokens(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/v1/responses/input_tokens", {"input": "Hi", "instructions": "s", "truncation": "auto"})
    source, query = pipeline.tokenizer.expect_from(Query)
    submit = decode(query.args["submit"])
    assert [one["role"] for one in submit.messages] == ["system", "user"] and submit.truncation.side == "messages"
    pipeline.tokenizer.send(source, Reply(query.number, 200, {"prompt": "", "tokens": [1, 2, 3], "max_tokens": 1}))
    told = posted.response()
    assert_described(told, "post", "/v1/responses/input_tokens")
    assert InputTokenCountResponse.model_validate(told.json()).input_tokens == 3


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_done_here_is_refused_by_name(client: httpx.Client, path: str) -> None:
    response = client.post(path.format(id="x", what="cancel"), json={"input": "a"})
    error = response.json()["error"]
    assert response.status_code == 404 and error["code"] == "not_supported" and REFUSED[path] in error["message"]


def test_both_can_be_switched_off(pipeline: Pipeline) -> None:
    with pipeline.gateway("--disable-fastapi-docs").client() as client:
        for path in ("/openapi.json", "/docs"):
            assert client.get(path).status_code == 404


def test_the_page_needs_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']|https?:|@import", page.text.replace('href="openapi.json"', ""))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_shows_every_operation(gateway: Gateway, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000")
    done = subprocess.run(
        [CHROMIUM, *options, f"--user-data-dir={tmp_path}", "--dump-dom", f"{gateway.url}/docs"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for operation in OPERATIONS:
        assert f"<code>{operation.path}</code>" in done.stdout
    assert '<details id="ChatRequest">' in done.stdout
