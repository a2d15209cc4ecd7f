"""The whole pipeline with the null worker: real processes, wires and tokenizer, a toy model that checks itself."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.server import NULL, Server, free_port, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    argv = (*NULL, "--null-step-ms", "2", "--gateways", "2", "--tokenizers", "2", "--num-gpu-blocks-override", "2000")
    with serve(tmp_path_factory.mktemp("pipeline"), *argv) as server:
        yield server


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of one stream, checked for how it starts and ends."""
    last = ""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                last = line[6:]
                if last != "[DONE]":
                    yield json.loads(last)
    assert last == "[DONE]"


def nothing_is_referenced(server: Server) -> None:
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        server.wait_for_metric(name, 0.0, timeout=5)


def test_a_stream_equals_the_whole_answer(server: Server) -> None:
    async def both() -> tuple[str, str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
            body = {"model": server.model, "prompt": "One, two", "max_tokens": 50, "temperature": 0, "ignore_eos": True}
            whole = (await client.post("/v1/completions", json=body)).json()
            streamed = [e["choices"][0] async for e in events(client, "/v1/completions", body)]
            assert [c["finish_reason"] for c in streamed if c["finish_reason"]] == ["length"]
            assert whole["usage"]["completion_tokens"] == 50
            return whole["choices"][0]["text"], "".join(c["text"] for c in streamed)

    whole, joined = asyncio.run(both())
    assert whole == joined
    nothing_is_referenced(server)


def test_two_hundred_streams_of_mixed_lengths_use_every_process(server: Server) -> None:
    rng = random.Random(7)
    wanted = [rng.randint(1, 60) for _ in range(200)]

    async def one(client: httpx.AsyncClient, index: int) -> int:
        prompt = " ".join(["word"] * rng.randint(1, 200))
        body = {"model": server.model, "prompt": prompt, "max_tokens": wanted[index], "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        usage = [e["usage"] async for e in events(client, "/v1/completions", body) if e["usage"]]
        assert len(usage) == 1
        return int(usage[0]["completion_tokens"])

    async def run() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits, trust_env=False) as client:
            return await asyncio.gather(*(one(client, index) for index in range(200)))

    before = work_by_process(server)
    assert asyncio.run(run()) == wanted
    time.sleep(1.5)  # the other processes' numbers come with their heartbeats
    after = work_by_process(server)
    assert sorted(after) == ["gateway:0", "gateway:1", "tokenizer:0", "tokenizer:1"]
    assert all(after[process] > before[process] for process in after), (before, after)
    nothing_is_referenced(server)


def work_by_process(server: Server) -> Counter[str]:
    """Requests given so far to each gateway and tokenizer, by ``role:index``, from the metric that tells them apart."""
    found: Counter[str] = Counter()
    for key, value in server.metrics().items():
        if key.startswith("quire:requests_total{"):
            role, index, _ = key.split('process="')[1].split('"')[0].split(":")
            found[f"{role}:{index}"] += int(value)
    return found


def test_events_arrive_one_by_one(server: Server) -> None:
    """Steps take 2 ms, so 100 tokens come over 0.2 s at least; a lump would come in one piece at the end."""

    async def run() -> list[float]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
            body = {"model": server.model, "prompt": "A", "max_tokens": 100, "ignore_eos": True}
            return [time.monotonic() async for e in events(client, "/v1/completions", body)]

    times = asyncio.run(run())
    assert len(times) > 50
    assert times[len(times) // 2] - times[0] > 0.05


def test_a_killed_client_gives_its_blocks_back(server: Server) -> None:
    """vLLM 10087, SGLang 20623: middleware hid that the client had gone. Here all of ours is on."""
    body = json.dumps(
        {"model": server.model, "prompt": "x" * 2000, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    )
    argv = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "content-type: application/json", "-d", body]
    client = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline().startswith(b"data: ")
    assert server.metric("vllm:kv_cache_usage_perc") > 0
    client.kill()
    client.wait()
    client.stdout.close()
    server.wait_for_metric("vllm:num_requests_running", 0.0, timeout=1)
    nothing_is_referenced(server)


def test_a_client_that_hangs_up_before_its_whole_answer_is_cancelled(server: Server) -> None:
    """ATOM 1562, litellm 37140: an answer that was not streamed was computed to its end, for nobody."""
    body = {"model": server.model, "prompt": "x", "max_tokens": 2000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout), server.client(timeout=0.5) as client:
        client.post("/v1/completions", json=body)
    server.wait_for_metric("vllm:num_requests_running", 0.0, timeout=1)
    nothing_is_referenced(server)


def test_a_thousand_aborts_leave_the_pool_as_it_was(server: Server) -> None:
    """LMDeploy 1788, 1619, Rapid-MLX 1759: after hundreds of aborted streams the engine stalled, and never counted them
    out."""
    rng = random.Random(11)

    async def one(places: asyncio.Semaphore) -> None:
        prompt = "y " * rng.randint(1, 300)
        body = json.dumps({"prompt": prompt, "max_tokens": 1000, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: quire\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        async with places:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head + body)
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.random() * 0.15):
                    await reader.read()
            writer.close()

    async def run() -> None:
        places = asyncio.Semaphore(30)
        await asyncio.gather(*(one(places) for _ in range(1000)))

    def ended(reason: str) -> float:
        return sum(value for key, value in server.metrics().items() if f'finished_reason="{reason}"' in key)

    before = ended("abort")
    asyncio.run(run())
    nothing_is_referenced(server)
    assert ended("abort") - before > 500


def test_processes_started_by_hand_get_work(server: Server) -> None:
    """A third tokenizer and a third gateway join while a stream runs; new work reaches both, the stream goes on."""
    port = free_port()

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
            long = {"model": server.model, "prompt": "L", "max_tokens": 1500, "ignore_eos": True}
            stream = events(client, "/v1/completions", long)
            received = [await anext(stream)]
            server.join("tokenizer", "--index", "7")
            server.join("gateway", "--index", "8", "--port", str(port))
            short = {"model": server.model, "prompt": "S", "max_tokens": 2}
            async with asyncio.timeout(30):
                while not ((work := work_by_process(server))["tokenizer:7"] and work["gateway:8"]):
                    for url in (server.url, f"http://127.0.0.1:{port}"):
                        try:
                            await client.post(f"{url}/v1/completions", json=short)
                        except httpx.ConnectError:
                            await asyncio.sleep(0.1)
            received += [event async for event in stream]
            assert received[-1]["choices"][0]["finish_reason"] == "length"

    asyncio.run(run())
    nothing_is_referenced(server)


def test_memory_does_not_grow_with_requests(server: Server) -> None:
    """Maps are emptied: after a warm-up, 300 more requests leave the processes within a few MB of where they were.

    SGLang 6914, LMDeploy 1334: memory grew with every request.
    """

    def burst(count: int) -> None:
        async def run() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
                body = {"model": server.model, "prompt": "z " * 100, "max_tokens": 5}
                await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(count)))

        asyncio.run(run())

    def resident() -> int:
        return sum(process.memory_info().rss for process in server.children() if process.is_running())

    burst(300)
    before = resident()
    burst(300)
    assert resident() - before < 20e6


def test_the_processes_are_visible_by_name(server: Server) -> None:
    words = [" ".join(process.cmdline()) for process in psutil.Process(server.process.pid).children()]
    assert Counter(line.split("quire ", 1)[1].split()[0] for line in words) == {
        "scheduler": 1,
        "worker": 1,
        "tokenizer": 2,
        "gateway": 2,
    }


def test_a_pool_under_pressure_finishes_all(tmp_path: Path) -> None:
    """40 blocks, 30 requests that want 5 to 8 each: preemption must let every one of them finish.

    OpenVINO model server 4428: a client that left while memory was full took all others with it. Here six leave.
    """
    with serve(tmp_path, *NULL, "--num-gpu-blocks-override", "41", "--max-model-len", "256") as server:

        async def one(client: httpx.AsyncClient, index: int) -> str:
            body = {"model": server.model, "prompt": f"{index} " * 20, "max_tokens": 60, "temperature": 0}
            answer = (await client.post("/v1/completions", json={**body, "ignore_eos": True})).json()
            assert answer["usage"]["completion_tokens"] == 60
            return str(answer["choices"][0]["text"])

        async def leave(client: httpx.AsyncClient, index: int) -> None:
            body = {"model": server.model, "prompt": f"{index} " * 20, "max_tokens": 180, "ignore_eos": True}
            with suppress(httpx.ReadTimeout):
                await client.post("/v1/completions", json=body, timeout=0.05 + 0.05 * index)

        async def run(together: bool) -> list[str]:
            async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:
                if together:
                    leaving = asyncio.gather(*(leave(client, index) for index in range(6)))
                    answers = await asyncio.gather(*(one(client, index) for index in range(30)))
                    await leaving
                    return answers
                return [await one(client, index) for index in range(30)]

        crowded = asyncio.run(run(together=True))
        assert server.metric("vllm:num_preemptions_total") > 0
        assert crowded == asyncio.run(run(together=False))
        nothing_is_referenced(server)
