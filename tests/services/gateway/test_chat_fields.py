"""Fields of vLLM's and OpenAI's that change how an answer is told, not what it is."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from shared.channels import REASONING
from shared.wire import Truncation
from tests.services.gateway.background import CHAT, Posted, Streamed
from tests.services.gateway.pipeline import MAX_MODEL_LEN, Pipeline

PATH = "/v1/chat/completions"
SAID = [
    *CHAT["messages"],
    {"role": "assistant", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "l"}]},
]


def whole(pipeline: Pipeline, client: httpx.Client, path: str, body: dict[str, Any], *texts: str) -> httpx.Response:
    posted = Posted(client, path, body)
    answer = pipeline.tokenizer.submitted()
    answer.accept(prompt="<Hi>" if answer.submit.echo else "")
    for text in texts:
        answer.text(text)
    answer.finish("stop")
    return posted.response()


@pytest.mark.parametrize(
    ("path", "body", "form"),
    [
        (PATH, CHAT, "chatcmpl-{}"),
        ("/v1/completions", {"prompt": ["a"]}, "cmpl-{}"),
        ("/v1/responses", {"input": "Hi"}, "resp_{}"),
        ("/v1/messages", {"max_tokens": 5, **CHAT}, "msg_{}"),
    ],
)
def test_a_request_id_is_part_of_the_answers(
    pipeline: Pipeline, client: httpx.Client, path: str, body: dict[str, Any], form: str
) -> None:
    """Of the body, or of the header, which goes first as in vLLM; it comes back as X-Request-Id too."""
    named = {**body, "request_id": "mine-1"}
    told = whole(pipeline, client, path, named, "x")
    assert told.json()["id"] == form.format("mine-1") and told.headers["x-request-id"] == "mine-1"
    with httpx.Client(base_url=client.base_url, headers={"X-Request-Id": "theirs"}, timeout=20) as other:
        told = whole(pipeline, other, path, named, "x")
    assert told.json()["id"] == form.format("theirs") and told.headers["x-request-id"] == "theirs"
    ids = {whole(pipeline, client, path, body, "x").json()["id"] for _ in range(2)}
    assert len(ids) == 2


def test_a_responses_own_id_may_be_given_whole(pipeline: Pipeline, client: httpx.Client) -> None:
    told = whole(pipeline, client, "/v1/responses", {"input": "Hi", "request_id": "resp_1"}, "x")
    assert told.json()["id"] == "resp_1"


def test_two_running_requests_of_one_id_do_not_touch_each_other(pipeline: Pipeline, client: httpx.Client) -> None:
    body = {**CHAT, "request_id": "twin"}
    first, second = (Posted(client, PATH, body) for _ in range(2))
    answers = [pipeline.tokenizer.submitted() for _ in range(2)]
    assert answers[0].rid != answers[1].rid
    assert [answer.submit.request_id for answer in answers] == ["twin", "twin"]
    for answer, text in zip(answers, ("a", "b"), strict=True):
        answer.accept()
        answer.text(text)
        answer.finish("stop")
    told = [one.response().json() for one in (first, second)]
    assert {one["choices"][0]["message"]["content"] for one in told} == {"a", "b"}
    assert {one["id"] for one in told} == {"chatcmpl-twin"}


def test_a_request_id_that_cannot_be_a_header_is_refused(client: httpx.Client) -> None:
    for bad in ("", "a\r\nSet-Cookie: x", "ü", "x" * 129, 5):
        response = client.post(PATH, json={**CHAT, "request_id": bad})
        assert response.status_code == 400 and response.json()["error"]["param"] == "request_id"


@pytest.mark.parametrize(
    ("fields", "before"),
    [
        ({}, ""),  # the answer is the assistant's, the last message is not
        ({"messages": SAID, "continue_final_message": True}, "He\nl"),
        ({"messages": SAID}, "He\nl"),
        ({"messages": SAID, "echo": False, "continue_final_message": True}, ""),
        ({"add_generation_prompt": False}, "Hi"),
    ],
)
def test_echo_has_the_last_message_before_the_answer(
    pipeline: Pipeline, client: httpx.Client, fields: dict[str, Any], before: str
) -> None:
    body = {**CHAT, "echo": True, **fields}
    told = whole(pipeline, client, PATH, body, "lo", "!")
    assert told.json()["choices"][0]["message"]["content"] == before + "lo!"
    streamed = Streamed(client, PATH, body)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("lo")
    answer.text("!")
    answer.finish("stop")
    streamed.opened()
    deltas = [event["choices"][0]["delta"] for event in streamed.rest()[:-1]]
    assert [delta.get("content", "") for delta in deltas] == [before, "lo", "!", ""]


def test_the_prompts_text_where_it_is_asked_for(pipeline: Pipeline, client: httpx.Client) -> None:
    assert whole(pipeline, client, PATH, {**CHAT, "return_prompt_text": True}, "x").json()["prompt_text"] == "<Hi>"
    assert "prompt_text" not in whole(pipeline, client, PATH, {**CHAT, "return_prompt_text": False}, "x").json()


def test_a_prediction_changes_nothing_but_is_counted(pipeline: Pipeline, client: httpx.Client) -> None:
    told = whole(pipeline, client, PATH, {**CHAT, "prediction": {"type": "content", "content": "abc"}}, "ab").json()
    assert told["choices"][0]["message"]["content"] == "ab"
    details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert told["usage"]["completion_tokens_details"] == details


def test_an_event_waits_for_as_many_tokens_as_are_asked_for(pipeline: Pipeline, client: httpx.Client) -> None:
    """The first token comes at once and the last with the end; joined they are what the others get."""
    streamed = Streamed(client, "/v1/completions", {"prompt": "a", "stream_interval": 3})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    streamed.opened()
    answer.text("1")
    assert streamed.next()["choices"][0]["text"] == "1"
    for text in "234":
        answer.text(text)
    assert streamed.next()["choices"][0]["text"] == "234"
    answer.text("5")
    answer.finish("length")
    *chunks, done = streamed.rest()
    assert done == "[DONE]" and "".join(chunk["choices"][0]["text"] for chunk in chunks) == "5"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_an_error_brings_what_an_event_waited_with(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, "/v1/completions", {"prompt": "a", "stream_interval": 100})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    for text in "12":
        answer.text(text)
    answer.finish("error", message="the worker died")
    streamed.opened()
    *chunks, error, done = streamed.rest()
    assert done == "[DONE]" and error["error"]["message"] == "the worker died"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) in ("1", "12")


def test_truncation_reaches_the_tokenizer(pipeline: Pipeline, client: httpx.Client) -> None:
    long = [1] * (MAX_MODEL_LEN + 1)
    for path, body, cut in (
        (PATH, CHAT, None),
        (PATH, {**CHAT, "truncate_prompt_tokens": 7}, Truncation(7, "left")),
        ("/v1/completions", {"prompt": long, "truncate_prompt_tokens": -1}, Truncation(0, "left")),
        (
            "/v1/completions",
            {"prompt": [long], "truncate_prompt_tokens": 5, "truncation_side": "right"},
            Truncation(5, "right"),
        ),
        ("/v1/completions", {"prompt": "a", "truncation_side": "right"}, None),
        ("/v1/responses", {"input": "Hi", "truncation": "disabled"}, None),
        ("/v1/responses", {"input": "Hi", "truncation": "auto"}, Truncation(0, "messages")),
    ):
        posted = Posted(client, path, body)
        answer = pipeline.tokenizer.submitted()
        answer.reject(429, "", "", "enough")
        posted.response()
        assert answer.submit.truncation == cut


def test_what_others_add_to_a_history_is_ignored(pipeline: Pipeline, client: httpx.Client) -> None:
    """OpenRouter, litellm, vLLM and Anthropic's marks; vLLM takes strings among a content's parts."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    part = {"type": "text", "text": "b", "annotations": None, "cache_control": {"type": "ephemeral"}, "foo": 1}
    said = {"role": "assistant", "content": "hi", "tool_calls": [{**call, "index": 0, "caller": None}]}
    added = {"reasoning_details": [{"type": "reasoning.text"}], "thinking_blocks": [], "images": [], "foo": None}
    vllms = {"id": "x", "token_ids": [5], "stop_reason": None}
    function = {"name": "look", "parameters": {"type": "object"}, "foo": None, "cache_control": {}}
    body = {
        "messages": [
            {"role": "user", "content": ["a", part], "cache_control": {}},
            {**said, **added, **vllms},
            {"role": "tool", "content": "rain", "tool_call_id": "call_1", "is_error": False},
        ],
        "tools": [{"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}],
    }
    posted = Posted(client, PATH, body)
    answer = pipeline.tokenizer.submitted()
    answer.reject(429, "", "", "enough")
    posted.response()
    assert answer.submit.messages == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        said,
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    ]
    assert answer.submit.tools is not None
    told = {"name": "look", "parameters": {"type": "object"}}
    assert answer.submit.tools.tools == [{"type": "function", "function": told}]


def test_responses_take_further_fields_of_vllms(pipeline: Pipeline, client: httpx.Client) -> None:
    body = {
        "input": "Hi",
        "logit_bias": {"5": 2.5},
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "structured_outputs": {"json": {"enum": [None, 1]}},
        "truncation": "auto",
        "include_reasoning": False,
    }
    posted = Posted(client, "/v1/responses", body)
    answer = pipeline.tokenizer.submitted()
    rules = answer.submit.sampling.rules
    assert rules is not None and (rules.logit_bias_ids, rules.logit_bias) == ([5], [2.5])
    assert answer.submit.include_stop_str_in_output and not answer.submit.skip_special_tokens
    assert answer.submit.grammar is not None and answer.submit.grammar.text == '{"enum":[null,1]}'
    answer.accept()
    answer.text("Hm", channel=REASONING)
    answer.text("1")
    answer.finish("stop", reasoning=1)
    told = posted.response().json()
    assert [item["type"] for item in told["output"]] == ["message"] and told["truncation"] == "auto"
    assert told["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}  # counted, if not shown
