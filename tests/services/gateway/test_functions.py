"""OpenAI's older functions and function_call: told to the tokenizer as tools, answered as they were asked."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion

from shared.channels import CONTENT, arguments_of, name_of
from tests.services.gateway.background import CHAT, Posted, Streamed, put_together
from tests.services.gateway.pipeline import Answer, Pipeline

PATH = "/v1/chat/completions"
LOOK = {"name": "look", "description": "Looks", "parameters": {"type": "object", "properties": {}}}
TALK = {"name": "talk"}
BODY = {**CHAT, "functions": [LOOK, TALK]}


def play(answer: Answer) -> None:
    answer.accept()
    for channel, text in (
        *((CONTENT, "Let me"), (CONTENT, " see."), (name_of(0), "look")),
        *((arguments_of(0), '{"at":'), (arguments_of(0), " 1}")),
    ):
        answer.text(text, channel=channel)
    answer.finish("stop")


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({}, ("auto", "")),
        ({"function_call": None}, ("auto", "")),
        ({"function_call": "auto"}, ("auto", "")),
        ({"function_call": "none"}, ("none", "")),
        ({"function_call": {"name": "talk"}}, ("function", "talk")),
    ],
)
def test_what_reaches_the_tokenizer(
    pipeline: Pipeline, client: httpx.Client, fields: dict[str, Any], use: tuple[str, str]
) -> None:
    posted = Posted(client, PATH, {**BODY, **fields})
    answer = pipeline.tokenizer.submitted()
    answer.reject(400, "", "", "enough")
    posted.response()
    told = answer.submit.tools
    assert told is not None and (told.choice, told.function) == use
    assert told.parallel is False  # an answer holds one function_call
    assert told.tools == [{"type": "function", "function": LOOK}, {"type": "function", "function": TALK}]


def test_a_whole_answer(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, PATH, BODY)
    play(pipeline.tokenizer.submitted())
    body = posted.response().json()
    choice = ChatCompletion.model_validate(body).choices[0]
    call = choice.message.function_call
    assert call is not None and (call.name, call.arguments) == ("look", '{"at": 1}')
    assert choice.finish_reason == "function_call" and choice.message.content == "Let me see."
    assert "tool_calls" not in body["choices"][0]["message"]


def test_a_stream_that_openais_own_client_puts_together(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, PATH, BODY)
    play(pipeline.tokenizer.submitted())
    streamed.opened()
    *chunks, done = streamed.rest()
    assert done == "[DONE]"
    choice = put_together(chunks)
    call = choice.message.function_call
    assert call is not None and (call.name, call.arguments) == ("look", '{"at": 1}')
    assert choice.finish_reason == "function_call" and choice.message.content == "Let me see."
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert not any("tool_calls" in delta for delta in deltas)
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert calls == [{"name": "look", "arguments": ""}, {"arguments": '{"at":'}, {"arguments": " 1}"}]


def test_finish_reasons(pipeline: Pipeline, client: httpx.Client) -> None:
    """As with tools: ``stop`` where the client named the function, and no call where the answer was cut off."""
    for fields, reason, told in (
        ({}, "stop", "function_call"),
        ({"function_call": {"name": "look"}}, "stop", "stop"),
        ({}, "length", "length"),
    ):
        posted = Posted(client, PATH, {**BODY, **fields})
        answer = pipeline.tokenizer.submitted()
        answer.accept()
        answer.text("look", channel=name_of(0))
        answer.text("{}", channel=arguments_of(0))
        answer.finish(reason)
        choice = posted.response().json()["choices"][0]
        assert choice["finish_reason"] == told and choice["message"]["content"] is None
        assert choice["message"]["function_call"] == {"name": "look", "arguments": "{}"}


def test_an_answer_without_a_call(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, PATH, BODY)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("No.")
    answer.finish("stop")
    choice = posted.response().json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "No."
    assert not {"function_call", "tool_calls"} & choice["message"].keys()


def test_calls_and_results_are_sent_back(pipeline: Pipeline, client: httpx.Client) -> None:
    """Each result belongs to the call before it; history may have been cut off before a result's call."""
    call = {"name": "look", "arguments": '{"at": 1}'}
    messages: list[dict[str, Any]] = [
        {"role": "function", "name": "look", "content": "fog"},
        *CHAT["messages"],
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "look", "content": "rain"},
        {"role": "assistant", "content": "And?", "function_call": {"name": "talk", "arguments": "{}"}},
        {"role": "function", "name": "talk", "content": None},
    ]
    posted = Posted(client, PATH, {"messages": messages})
    answer = pipeline.tokenizer.submitted()
    answer.reject(400, "", "", "enough")
    posted.response()

    def made(number: int, function: dict[str, str]) -> list[dict[str, Any]]:
        return [{"id": f"call_{number}", "type": "function", "function": function}]

    assert answer.submit.messages == [
        {"role": "tool", "name": "look", "content": "fog", "tool_call_id": "call_0"},
        *CHAT["messages"],
        {"role": "assistant", "content": "", "tool_calls": made(1, call)},
        {"role": "tool", "name": "look", "content": "rain", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "And?", "tool_calls": made(2, {"name": "talk", "arguments": "{}"})},
        {"role": "tool", "name": "talk", "content": "", "tool_call_id": "call_2"},
    ]


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"functions": [{"name": "no spaces"}]}, "functions.0.name", "pattern"),
        ({"functions": [{"name": "f", "parameters": {"type": "string"}}]}, "functions.0.parameters", "type 'object'"),
        ({"functions": [LOOK, LOOK]}, "functions.1.name", "'look' is the name of another tool"),
        ({"functions": [LOOK], "function_call": {"name": "x"}}, "function_call.name", "'x' is not among the tools"),
        ({"functions": [LOOK], "function_call": "required"}, "function_call", "'none', 'auto' or {'name': string}"),
        ({"function_call": {"name": "look"}}, "function_call", "only allowed when functions are given"),
        ({"functions": [LOOK], "tools": [{"type": "function", "function": LOOK}]}, "functions", "contradicts tools"),
        ({"functions": [LOOK], "tool_choice": "auto"}, "functions", "contradicts tool_choice"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.name", "required"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "messages.0.function_call.arguments",
            "required",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}, "tool_calls": [{}]}]},
            "messages.0.function_call",
            "contradicts tool_calls",
        ),
    ],
)
def test_bad_input(client: httpx.Client, fields: dict[str, Any], param: str, part: str) -> None:
    response = client.post(PATH, json={**CHAT, **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and part in error["message"], error


def test_a_schema_that_the_tokenizer_refuses_is_named_as_it_was_sent(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, PATH, BODY)
    param = "tools.1.function.parameters"
    pipeline.tokenizer.submitted().reject(400, "invalid_schema", param, f"{param}: no such type")
    error = posted.response().json()["error"]
    assert (error["param"], error["message"]) == ("functions.1.parameters", "functions.1.parameters: no such type")
