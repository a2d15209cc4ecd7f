"""Streamed against whole answers of a real server, for every way to end; its toy model says anything, in any bytes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.server import NULL, Server, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--max-model-len", "1024", "--override-generation-config", json.dumps(DEFAULTS))
    with serve(tmp_path_factory.mktemp("streams"), *NULL, *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def whole(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The events of a stream, joined to what a whole answer says; the contract of their order is checked on the way."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=body) as response:
        raw = response.read()
        assert response.status_code == 200, raw
    assert raw.endswith(b"\n\n")
    *events, last = raw.decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]" and all(event.startswith("data: {") for event in events)
    *chunks, usage = [json.loads(event.removeprefix("data: ")) for event in events]
    assert usage["choices"] == []  # llama.cpp's and ollama's clients index into it (ATOM 1711, ollama PR 6784)
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert chunk["usage"] is None and len(chunk["choices"]) == 1
        choice = chunk["choices"][0]
        empty: dict[str, Any] = {"text": "", "calls": {}, "token_ids": [], "logprobs": [], "finish_reason": None}
        into = joined.setdefault(choice["index"], empty)
        assert into["finish_reason"] is None, "something came after a finish_reason"
        into["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for call in choice.get("delta", {}).get("tool_calls", ()):
            name, arguments = into["calls"].get(call["index"], ("", ""))
            function = call["function"]
            into["calls"][call["index"]] = (name + function.get("name", ""), arguments + function["arguments"])
        into["token_ids"] += choice.get("token_ids", [])
        into["logprobs"] += tokens_told(choice["logprobs"])
        into["finish_reason"], into["stop_reason"] = choice["finish_reason"], choice.get("stop_reason")
    # vLLM 27572: now and then a stream ended without a reason.
    assert all(one["finish_reason"] is not None for one in joined.values())
    return {"object": chunks[0]["object"], "choices": joined, "usage": usage["usage"]}


def tokens_told(logprobs: Any) -> list[tuple[str, float]]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [(one["token"], one["logprob"]) for one in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def shown(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """A whole answer's choices as ``streamed`` has them."""
    return {
        choice["index"]: {
            "text": (choice["message"]["content"] or "") if "message" in choice else choice["text"],
            "calls": {
                index: (call["function"]["name"], call["function"]["arguments"])
                for index, call in enumerate(choice.get("message", {}).get("tool_calls", ()))
            },
            "token_ids": choice["token_ids"],
            "logprobs": tokens_told(choice["logprobs"]),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in answer["choices"]
    }


def compare(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """A request whole and streamed, which must say the same. Returns its choices."""
    body = {**body, "return_token_ids": True}
    one, other = whole(client, path, body), streamed(client, path, body)
    assert other["choices"] == shown(one)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [one["usage"][name] for name in counts] == [other["usage"][name] for name in counts]
    return shown(one)


CHAT = {"messages": [{"role": "user", "content": "안녕 😀"}]}
TEXT = {"prompt": "The capital of France"}
DEFAULTS = {"temperature": 0, "max_new_tokens": 7}


@pytest.mark.parametrize(("path", "prompt"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_streamed_is_whole_for_every_end(client: httpx.Client, path: str, prompt: dict[str, Any]) -> None:
    base = {**prompt, "max_tokens": 40, "temperature": 0}
    plain = compare(client, path, base)[0]
    assert (plain["finish_reason"], plain["stop_reason"], len(plain["token_ids"])) == ("length", None, 40)
    text, ids = plain["text"], plain["token_ids"]
    words = [word for word in text.split(" ") if len(word) > 2 and word.isascii()]
    for stop in (words[5], words[7][1:] + " " + words[8][:2] if words[7] + " " + words[8] in text else words[8]):
        for include in (False, True):
            found = compare(client, path, {**base, "stop": [stop, "never said"], "include_stop_str_in_output": include})
            assert (found[0]["finish_reason"], found[0]["stop_reason"]) == ("stop", stop)
            end = text.index(stop) + (len(stop) if include else 0)
            assert found[0]["text"] == text[:end]
    by_id = compare(client, path, {**base, "stop_token_ids": [ids[9]]})[0]
    assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", ids[9])
    assert by_id["token_ids"] == ids[: ids.index(ids[9]) + 1] and text.startswith(by_id["text"])
    told = {"logprobs": 2} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 2}
    assert len(compare(client, path, {**base, **told})[0]["logprobs"]) == 40
    assert compare(client, path, {**base, "skip_special_tokens": False})[0]["token_ids"] == ids


FLAG = {"type": "object", "properties": {"flag": {"enum": ["x", "안녕 😀"]}}, "required": ["flag"]}
GRAMMARS: list[dict[str, Any]] = [
    {"choice": ["red", "deep blue", "世界"]},
    {"regex": "[0-9]{3}-[a-f]{2}é"},
    {"json": {**FLAG, "additionalProperties": False}},
]


@pytest.mark.parametrize(("path", "prompt"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_streamed_is_whole_where_a_grammar_ends_it(client: httpx.Client, path: str, prompt: dict[str, Any]) -> None:
    found = []
    for grammar in GRAMMARS:
        body = {**prompt, "max_tokens": 300, "temperature": 0, "structured_outputs": grammar}
        (choice,) = compare(client, path, body).values()
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        found.append(choice["text"])
        cut = compare(client, path, {**body, "max_tokens": 2})[0]  # in the middle of it
        assert found[-1].startswith(cut["text"].rstrip("\N{REPLACEMENT CHARACTER}"))
    chosen, matched, record = found
    assert chosen in GRAMMARS[0]["choice"] and re.fullmatch(GRAMMARS[1]["regex"], matched)
    assert json.loads(record)["flag"] in FLAG["properties"]["flag"]["enum"]


@pytest.mark.parametrize("wish", ["required", {"type": "function", "function": {"name": "paint"}}])
def test_streamed_is_whole_for_a_tool_call(client: httpx.Client, wish: Any) -> None:
    tool = {"type": "function", "function": {"name": "paint", "parameters": {**FLAG, "additionalProperties": False}}}
    body = {**CHAT, "tools": [tool], "tool_choice": wish, "parallel_tool_calls": False}
    (choice,) = compare(client, "/v1/chat/completions", {**body, "max_tokens": 300, "temperature": 0}).values()
    ((name, arguments),) = choice["calls"].values()
    assert name == "paint" and json.loads(arguments)["flag"] in FLAG["properties"]["flag"]["enum"]
    assert choice["finish_reason"] == ("tool_calls" if wish == "required" else "stop") and choice["text"] == ""


def test_streamed_is_whole_for_many_seeds(server: Server) -> None:
    """EOS at any place, several answers each, broken characters in any of them, 24 requests at a time."""

    def one(seed: int) -> dict[int, dict[str, Any]]:
        with server.client() as client:
            return compare(
                client, "/v1/completions", {**TEXT, "max_tokens": 30, "temperature": 1.5, "seed": seed, "n": 3}
            )

    with ThreadPoolExecutor(24) as pool:
        found = [choice for answer in pool.map(one, range(0, 240, 3)) for choice in answer.values()]
    reasons = [choice["finish_reason"] for choice in found]
    assert len(reasons) == 240 and 20 < reasons.count("stop") < 220
    assert {choice["stop_reason"] for choice in found} == {None}
    assert sum("\N{REPLACEMENT CHARACTER}" in choice["text"] for choice in found) < 200
    assert sum(not choice["text"].isascii() for choice in found) > 10


def test_seeds_wrap(client: httpx.Client) -> None:
    """The greatest seed with several answers: the second has the seed after it, which is 0."""
    body = {**TEXT, "max_tokens": 8, "temperature": 1.0, "return_token_ids": True}
    last, first = (whole(client, "/v1/completions", {**body, "seed": seed}) for seed in (2**63 - 1, 0))
    both = whole(client, "/v1/completions", {**body, "seed": 2**63 - 1, "n": 2})
    ids = [choice["token_ids"] for choice in both["choices"]]
    assert ids == [last["choices"][0]["token_ids"], first["choices"][0]["token_ids"]] and ids[0] != ids[1]


def test_a_cancelled_stream_is_a_beginning_of_the_whole(server: Server) -> None:
    body = {**TEXT, "max_tokens": 900, "temperature": 0}
    with server.client() as client:
        text = whole(client, "/v1/completions", body)["choices"][0]["text"]
        pieces = []
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if len(pieces) == 5:
                    break
        server.wait_for_metric("vllm:num_requests_running", 0, 5)
    assert "".join(pieces) and text.startswith("".join(pieces))


def test_the_models_defaults_reach_every_request(client: httpx.Client) -> None:
    """Greedy, and seven tokens of a chat, unless the request says otherwise; never more than there is room for."""
    path = "/v1/chat/completions"
    first, again = (compare(client, path, CHAT)[0] for _ in range(2))
    assert first == again and (len(first["token_ids"]), first["finish_reason"]) == (7, "length")
    longer = compare(client, path, {**CHAT, "max_tokens": 9})[0]
    assert longer["token_ids"][:7] == first["token_ids"] and len(longer["token_ids"]) == 9
    assert compare(client, path, {**CHAT, "temperature": 1.0, "seed": 3})[0]["token_ids"] != first["token_ids"]
    assert len(compare(client, "/v1/completions", TEXT)[0]["token_ids"]) == 16  # this endpoint's own default
    words = client.post("/tokenize", json=CHAT).json()["count"]
    full = [{"role": "user", "content": CHAT["messages"][0]["content"] + " a" * (1020 - words)}]
    assert len(compare(client, path, {"messages": full})[0]["token_ids"]) == 4


def test_what_is_taken_is_done(client: httpx.Client) -> None:
    """mini-sglang: other object names, "stop" at max_tokens, stop and n taken without effect, lines that end once."""
    chat, text = ({**body, "max_tokens": 4, "temperature": 0} for body in (CHAT, TEXT))
    assert whole(client, "/v1/chat/completions", chat)["object"] == "chat.completion"
    assert whole(client, "/v1/completions", text)["object"] == "text_completion"
    assert streamed(client, "/v1/chat/completions", chat)["object"] == "chat.completion.chunk"
    assert streamed(client, "/v1/completions", text)["object"] == "text_completion"
    answer = whole(client, "/v1/completions", {**text, "n": 3, "temperature": 1.0, "seed": 1})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    refused = client.post("/v1/completions", json={**text, "frobnicate": True})
    assert refused.status_code == 400 and "frobnicate" in refused.json()["error"]["message"]


def test_usage_comes_only_when_asked(client: httpx.Client) -> None:
    """apfel 100: a chunk without choices came although nobody had asked for usage."""
    with client.stream("POST", "/v1/completions", json={**TEXT, "max_tokens": 3, "stream": True}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert all(len(json.loads(event)["choices"]) == 1 and "usage" not in json.loads(event) for event in events[:-1])


def test_stop_strings_hold_for_prompts_of_ids(client: httpx.Client) -> None:
    """vLLM 57052: where a prompt was token ids, stop strings were ignored without a word."""
    body = {"prompt": [504, 3575, 282, 4649], "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    text = whole(client, "/v1/completions", body)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:6]
    found = compare(client, "/v1/completions", {**body, "stop": stop})[0]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == (text[: text.index(stop)], "stop", stop)


def test_streams_that_wait_are_kept_alive(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Comments come while a queue or a slow model keeps a client waiting, and nothing else changes."""
    options = ("--null-step-ms", "300", "--sse-keep-alive-interval", "0.1", "--max-num-seqs", "1")
    with serve(tmp_path_factory.mktemp("slow"), *NULL, *options) as server, server.client() as client:
        body = {**TEXT, "max_tokens": 3, "temperature": 0, "stream": True}
        raws: list[str] = []

        def run() -> None:
            raws.append(client.post("/v1/completions", json=body).text)

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for raw in raws:
        events = raw.removesuffix("\n\n").split("\n\n")
        data = [event for event in events if event != ": keep-alive"]
        assert len(events) - len(data) >= 2 and data[-1] == "data: [DONE]"
        assert all(event.startswith("data: ") for event in data)
    assert max(raw.count(": keep-alive") for raw in raws) >= 6  # the second waited for the first, without a token
