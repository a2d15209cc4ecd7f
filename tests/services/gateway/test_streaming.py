"""Streams beside their text: usage in chunks, and comments while nothing comes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from services.gateway.stream import event
from tests.services.gateway.background import CHAT, KEEP_ALIVE, Streamed
from tests.services.gateway.pipeline import Gateway, Pipeline

INTERVAL = 0.3


@pytest.fixture(scope="module")
def talkative(pipeline: Pipeline) -> Gateway:
    """Comments after 0.3 s of silence, and tells usage whoever asks."""
    options = ("--served-model-name=toy", f"--sse-keep-alive-interval={INTERVAL}", "--enable-force-include-usage")
    return pipeline.gateway(*options)


@pytest.fixture
def talking(talkative: Gateway) -> Iterator[httpx.Client]:
    with talkative.client() as client:
        yield client


def test_no_reader_takes_a_character_of_a_text_for_the_end_of_a_line() -> None:
    text = "a\x85b\u2028c\u2029d\x0be\x1cf\ng"
    first, *rest = event({"text": text}).decode().splitlines()  # splits at every end of a line that Unicode knows
    assert rest == [""] and json.loads(first.removeprefix("data: ")) == {"text": text}


def usages(events: list[Any]) -> list[tuple[int, int, int] | None]:
    """Prompt, completion and total tokens that each event tells."""
    told = [event["usage"] for event in events if isinstance(event, dict)]
    return [
        None if one is None else (one["prompt_tokens"], one["completion_tokens"], one["total_tokens"]) for one in told
    ]


def test_usage_in_every_chunk(pipeline: Pipeline, client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = Streamed(client, "/v1/chat/completions", {**CHAT, "stream_options": options})
    answer = pipeline.tokenizer.submitted()
    answer.accept(prompt_tokens=5)
    streamed.opened()
    events = [streamed.next()]
    for tokens in (1, 3):
        answer.text("x" * tokens, tokens)
        events.append(streamed.next())
    answer.finish("stop")
    events += streamed.rest()
    assert usages(events) == [(5, 0, 5), (5, 1, 6), (5, 4, 9), (5, 4, 9), (5, 4, 9)]
    assert events[-2]["choices"] == [] and events[-1] == "[DONE]"


def test_usage_in_every_chunk_counts_all_choices(pipeline: Pipeline, client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a", "b"], "stream_options": options}
    streamed = Streamed(client, "/v1/completions", body)
    answers = [pipeline.tokenizer.submitted() for _ in range(2)]
    for answer in answers:
        answer.accept()
    streamed.opened()
    events = []
    for answer in answers:
        answer.text("xy", 2)
        events.append(streamed.next())
    for answer in answers:
        answer.finish("stop")
    events += streamed.rest()
    assert usages(events)[:2] == [(10, 2, 12), (10, 4, 14)] and usages(events)[-1] == (10, 4, 14)


def test_continuous_usage_needs_include_usage(pipeline: Pipeline, client: httpx.Client) -> None:
    """As in vLLM it says how usage is told, not whether."""
    streamed = Streamed(client, "/v1/chat/completions", {**CHAT, "stream_options": {"continuous_usage_stats": True}})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.finish("stop")
    streamed.opened()
    assert all("usage" not in event for event in streamed.rest()[:-1])


def test_a_server_that_tells_everybody_usage(pipeline: Pipeline, talking: httpx.Client) -> None:
    streamed = Streamed(talking, "/v1/completions", {"prompt": "a"})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("x")
    answer.finish("stop")
    streamed.opened()
    events = [event for event in streamed.rest() if event != KEEP_ALIVE]
    assert usages(events)[-1] == (5, 1, 6) and events[-2]["choices"] == [] and None not in usages(events)


def test_comments_before_the_first_token_and_between_tokens(pipeline: Pipeline, talking: httpx.Client) -> None:
    streamed = Streamed(talking, "/v1/chat/completions", CHAT)
    answer = pipeline.tokenizer.submitted()
    time.sleep(3 * INTERVAL)  # before ACCEPT nothing leaves, not even headers
    answer.accept()
    streamed.opened()
    events = [streamed.next()]
    begin = time.monotonic()
    assert [streamed.next() for _ in range(3)] == [KEEP_ALIVE] * 3
    assert time.monotonic() - begin > 2 * INTERVAL
    answer.text("one")
    events.append(streamed.next())
    assert streamed.next() == KEEP_ALIVE
    answer.text("two")
    answer.finish("length")
    events += [event for event in streamed.rest() if event != KEEP_ALIVE]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-2]) == "onetwo"
    assert [event["choices"][0]["finish_reason"] for event in events[:-2]][-1] == "length" and events[-1] == "[DONE]"


def test_openai_client_does_not_see_the_comments(pipeline: Pipeline, talkative: Gateway) -> None:
    def play() -> None:
        answer = pipeline.tokenizer.submitted()
        answer.accept()
        for word in ("one", " two"):
            time.sleep(2.5 * INTERVAL)
            answer.text(word)
        time.sleep(2.5 * INTERVAL)
        answer.finish("stop")

    player = threading.Thread(target=play)
    player.start()
    with openai.OpenAI(base_url=f"{talkative.url}/v1", api_key="unused") as client:
        chunks = list(client.completions.create(model="toy", prompt="a", stream=True))
    player.join()
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "one two"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
