"""HTTP around the completions: models, tokenize, health, CORS, API keys, request ids."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from importlib.metadata import version

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.wire import Query, Reply
from tests.services.gateway.background import CHAT, Posted
from tests.services.gateway.pipeline import MAX_MODEL_LEN, Gateway, Pipeline, running

KEYS = ("first-key", "sécond-key")


@pytest.fixture(scope="module")
def guarded(pipeline: Pipeline) -> Gateway:
    return pipeline.gateway(
        "--allowed-origins=https://good.example",
        "--access-log",
        "--max-body-bytes=2KiB",
        env={"QUIRE_API_KEY": ",".join(KEYS)},
    )


@pytest.fixture
def locked(guarded: Gateway) -> Iterator[httpx.Client]:
    with guarded.client() as client:
        yield client


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + key.encode()}


def test_models(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == ["toy", "alias/toy"]
    card = client.get("/v1/models/alias/toy").json()
    assert card == listed["data"][1] and card["object"] == "model" and card["max_model_len"] == MAX_MODEL_LEN


def test_tokenize_and_detokenize_ask_a_tokenizer(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/tokenize", {"model": "toy", "prompt": "Hi", "return_token_strs": True})
    source, query = pipeline.tokenizer.expect_from(Query)
    assert query.what == "tokenize" and query.args == {"prompt": "Hi", "return_token_strs": True}
    pipeline.tokenizer.send(source, Reply(query.number, 200, {"tokens": [5, 6], "token_strs": ["H", "i"]}))
    assert posted.response().json() == {
        "count": 2,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": [5, 6],
        "token_strs": ["H", "i"],
    }
    posted = Posted(client, "/detokenize", {"tokens": [5, 6]})
    source, query = pipeline.tokenizer.expect_from(Query)
    assert query.what == "detokenize" and query.args == {"tokens": [5, 6]}
    pipeline.tokenizer.send(source, Reply(query.number, 200, {"prompt": "Hi"}))
    assert posted.response().json() == {"prompt": "Hi"}


def test_tokenize_passes_a_refusal_on(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/tokenize", CHAT)
    source, query = pipeline.tokenizer.expect_from(Query)
    assert query.args == {"messages": [{"role": "user", "content": "Hi"}]}
    why = {"message": "the template raised: no", "code": "template_error", "param": "messages"}
    pipeline.tokenizer.send(source, Reply(query.number, 400, why))
    response = posted.response()
    assert response.status_code == 400 and response.json()["error"]["code"] == "template_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "tokens": []}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1, 10_000]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
    ],
)
def test_tokenize_refuses(client: httpx.Client, path: str, body: dict[str, object], param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_state(client: httpx.Client) -> None:
    for path in ("/health", "/ping", "/ready"):
        assert client.get(path).json() == {"status": "ok"}
    assert client.get("/version").json() == {"version": version("quire-serving")}


def test_metrics_page_parses_and_sums_processes(pipeline: Pipeline, client: httpx.Client) -> None:
    pipeline.scheduler.snapshots = [{"vllm:num_preemptions": ["counter", "Preemptions.", [], [[[], 3.0]]]}] * 2
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    [sample] = families["vllm:num_preemptions"].samples
    assert sample.value == 6 and sample.labels == {"model_name": "toy", "engine": "0"}
    bounds = [
        sample.labels["le"]
        for sample in families["vllm:time_to_first_token_seconds"].samples
        if sample.name.endswith("_bucket")
    ]
    assert bounds[:3] == ["0.001", "0.005", "0.01"] and bounds[-2:] == ["2560.0", "+Inf"]


def test_request_ids(client: httpx.Client) -> None:
    assert client.get("/health", headers={"X-Request-Id": "my-id_1"}).headers["x-request-id"] == "my-id_1"
    for odd in ("", "a b", "x" * 129, "é"):
        given = client.get("/health", headers={b"X-Request-Id": odd.encode()}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", given)
    assert client.get("/nothing", headers={"X-Request-Id": "e"}).headers["x-request-id"] == "e"


def test_cors_allows_everybody_by_default_and_on_errors(client: httpx.Client) -> None:
    origin = {"Origin": "https://page.example"}
    preflight = client.options(
        "/v1/chat/completions",
        headers={
            **origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == "*"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for response in (
        client.post("/v1/chat/completions", content=b"{", headers=origin),
        client.get("/nothing", headers=origin),
        client.get("/v1/models", headers=origin),
    ):
        assert response.headers["access-control-allow-origin"] == "*"
        assert "X-Request-Id" in response.headers["access-control-expose-headers"]


def test_cors_of_named_origins(locked: httpx.Client) -> None:
    good = locked.get("/v1/models", headers={"Origin": "https://good.example"})
    assert good.status_code == 401 and good.headers["access-control-allow-origin"] == "https://good.example"
    bad = locked.get("/v1/models", headers={"Origin": "https://bad.example"})
    assert "access-control-allow-origin" not in bad.headers
    asked = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    assert locked.options("/v1/completions", headers=asked).status_code == 200  # no key in a preflight
    asked["Origin"] = "https://bad.example"
    assert locked.options("/v1/completions", headers=asked).status_code == 400


def test_api_keys(pipeline: Pipeline, locked: httpx.Client) -> None:
    for path in ("/v1/models", "/v1/models/toy", "/nothing"):
        for headers in ({}, bearer("wrong"), bearer("first-key2"), {"Authorization": "Basic first-key"}):
            response = locked.get(path, headers=headers)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert locked.post(path, content=b"{").status_code == 401
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert locked.get(path).status_code == 200
    tenants = []
    for key in KEYS:
        assert locked.get("/v1/models", headers=bearer(key)).status_code == 200
        untrusted = {"X-Tenant": "somebody else"}
        with httpx.Client(base_url=locked.base_url, headers=bearer(key) | untrusted) as client:
            posted = Posted(client, "/v1/completions", {"prompt": "a"})
            answer = pipeline.tokenizer.submitted()
            answer.reject(429, "queue_full", "", "later")
            assert posted.response().status_code == 429
            tenants.append(answer.submit.tenant)
    assert len(set(tenants)) == 2 and all(tenants) and not set(tenants) & set(KEYS)
    assert tenants == [hashlib.sha256(key.encode()).hexdigest()[:16] for key in KEYS]


def test_keys_stay_out_of_the_log_and_ids_get_into_it(guarded: Gateway, locked: httpx.Client) -> None:
    locked.get("/v1/models", headers={**bearer("first-key"), b"X-Request-Id": b"seen-in-log"})
    log = guarded.wait_log(r"GET /v1/models 200 \d+\.\d+s request_id=seen-in-log")
    assert "first-key" not in log


def test_max_body_bytes(locked: httpx.Client) -> None:
    response = locked.post("/v1/completions", json={"prompt": "a" * 2048}, headers=bearer("first-key"))
    assert response.status_code == 413 and "2048 bytes" in response.json()["error"]["message"]


def test_before_anything_is_ready() -> None:
    with running(tokenizers=0) as pipeline:
        pipeline.scheduler.muted = True  # nobody welcomes
        gateway = pipeline.gateway(ready=False)
        gateway.wait_answering("/health", 200)
        with gateway.client() as client:
            ready = client.get("/ready")
            assert ready.status_code == 503 and "scheduler" in ready.json()["reason"]
            for response in (client.post("/v1/chat/completions", json=CHAT), client.post("/tokenize", json={})):
                assert response.status_code == 503 and response.headers["retry-after"] == "1"
            for path in ("/v1/models", "/v1/models/a/toy"):
                assert client.get(path).status_code == 503
            assert "quire:http_responses" in client.get("/metrics").text
            pipeline.scheduler.muted = False
            gateway.wait_log("welcomed by the scheduler")
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["a/toy model"]
            assert client.get("/v1/models/a/toy model").json()["id"] == "a/toy model"
            assert 'model_name="a/toy model"' in client.get("/metrics").text
            assert client.get("/ready").json()["reason"] == "waiting for a tokenizer"
            pipeline.add_tokenizer()
            gateway.wait_answering("/ready", 200)
