"""Clients that go away, tokenizers that die or join, a scheduler that is lost, messages that are garbage."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import httpx
import pytest

from shared.codec import int32
from shared.wire import Accept, Cancel, Fault, SubmitText
from tests.services.gateway.background import CHAT, Posted, Streamed
from tests.services.gateway.pipeline import Answer, Gateway, Pipeline, running

BODY = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": %s}'


def raw_post(gateway: Gateway, body: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", gateway.port))
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return sock


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("state", ["submitted", "accepted", "streaming"])
def test_a_client_that_goes_away_is_cancelled_at_once(
    pipeline: Pipeline, gateway: Gateway, stream: bytes, state: str
) -> None:
    sock = raw_post(gateway, BODY % stream)
    answer = pipeline.tokenizer.submitted()
    if state != "submitted":
        answer.accept()
    if state == "streaming":
        answer.text("some")
        if stream == b"true":
            assert b"some" in read_until(sock, b"some")
    sock.close()
    cancel = pipeline.tokenizer.expect(Cancel, timeout=1.0)
    assert cancel.rid == answer.rid


def read_until(sock: socket.socket, wanted: bytes) -> bytes:
    sock.settimeout(5)
    seen = b""
    while wanted not in seen:
        chunk = sock.recv(65536)
        assert chunk, seen
        seen += chunk
    return seen


def test_all_prompts_of_a_call_are_cancelled(pipeline: Pipeline, client: httpx.Client, gateway: Gateway) -> None:
    posted = Posted(client, "/v1/completions", {"prompt": ["a", "b", "c"]})
    answers = [pipeline.tokenizer.submitted() for _ in range(3)]
    answers[0].accept()
    answers[1].reject(400, "context_length_exceeded", "prompt", "too long")
    assert posted.response().status_code == 400
    cancelled = {pipeline.tokenizer.expect(Cancel, timeout=1.0).rid for _ in range(2)}
    assert cancelled == {answers[0].rid, answers[2].rid}


def test_not_accepted_in_time() -> None:
    with running() as pipeline:
        gateway = pipeline.gateway("--accept-timeout=1")
        with gateway.client() as client:
            posted = Posted(client, "/v1/chat/completions", CHAT)
            answer = pipeline.tokenizer.submitted()
            response = posted.response()
            assert (
                response.status_code == 503 and "tokenizer 0 and the scheduler" in response.json()["error"]["message"]
            )
            assert pipeline.tokenizer.expect(Cancel).rid == answer.rid
            response = client.post("/tokenize", json={"prompt": "a"})
            assert response.status_code == 503 and "tokenize" in response.json()["error"]["message"]


def test_requests_spread_over_tokenizers_and_a_new_one_gets_work() -> None:
    with running(tokenizers=2) as pipeline:
        gateway = pipeline.gateway()
        with gateway.client() as client:
            gateway.wait_log("tokenizer 1 joined")
            posted = [Posted(client, "/v1/completions", {"prompt": "a"}) for _ in range(4)]
            answers = [tokenizer.submitted() for tokenizer in pipeline.tokenizers for _ in range(2)]
            third = pipeline.add_tokenizer()
            gateway.wait_log("tokenizer 2 joined")
            posted += [Posted(client, "/v1/completions", {"prompt": "b"}) for _ in range(2)]
            answers += [third.submitted() for _ in range(2)]
            for answer in answers:
                answer.accept()
                answer.finish("length")
            assert all(one.response().status_code == 200 for one in posted)


def test_a_tokenizer_that_leaves() -> None:
    """What it had accepted ends with an error; what it had not is sent to another one under the same rid."""
    with running(tokenizers=1) as pipeline:
        gateway = pipeline.gateway()
        with gateway.client() as client:
            streamed = Streamed(client, "/v1/chat/completions", CHAT)
            first = pipeline.tokenizer.submitted()
            first.accept()
            streamed.opened()
            whole = Posted(client, "/v1/chat/completions", CHAT)
            pipeline.tokenizer.submitted().accept()
            waiting = Posted(client, "/v1/chat/completions", CHAT)
            second = pipeline.tokenizer.submitted()
            other = pipeline.add_tokenizer()
            pipeline.scheduler.tokenizers.remove(pipeline.tokenizer)
            pipeline.scheduler.tell_roster()
            *_, error, done = streamed.rest()
            assert "tokenizer 0" in error["error"]["message"] and done == "[DONE]"
            assert whole.response().status_code == 503
            again = other.submitted()
            assert again.rid == second.rid and again.submit == replaced(second, again)
            again.accept()
            again.text("x")
            again.finish("stop")
            assert waiting.response().json()["choices"][0]["message"]["content"] == "x"


def test_a_tokenizer_that_drains_keeps_its_streams_and_others_get_what_it_refuses() -> None:
    with running(tokenizers=2) as pipeline:
        gateway = pipeline.gateway()
        draining, other = pipeline.tokenizers
        with gateway.client() as client:
            gateway.wait_log("tokenizer 1 joined")
            posted = [Posted(client, "/v1/completions", {"prompt": "a"}) for _ in range(2)]
            kept, elsewhere = draining.submitted(), other.submitted()
            kept.accept()
            elsewhere.accept()
            posted += [Posted(client, "/v1/completions", {"prompt": "b"}) for _ in range(2)]
            refused, direct = draining.submitted(), other.submitted()
            refused.reject(503, "draining", "", "this tokenizer is shutting down", 1.0)
            again = other.submitted()
            assert again.rid == refused.rid and again.submit == replaced(refused, again)
            # It has the fewest requests now, and still gets no further one.
            posted += [Posted(client, "/v1/completions", {"prompt": "c"}) for _ in range(3)]
            further = [other.submitted() for _ in range(3)]
            for answer in (direct, again, *further):
                answer.accept()
            for answer in (kept, elsewhere, direct, again, *further):
                answer.text("x")
                answer.finish("stop")
            assert [one.response().json()["choices"][0]["text"] for one in posted] == ["x"] * 7


def test_without_any_tokenizer_requests_wait_for_one() -> None:
    with running(tokenizers=1) as pipeline:
        gateway = pipeline.gateway()
        with gateway.client() as client:
            posted = Posted(client, "/v1/completions", {"prompt": "a"})
            before = pipeline.tokenizer.submitted()
            pipeline.scheduler.tokenizers.clear()
            pipeline.scheduler.tell_roster()
            gateway.wait_log("tokenizer 0 left")
            assert client.get("/ready").json()["reason"] == "waiting for a tokenizer"
            later = Posted(client, "/v1/completions", {"prompt": "b"})
            other = pipeline.add_tokenizer()
            answers = [other.submitted() for _ in range(2)]
            assert before.rid in {answer.rid for answer in answers}
            for answer in answers:
                answer.accept()
                answer.finish("length")
            assert posted.response().status_code == 200 and later.response().status_code == 200


def replaced(before: Answer, after: Answer) -> SubmitText:
    """Arrays do not compare as a whole; everything else must be equal."""
    return replace(before.submit, prompt_ids=after.submit.prompt_ids, generated=after.submit.generated)


def test_a_silent_tokenizer_counts_as_lost() -> None:
    with running(tokenizers=1) as pipeline:
        gateway = pipeline.gateway()
        with gateway.client() as client:
            streamed = Streamed(client, "/v1/chat/completions", CHAT)
            pipeline.tokenizer.submitted().accept()
            streamed.opened()
            pipeline.tokenizer.muted = True
            *_, error, done = streamed.rest(timeout=8)
            assert "tokenizer 0 has been silent" in error["error"]["message"] and done == "[DONE]"
            assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
            pipeline.tokenizer.muted = False
            gateway.wait_answering("/ready")


def test_a_lost_scheduler() -> None:
    with running(tokenizers=1) as pipeline:
        gateway = pipeline.gateway()
        with gateway.client() as client:
            streamed = Streamed(client, "/v1/chat/completions", CHAT)
            pipeline.tokenizer.submitted().accept()
            streamed.opened()
            pipeline.scheduler.muted = True
            begin = time.monotonic()
            *_, error, done = streamed.rest(timeout=10)
            assert "scheduler has been silent" in error["error"]["message"] and done == "[DONE]"
            assert time.monotonic() - begin < 6.5
            assert client.get("/health").status_code == 503 and client.get("/ready").status_code == 503
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 503
            assert "quire:http_responses" in client.get("/metrics").text
            # Back again, as another run of it: the gateway offers its old number and serves.
            pipeline.scheduler.epoch += 1
            pipeline.scheduler.muted = False
            gateway.wait_answering("/ready")
            assert pipeline.scheduler.hellos[-1].client_number == 7
            assert client.get("/health").status_code == 200


def test_garbage_on_the_wire_is_answered_and_harmless(pipeline: Pipeline, client: httpx.Client) -> None:
    for peer in (pipeline.tokenizer, pipeline.scheduler):
        for frames in ([b"junk"], [b"\xff\x01", b"\x90"], [b"\x17\x01", b"\xc1"], [b"\x17\x02", b"\x90"]):
            peer.send_raw(peer.clients[-1], frames)
            assert peer.expect(Fault).message
        peer.send(peer.clients[-1], Accept(1 << 40, 5, int32([])))  # a rid nobody knows, or the wrong socket
    posted = Posted(client, "/v1/completions", {"prompt": "a"})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.finish("length")
    assert posted.response().status_code == 200


def test_two_hundred_streams(pipeline: Pipeline, gateway: Gateway) -> None:
    pipeline.tokenizer.automatic([f"{number} " for number in range(20)])
    limits = httpx.Limits(max_connections=200)
    try:
        with gateway.client(limits=limits) as client:
            streams = [Streamed(client, "/v1/completions", {"prompt": str(number)}) for number in range(200)]
            expected = "".join(f"{number} " for number in range(20))
            for stream in streams:
                assert stream.opened(timeout=30).status_code == 200
                *chunks, done = stream.rest(timeout=30)
                assert done == "[DONE]"
                assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    finally:
        pipeline.tokenizer.answer = None
