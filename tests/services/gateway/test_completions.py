"""Answers, whole and streamed: shapes, order of events, usage, fields on the wire."""

from __future__ import annotations

import queue
import re
import socket
from typing import Any

import httpx
import openai
import pytest

from shared.channels import CONTENT
from shared.codec import int32
from shared.wire import Ack, Done, Finished, Resume, Text
from tests.services.gateway.background import CHAT, Posted, Streamed
from tests.services.gateway.pipeline import VOCAB_SIZE, Gateway, Pipeline


def finish_reasons(events: list[Any]) -> list[str]:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def test_whole_chat_answer(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/v1/chat/completions", {**CHAT, "model": "alias/toy"})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("Héllo")
    answer.text(" 世界", tokens=2)
    answer.finish(cached=4)
    response = posted.response()
    body = response.json()
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", body.pop("id")) and body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": "alias/toy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Héllo 世界", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
        "system_fingerprint": None,
    }
    assert answer.rid in pipeline.tokenizer.expect(Ack).rids


def test_headers_wait_for_accept_and_events_come_one_by_one(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, "/v1/chat/completions", CHAT)
    answer = pipeline.tokenizer.submitted()
    with pytest.raises(queue.Empty):  # no headers yet
        streamed.opened(timeout=0.3)
    answer.accept()
    response = streamed.opened()
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    first = streamed.next()
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    for word in ("one", " two"):
        answer.text(word)
        event = streamed.next()
        assert event["id"] == first["id"]
        assert event["choices"][0]["delta"] == {"content": word} and event["choices"][0]["finish_reason"] is None
    answer.finish("length")
    events = streamed.rest()
    assert finish_reasons(events) == ["length"] and events[-1] == "[DONE]" and events.count("[DONE]") == 1
    assert all("usage" not in event for event in [first, *events[:-1]])  # it was not asked for


def test_every_accepted_field_counts_and_objects_have_their_own_names(pipeline: Pipeline, client: httpx.Client) -> None:
    """``stop`` and ``n`` are passed on, an end is what it was, and no endpoint answers under another's name
    (mini-sglang: ``text_completion.chunk`` everywhere, ``stop`` at max_tokens, ``n`` ignored, one line end).
    """
    for path, body, name in (
        ("/v1/chat/completions", CHAT, "chat.completion.chunk"),
        ("/v1/completions", {"prompt": "a"}, "text_completion"),
    ):
        streamed = Streamed(client, path, {**body, "stop": "END", "n": 2, "max_tokens": 1})
        answer = pipeline.tokenizer.submitted()
        assert (answer.submit.stop, answer.submit.sampling.n, answer.submit.sampling.max_tokens) == (["END"], 2, 1)
        answer.accept()
        finished = [Finished(answer.rid, seq, 1, "length") for seq in (0, 1)]
        texts = ([answer.rid] * 2, [0, 1], [0, 0], [CONTENT] * 2, ["x", "y"], [1, 1], [0, 0], int32([]))
        answer.send(Text(*texts, finished, [Done(answer.rid, 5, 0, 2)]))
        streamed.opened()
        *chunks, done = streamed.rest()  # which also sees that every event ends with an empty line
        assert done == "[DONE]" and {chunk["object"] for chunk in chunks} == {name}
        assert finish_reasons(chunks) == ["length", "length"]
        assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}


def test_texts_that_wait_together_are_an_event_each(pipeline: Pipeline, client: httpx.Client) -> None:
    """A gateway that was late does not merge what a client that reads could have had one by one."""
    streamed = Streamed(client, "/v1/chat/completions", CHAT)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    streamed.opened()
    streamed.next()
    words = [f" {number}" for number in range(300)]
    for word in words:
        answer.text(word)
    answer.finish("length")
    choices = [event["choices"][0] for event in streamed.rest()[:-1]]
    assert [one["delta"].get("content") for one in choices] == [*words, None]
    assert choices[-1]["finish_reason"] == "length"


def test_usage_chunk_only_when_asked(pipeline: Pipeline, client: httpx.Client) -> None:
    """It has `"choices": []`, and all other chunks `"usage": null` (ATOM 1711, ollama PR 6784)."""
    streamed = Streamed(client, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("x")
    answer.finish("stop")
    streamed.opened()
    *chunks, usage, done = streamed.rest()
    assert done == "[DONE]" and finish_reasons(chunks) == ["stop"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert usage["choices"] == [] and usage["object"] == "chat.completion.chunk"
    assert usage["usage"]["prompt_tokens"] == 5 and usage["usage"]["completion_tokens"] == 1


def test_completion_of_several_prompts(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3})
    answers = sorted((pipeline.tokenizer.submitted() for _ in range(2)), key=lambda one: one.submit.prompt or "")
    assert answers[0].rid != answers[1].rid and answers[0].rid >> 48 == 7
    for answer in answers:
        answer.accept()
    answers[1].text("B!")  # the second one ends first
    answers[1].finish("stop")
    answers[0].text("A!")
    answers[0].finish("length")
    body = posted.response().json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-") and body["model"] == "toy"
    shown = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]]
    assert shown == [(0, "A!", "length"), (1, "B!", "stop")]
    assert body["usage"]["total_tokens"] == 12


def test_streamed_completion_of_several_prompts(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, "/v1/completions", {"prompt": [[1, 2], [3]]})
    answers = sorted((pipeline.tokenizer.submitted() for _ in range(2)), key=lambda one: len(one.submit.prompt_ids))
    assert [answer.submit.prompt_ids.tolist() for answer in answers] == [[3], [1, 2]]
    for answer in answers:
        answer.accept()
    streamed.opened()
    answers[0].text("second")
    event = streamed.next()
    assert event["object"] == "text_completion" and event["choices"][0]["index"] == 1
    assert event["choices"][0]["text"] == "second"
    for answer in answers:
        answer.finish("stop")
    events = streamed.rest()
    assert finish_reasons(events) == ["stop", "stop"] and events[-1] == "[DONE]"


def test_token_ids_are_returned(pipeline: Pipeline, client: httpx.Client) -> None:
    body = {"prompt": [1, 2, 3], "return_token_ids": True}
    posted = Posted(client, "/v1/completions", body)
    answer = pipeline.tokenizer.submitted()
    assert answer.submit.return_token_ids
    answer.accept(3, [1, 2, 3])
    answer.text("ab", tokens=2, ids=[10, 11])
    answer.text("", tokens=1, ids=[2])
    answer.finish("stop")
    choice = posted.response().json()["choices"][0]
    assert choice["token_ids"] == [10, 11, 2] and choice["prompt_token_ids"] == [1, 2, 3] and choice["text"] == "ab"

    streamed = Streamed(client, "/v1/completions", body)
    answer = pipeline.tokenizer.submitted()
    answer.accept(3, [1, 2, 3])
    streamed.opened()
    assert streamed.next()["choices"][0]["prompt_token_ids"] == [1, 2, 3]
    answer.text("", tokens=1, ids=[10])
    assert streamed.next()["choices"][0] | {"text": ""} == streamed_choice(token_ids=[10])
    answer.text("ab", tokens=1, ids=[11])
    assert streamed.next()["choices"][0] == streamed_choice(text="ab", token_ids=[11])
    answer.finish("stop")
    assert streamed.rest()[-1] == "[DONE]"


def streamed_choice(**fields: Any) -> dict[str, Any]:
    empty = {"index": 0, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None, "token_ids": []}
    return {**empty, **fields}


def test_stop_reason_is_the_string_or_the_token_id(pipeline: Pipeline, client: httpx.Client) -> None:
    for given, expected in (("42", "42"), ("17", 17), ("", None)):
        posted = Posted(client, "/v1/completions", {"prompt": "a", "stop": "42", "stop_token_ids": [17]})
        answer = pipeline.tokenizer.submitted()
        answer.accept()
        answer.finish("stop", stop_reason=given)
        assert posted.response().json()["choices"][0]["stop_reason"] == expected


def test_every_field_reaches_the_tokenizer(pipeline: Pipeline, client: httpx.Client) -> None:
    body: dict[str, Any] = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": VOCAB_SIZE + 50,
        "min_p": 0.1,
        "seed": 1234,
        "max_completion_tokens": 9,
        "stop": ["x", "yy"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "priority": -3,
        "cache_salt": "salt",
        "chat_template_kwargs": {"enable_thinking": False},
        "user": "somebody",
        "store": False,
        "n": 1,
        "logprobs": None,
        "presence_penalty": 0,
        "tools": [],
    }
    headers = {"X-Request-Id": "abc-1"}
    with httpx.Client(base_url=client.base_url, headers=headers, timeout=20) as other:
        posted = Posted(other, "/v1/chat/completions", body)
        answer = pipeline.tokenizer.submitted()
        answer.reject(429, "queue_full", "", "too many requests", 2.4)
        response = posted.response()
    submit, sampling = answer.submit, answer.submit.sampling
    assert submit.messages == [
        {"role": "system", "content": "Be brief."},
        body["messages"][1],
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function"}]},
    ]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, VOCAB_SIZE, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.n, sampling.ignore_eos) == (1234, 9, 1, True)
    assert (sampling.stop_token_ids, submit.stop, submit.priority, submit.cache_salt) == ([3], ["x", "yy"], -3, "salt")
    assert submit.include_stop_str_in_output and not submit.skip_special_tokens
    assert submit.template_kwargs == {"enable_thinking": False} and submit.request_id == "abc-1"
    # A refusal keeps its status, and says when to come back.
    assert response.status_code == 429 and response.headers["retry-after"] == "3"
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["error"] == {
        "message": "too many requests",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }


def test_defaults(pipeline: Pipeline, client: httpx.Client) -> None:
    seeds = set()
    for path, body, limit in (
        ("/v1/chat/completions", CHAT, None),
        ("/v1/completions", {"prompt": "a"}, 16),
        ("/v1/completions", {"prompt": "a", "max_tokens": None, "stop": None, "top_k": -1, "seed": None}, 16),
    ):
        posted = Posted(client, path, body)
        answer = pipeline.tokenizer.submitted()
        answer.reject(400, "context_length_exceeded", "prompt", "600 tokens are more than 512")
        assert posted.response().status_code == 400
        sampling = answer.submit.sampling
        assert sampling.max_tokens == limit and sampling.temperature == 1.0 and sampling.top_k == 0
        assert 0 <= sampling.seed < 2**63
        seeds.add(sampling.seed)
    assert len(seeds) == 3


def test_a_gap_is_asked_for_and_overlap_is_dropped(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, "/v1/completions", {"prompt": "a"})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    streamed.opened()
    answer.text("one")
    assert streamed.next()["choices"][0]["text"] == "one"
    answer.text(" lost", offset=9)  # characters 3..9 never came
    resume = pipeline.tokenizer.expect(Resume)
    assert (resume.rid, resume.seq, resume.offset) == (answer.rid, 0, 3)
    # The end belongs to what comes after the gap and must not overtake it.
    answer.tokens = 3
    answer.finish("stop")
    answer.send(Text([answer.rid], [0], [0], [0], ["one two lost"], [3], [0], int32([])))
    assert streamed.next()["choices"][0]["text"] == " two lost"
    answer.finish("stop")
    events = streamed.rest()
    assert finish_reasons(events) == ["stop"] and events[-1] == "[DONE]"


def test_error_in_the_middle(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, "/v1/chat/completions", CHAT)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    streamed.opened()
    answer.text("half")
    answer.finish("error", message="the step failed")
    *chunks, error, done = streamed.rest()
    assert done == "[DONE]" and error["error"]["message"] == "the step failed" and finish_reasons(chunks) == []

    posted = Posted(client, "/v1/chat/completions", CHAT)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.finish("error", message="the step failed")
    response = posted.response()
    assert response.status_code == 500 and response.json()["error"]["message"] == "the step failed"
    assert response.json()["error"]["type"] == "server_error"
    assert answer.rid in pipeline.tokenizer.expect(Ack, where=lambda ack: answer.rid in ack.rids).rids


def test_what_waits_for_a_slow_client_is_merged(pipeline: Pipeline, gateway: Gateway) -> None:
    """The client reads nothing while 40,000 pieces arrive; then it gets all of the text in far fewer events."""
    body = b'{"prompt":"a","stream":true,"max_tokens":40000}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", gateway.port))
        sock.sendall(request + body)
        answer = pipeline.tokenizer.submitted()
        answer.accept()
        pieces = [f"<{number}>" for number in range(40_000)]
        for piece in pieces:
            answer.text(piece)
        answer.finish("length")
        assert pipeline.tokenizer.expect(Ack, timeout=30, where=lambda ack: answer.rid in ack.rids)
        raw = b""
        sock.settimeout(20)
        while chunk := sock.recv(1 << 16):
            raw += chunk
    texts = re.findall(rb'"text":"([^"]*)"', raw)
    assert b"".join(texts).decode() == "".join(pieces)
    assert len(texts) < 20_000 and raw.count(b"[DONE]") == 1 and raw.count(b'"finish_reason":"length"') == 1


def test_openai_client(pipeline: Pipeline, gateway: Gateway) -> None:
    pipeline.tokenizer.automatic(["Hel", "lo", " wörld"])
    try:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused") as client:
            chat = client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "Hi"}], max_tokens=3
            )
            assert chat.choices[0].message.content == "Hello wörld" and chat.choices[0].finish_reason == "length"
            assert chat.usage is not None and chat.usage.completion_tokens == 3
            stream = client.chat.completions.create(
                model="toy",
                messages=[{"role": "user", "content": "Hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = list(stream)
            texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
            assert "".join(texts) == "Hello wörld"
            assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 8
            text = client.completions.create(model="toy", prompt=["a", "b"], stream=True)
            by_index = {0: "", 1: ""}
            for piece in text:
                for choice in piece.choices:
                    by_index[choice.index] += choice.text
            assert by_index == {0: "Hello wörld", 1: "Hello wörld"}
            assert [model.id for model in client.models.list()] == ["toy", "alias/toy"]
            with pytest.raises(openai.NotFoundError) as caught:
                client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "Hi"}])
            assert caught.value.code == "model_not_found"
    finally:
        pipeline.tokenizer.answer = None


def test_latencies_are_measured(pipeline: Pipeline, gateway: Gateway, client: httpx.Client) -> None:
    def value(page: str, name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name + "{"))

    before = client.get("/metrics").text
    posted = Posted(client, "/v1/completions", {"prompt": "a"})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("a")
    answer.text("bcd", tokens=3)
    answer.finish("length")
    posted.response()
    pipeline.scheduler.snapshots = [{"vllm:num_requests_running": ["gauge", "Running.", [], [[[], 2.0]]]}]
    after = client.get("/metrics").text
    grown = {
        name: value(after, name) - value(before, name)
        for name in (
            "vllm:time_to_first_token_seconds_count",
            "vllm:inter_token_latency_seconds_count",
            "vllm:e2e_request_latency_seconds_count",
            "vllm:request_time_per_output_token_seconds_count",
        )
    }
    assert list(grown.values()) == [1, 3, 1, 1], grown
    assert 'vllm:num_requests_running{engine="0",model_name="toy"} 2.0' in after
    assert re.search(r'quire:http_responses_total\{engine="0",model_name="toy",status="200"\} [1-9]', after)
