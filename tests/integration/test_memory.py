"""Shared memory through the whole pipeline: parallel samples, cached tokens in usage and metrics, ledger, explain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.server import NULL, Server, serve

USER, ADMIN = {"Authorization": "Bearer user-key"}, {"Authorization": "Bearer admin-key"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = {"QUIRE_API_KEY": "user-key", "QUIRE_ADMIN_API_KEY": "admin-key"}
    with serve(tmp_path_factory.mktemp("memory"), *NULL, "--num-gpu-blocks-override", "300", env=keys) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def complete(client: httpx.Client, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "return_token_ids": True, **more}
    response = client.post("/v1/completions", json=body, headers=USER)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chunks(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}, headers=USER) as response:
        assert response.status_code == 200
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_n_samples_equal_n_requests_with_seeds_in_order(client: httpx.Client) -> None:
    """vLLM 51226: n with a seed is seeds s, s+1, ...; prompt tokens are counted once."""
    prompt = list(range(100, 121))
    answer = complete(client, prompt, n=4, seed=50, temperature=1.0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 21 and answer["usage"]["completion_tokens"] == 80
    alone = [complete(client, prompt, seed=50 + i, temperature=1.0)["choices"][0]["token_ids"] for i in range(4)]
    assert [choice["token_ids"] for choice in answer["choices"]] == alone
    assert len({tuple(ids) for ids in alone}) == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_n_streams_join_to_the_whole_answers_with_one_finish_reason_each(client: httpx.Client, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "Once upon a time"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "Once upon a time"}]}
    body = {**prompt, "n": 3, "seed": 7, "max_tokens": 12, "temperature": 1.0}
    whole = client.post(path, json=body, headers=USER).json()["choices"]
    texts, reasons = ["", "", ""], [[], [], []]  # type: tuple[list[str], list[list[str]]]
    for event in chunks(client, path, body):
        (choice,) = event["choices"]
        texts[choice["index"]] += (choice["delta"].get("content") or "") if "chat" in path else choice["text"]
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == [choice["message"]["content"] if "chat" in path else choice["text"] for choice in whole]
    assert reasons == [["length"]] * 3


def test_more_samples_than_the_server_runs_are_refused(client: httpx.Client, server: Server) -> None:
    response = client.post("/v1/completions", json={"prompt": "a", "n": 129}, headers=USER)
    assert response.status_code == 400 and "128" in response.text


def test_usage_and_metrics_say_what_was_cached(client: httpx.Client, server: Server) -> None:
    prompt = [3000 + i for i in range(50)]
    before = server.metric("vllm:prefix_cache_hits_total")
    first, second = complete(client, prompt), complete(client, prompt)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 49  # 48 in whole blocks, one inside the next
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert server.metric("vllm:prefix_cache_hits_total") - before == 49
    assert server.metric("vllm:kv_cache_usage_perc") == 0.0, "cached blocks are not in use"


def test_a_cache_salt_keeps_prompts_apart(client: httpx.Client) -> None:
    """The same salt hits, another one misses: timing tells nothing of another's prompt (CVE-2025-46570)."""
    prompt = [4000 + i for i in range(50)]
    cached = [
        complete(client, prompt, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("one", "one", "two", "two")
    ]
    assert cached == [0, 49, 0, 49]


def test_the_ledger_tells_every_block_once(client: httpx.Client) -> None:
    complete(client, [5000 + i for i in range(40)])
    rows, cursor, pages = [], 0, 0
    while cursor is not None:
        page = client.get("/internal/blocks", params={"cursor": cursor}, headers=ADMIN).json()
        rows += page["blocks"]
        cursor, pages = page["next_cursor"], pages + 1
    assert [row["block"] for row in rows] == list(range(1, 300))
    assert pages == 5  # of 64 blocks
    states = {state: sum(row["state"] == state for row in rows) for state in ("free", "used", "cached")}
    assert states == {"free": page["free"], "used": page["used"], "cached": page["cached"]}
    assert states["cached"] >= 3
    assert all(row["key"] for row in rows if row["state"] == "cached")


def test_explain_says_what_is_cached_and_where_it_first_differs(client: httpx.Client) -> None:
    prompt = [6000 + i for i in range(50)]
    complete(client, prompt)

    def explain(**body: Any) -> dict[str, Any]:
        response = client.post("/internal/explain", json=body, headers=ADMIN)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    same = explain(tokens=prompt)
    assert (same["cached_tokens"], len(same["cached_blocks"]), same["miss"]) == (49, 3, None)
    other = explain(tokens=[*prompt[:20], 9, *prompt[21:]])
    assert (other["cached_tokens"], len(other["cached_blocks"])) == (20, 1)
    assert other["miss"] == {"why": "first different token", "position": 20, "token": 9, "cached_token": 6020}
    salted = explain(tokens=prompt, cache_salt="x")
    assert salted["miss"] == {"why": "salt", "position": 0, "blocks_under_another_salt": 3}
    words = explain(messages=[{"role": "user", "content": "never said before, not even once"}])
    assert words["prompt_tokens"] > 8


@pytest.mark.parametrize("path", ["/internal/blocks", "/internal/explain"])
def test_only_the_admin_key_opens_the_books(client: httpx.Client, path: str) -> None:
    for headers in ({}, USER, {"Authorization": "Bearer wrong"}):
        response = client.request("GET" if "blocks" in path else "POST", path, json={"tokens": [1]}, headers=headers)
        assert response.status_code == 401, headers
    assert client.get("/v1/models", headers=ADMIN).status_code == 401  # and it opens nothing else
    bad = client.get("/internal/blocks", params={"cursor": "-1"}, headers=ADMIN)
    assert bad.status_code == 400
    bad = client.post("/internal/explain", json={"tokens": [1], "prompt": "a"}, headers=ADMIN)
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "tokens"
