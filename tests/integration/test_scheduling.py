"""Policies, limits and groups through the whole pipeline: what a client and an operator see of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.server import NULL, Server, serve

LONG = {"prompt": [5] * 20, "max_tokens": 100, "temperature": 0}  # three seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (
        *("--null-step-ms", "30", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
        *("--scheduling-policy", "fair", "--tenant-weights", "gold=2", "--trust-tenant-header"),
        *("--max-queue-time", "1", "--max-num-queued-tokens", "100000"),
        *("--preemption-mode", "auto", "--swap-space", "64KiB", "--num-gpu-blocks-override", "60"),
    )
    with serve(tmp_path_factory.mktemp("scheduling"), *NULL, *options) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client(timeout=60) as client:
        yield client


def status(client: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = client.get("/internal/status").json()
    return answer


@pytest.fixture
def full(server: Server, client: httpx.Client) -> Iterator[None]:
    """All rows are taken for some seconds."""

    def stream() -> None:
        with (
            server.client(timeout=60) as own,
            own.stream("POST", "/v1/completions", json={**LONG, "n": 4, "stream": True}),
        ):
            while not over:
                time.sleep(0.05)

    over: list[bool] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(stream)
        deadline = time.monotonic() + 20
        while status(client)["running"] < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield
        over.append(True)


@pytest.mark.usefixtures("full")
def test_a_whole_request_that_waits_too_long_is_503(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json=LONG)
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == "queue_timeout"
    assert "max_queue_time is 1 s" in error["message"]


@pytest.mark.usefixtures("full")
def test_a_streamed_request_that_waits_too_long_ends_with_an_error_event(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        assert answer.status_code == 200  # it was accepted
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert error["code"] == "queue_timeout"


@pytest.mark.usefixtures("full")
def test_why_requests_wait_is_in_status_ledger_and_metrics(server: Server, client: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as pool, server.client(timeout=60) as own:
        waiting = pool.submit(own.post, "/v1/completions", json=LONG, headers={"X-Tenant": "gold"})
        deadline = time.monotonic() + 0.9
        while not (found := status(client))["waiting"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert found["waiting_by_reason"] == {"slots": 1}
        assert "gold" in found["tenants"]
        cursor, ledger = 0, dict[str, Any](waiting=[])
        while not ledger["waiting"]:
            ledger = client.get("/internal/blocks", params={"cursor": cursor}).json()
            cursor = ledger["next_cursor"]
        assert [one["waits_for"] for one in ledger["waiting"]] == ["slots"]
        metrics = client.get("/metrics").text
        assert 'quire:num_requests_waiting_by_reason{engine="0",model_name="' in metrics
        line = next(line for line in metrics.splitlines() if 'reason="slots"' in line)
        assert line.endswith(" 1.0")
        assert waiting.result().status_code == 503


def test_a_deadline_ends_a_running_request(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={**LONG, "timeout": 0.3})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "deadline_exceeded"


def test_beams_and_best_of_answer_n_choices(client: httpx.Client) -> None:
    body = {"prompt": [7] * 20, "max_tokens": 6, "n": 2, "return_token_ids": True}
    beams = client.post("/v1/completions", json={**body, "use_beam_search": True, "length_penalty": 0.5}).json()
    assert [choice["index"] for choice in beams["choices"]] == [0, 1]
    assert beams["choices"][0]["token_ids"] != beams["choices"][1]["token_ids"]
    best = client.post("/v1/completions", json={**body, "best_of": 4, "seed": 3, "temperature": 1.0}).json()
    four = client.post("/v1/completions", json={**body, "n": 4, "seed": 3, "temperature": 1.0}).json()
    among = [choice["token_ids"] for choice in four["choices"]]
    assert len(best["choices"]) == 2
    assert all(choice["token_ids"] in among for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in best["choices"])


def test_a_priority_without_effect_is_400(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={**LONG, "priority": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"


def test_a_tenant_name_is_short_and_visible(client: httpx.Client) -> None:
    for name in ("a b", "x" * 129):
        answer = client.post("/v1/completions", json=LONG, headers={"X-Tenant": name})
        assert answer.status_code == 400
        assert "X-Tenant" in answer.json()["error"]["message"]


def test_preemption_is_shown_with_what_it_cost(server: Server, client: httpx.Client) -> None:
    bodies = [{"prompt": [rid] * 200, "max_tokens": 60, "temperature": 0} for rid in range(10, 14)]

    def complete(body: dict[str, Any]) -> list[int]:
        with server.client(timeout=60) as own:
            answer = own.post("/v1/completions", json={**body, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    with ThreadPoolExecutor(4) as pool:  # 4 x 17 blocks in a pool of 59
        together = list(pool.map(complete, bodies))
    assert together == [complete(body) for body in bodies]
    shown = status(client)["preemption"]
    assert shown["mode"] == "auto"
    assert sum(shown["counts"].values()) == len(shown["recent"]) > 0
    assert all(decision["measured"] > 0 for decision in shown["recent"])
    assert status(client)["host_blocks_used"] == 0
