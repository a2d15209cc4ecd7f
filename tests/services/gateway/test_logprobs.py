"""What requests with rules and logprobs become on the wire, and what their answers look like."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.gateway import logprobs
from shared.codec import int32
from shared.sampling import LogitRules
from shared.wire import Candidate, PromptText, Resume, Text, TextLogprobs, TokenLogprob
from tests.services.gateway.background import Posted, Streamed
from tests.services.gateway.pipeline import Answer, Pipeline

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
SMILE = "😀".encode()

# Two tokens that are halves of one character, then a word.
OUTPUT = [
    TokenLogprob(11, SMILE[:2], -0.25, 1, 0, [Candidate(11, SMILE[:2], -0.25), Candidate(12, b" yes", -2.0)]),
    TokenLogprob(13, SMILE[2:], -0.5, 1, 0, [Candidate(13, SMILE[2:], -0.5), Candidate(12, b" yes", -3.0)]),
    TokenLogprob(14, b" ok", float("-inf"), 7, 1, [Candidate(12, b" yes", -0.125), Candidate(15, "世".encode(), -4.0)]),
]
PROMPT = [
    TokenLogprob(5, b"a", None, 0, 0, []),
    TokenLogprob(6, b" b", -1.5, 9, 1, [Candidate(7, b" c", -0.5), Candidate(8, b" d", -0.75)]),
]


def told(answer: Answer, *, prompt: bool = False) -> None:
    """The first character, then the word, with their tokens."""
    prompts = [PromptText(answer.rid, PROMPT)] if prompt else []
    first, second = [TextLogprobs(0, OUTPUT[:2])], [TextLogprobs(0, OUTPUT[2:])]
    answer.send(Text([answer.rid], [0], [0], [0], ["😀"], [2], [0], int32([]), logprobs=first, prompts=prompts))
    answer.send(Text([answer.rid], [0], [1], [0], [" ok"], [3], [0], int32([]), logprobs=second))
    answer.tokens, answer.chars = 3, 4


def shown(token: str, value: float, text: bytes) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(text)}


def test_rules_reach_the_wire(pipeline: Pipeline, client: httpx.Client) -> None:
    body = {
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.25,
        "typical_p": 0.75,
        "min_tokens": 2,
        "logit_bias": {"7": -100, "9": 1.5},
        "allowed_token_ids": [7, 9],
        "bad_words": ["no", "never ever"],
    }
    for path, prompt in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"})):
        posted = Posted(client, path, {**prompt, **body})
        answer = pipeline.tokenizer.submitted()
        answer.reject(429, "queue_full", "", "later")
        assert posted.response().status_code == 429
        assert answer.submit.sampling.rules == LogitRules(0.5, -1.0, 1.25, 0.75, 2, [7, 9], [-100.0, 1.5], [7, 9])
        assert answer.submit.bad_words == ["no", "never ever"]
        assert (answer.submit.sampling.logprobs, answer.submit.sampling.prompt_logprobs) == (-1, -1)


def test_values_that_ask_for_nothing_are_no_rules(pipeline: Pipeline, client: httpx.Client) -> None:
    nothing = {"presence_penalty": 0, "repetition_penalty": 1, "min_tokens": 0, "logit_bias": {}, "bad_words": []}
    posted = Posted(client, "/v1/completions", {"prompt": "a", **nothing, "typical_p": 1, "logprobs": False})
    answer = pipeline.tokenizer.submitted()
    answer.reject(429, "queue_full", "", "later")
    assert posted.response().status_code == 429
    assert (answer.submit.sampling.rules, answer.submit.sampling.logprobs) == (None, -1)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(pipeline: Pipeline, client: httpx.Client, stream: bool) -> None:
    """`bytes` are the token's own, also of half an emoji (vLLM PR 34875), and all of it is valid JSON (vLLM 16540)."""
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "stream": stream}
    half, other = "\\xf0\\x9f", "\\x98\\x80"
    expected = [
        {
            **shown(half, -0.25, SMILE[:2]),
            "top_logprobs": [shown(half, -0.25, SMILE[:2]), shown(" yes", -2.0, b" yes")],
        },
        {
            **shown(other, -0.5, SMILE[2:]),
            "top_logprobs": [shown(other, -0.5, SMILE[2:]), shown(" yes", -3.0, b" yes")],
        },
        {
            **shown(" ok", -9999.0, b" ok"),
            "top_logprobs": [shown(" yes", -0.125, b" yes"), shown("世", -4.0, "世".encode())],
        },
    ]
    if stream:
        streamed = Streamed(client, "/v1/chat/completions", body)
        answer = pipeline.tokenizer.submitted()
        answer.accept()
        streamed.opened()
        told(answer)
        answer.finish("length")
        choices = [event["choices"][0] for event in streamed.rest() if event != "[DONE]"]
        found = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
        assert found == expected
    else:
        posted = Posted(client, "/v1/chat/completions", body)
        answer = pipeline.tokenizer.submitted()
        answer.accept()
        told(answer)
        answer.finish("length")
        assert posted.response().json()["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    assert answer.submit.sampling.logprobs == 2


def test_completion_logprobs_with_echo_and_prompt_logprobs(pipeline: Pipeline, client: httpx.Client) -> None:
    body = {"prompt": "a b", "logprobs": 1, "echo": True, "prompt_logprobs": 2}
    posted = Posted(client, "/v1/completions", body)
    answer = pipeline.tokenizer.submitted()
    assert (answer.submit.sampling.logprobs, answer.submit.sampling.prompt_logprobs, answer.submit.echo) == (1, 2, True)
    answer.accept(prompt="a b")
    told(answer, prompt=True)
    answer.finish("length")
    choice = posted.response().json()["choices"][0]
    assert choice["text"] == "a b😀 ok"
    half, other = "bytes:\\xf0\\x9f", "bytes:\\x98\\x80"
    assert choice["logprobs"] == {
        "tokens": ["a", " b", half, other, " ok"],
        "token_logprobs": [None, -1.5, -0.25, -0.5, -9999.0],
        "top_logprobs": [
            None,
            {" c": -0.5, " b": -1.5},
            {half: -0.25},
            {other: -0.5},
            {" yes": -0.125, " ok": -9999.0},
        ],
        "text_offset": [0, 1, 3, 3, 4],
    }
    assert choice["prompt_logprobs"] == [
        None,
        {
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": " c"},
            "8": {"logprob": -0.75, "rank": 2, "decoded_token": " d"},
            "6": {"logprob": -1.5, "rank": 9, "decoded_token": " b"},
        },
    ]


def test_echo_without_output_gives_the_prompt_back(pipeline: Pipeline, client: httpx.Client) -> None:
    """vLLM 6521: echo with max_tokens 0 killed the server. One token is computed, and nobody is told of it."""
    posted = Posted(client, "/v1/completions", {"prompt": "a b", "logprobs": 0, "echo": True, "max_tokens": 0})
    answer = pipeline.tokenizer.submitted()
    assert answer.submit.sampling.max_tokens == 1
    answer.accept(prompt="a b")
    answer.send(
        Text([answer.rid], [0], [0], [0], ["x"], [1], [0], int32([]), [], [], [TextLogprobs(0, OUTPUT[2:])],
             [PromptText(answer.rid, PROMPT)])
    )  # fmt: skip
    answer.tokens = 1
    answer.finish("stop")
    body = posted.response().json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("a b", "length", ["a", " b"])
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["total_tokens"] == 5


def test_a_streamed_echo_begins_with_the_prompt(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, "/v1/completions", {"prompt": "a b", "echo": True, "stream": True})
    answer = pipeline.tokenizer.submitted()
    answer.accept(prompt="a b")
    streamed.opened()
    answer.text("!")
    answer.finish("length")
    texts = [event["choices"][0]["text"] for event in streamed.rest() if event != "[DONE]"]
    assert "".join(texts) == "a b!"
    assert answer.submit.sampling.prompt_logprobs == -1


def test_text_that_comes_before_a_lost_prompt_is_asked_for_again(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/v1/completions", {"prompt": "a b", "prompt_logprobs": 1})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("x")
    assert pipeline.tokenizer.expect(Resume) == Resume(answer.rid, 0, 0)
    prompts = [PromptText(answer.rid, PROMPT)]
    answer.send(Text([answer.rid], [0], [0], [0], ["x"], [1], [0], int32([]), prompts=prompts))
    answer.finish("length")
    choice = posted.response().json()["choices"][0]
    assert choice["text"] == "x" and choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == 2


def test_no_two_tokens_are_spelled_alike() -> None:
    assert logprobs.spelled("世".encode()) == "世"
    assert len({logprobs.spelled(bytes([byte]), "bytes:") for byte in range(256)}) == 256
