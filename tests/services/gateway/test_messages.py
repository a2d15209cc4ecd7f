"""``/v1/messages``: bodies and events are validated by the types of Anthropic's own client."""

from __future__ import annotations

import threading
from typing import Any

import anthropic
import httpx
import orjson
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from shared.channels import CONTENT, REASONING, arguments_of, name_of
from shared.codec import int32
from shared.wire import Cached, SubmitText, Text
from tests.services.gateway.background import Posted, Streamed
from tests.services.gateway.pipeline import Gateway, Pipeline

PATH = "/v1/messages"
HI = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def test_a_whole_answer(pipeline: Pipeline, client: httpx.Client) -> None:
    body = {**HI, "system": "Be kind.", "stop_sequences": ["END"], "top_k": 5, "metadata": {"user_id": "me"}}
    posted = Posted(client, PATH, body)
    answer = pipeline.tokenizer.submitted()
    assert answer.submit.messages == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert answer.submit.stop == ["END"] and answer.submit.sampling.top_k == 5
    assert answer.submit.sampling.max_tokens == 9
    answer.accept()
    answer.text("Hello")
    answer.finish("stop", cached=3)
    told = posted.response()
    assert told.status_code == 200
    message = Message.model_validate(told.json())
    assert message.content[0].model_dump(exclude_none=True) == {"type": "text", "text": "Hello"}
    assert message.stop_reason == "end_turn" and message.stop_sequence is None and message.model == "toy"
    # Anthropic counts what was cached beside the rest of the prompt's five tokens.
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (2, 3)
    assert message.usage.output_tokens == 1


@pytest.mark.parametrize(
    ("reason", "stop", "tokens", "told"),
    [
        ("stop", "", 5, ("end_turn", None)),
        ("stop", "END", 5, ("stop_sequence", "END")),
        ("stop", "17", 5, ("end_turn", None)),  # a stop token's id
        ("length", "", 9, ("max_tokens", None)),
        ("length", "", 8, ("model_context_window_exceeded", None)),  # of the nine that were asked for
    ],
)
def test_stop_reasons(
    pipeline: Pipeline, client: httpx.Client, reason: str, stop: str, tokens: int, told: tuple[str, str | None]
) -> None:
    posted = Posted(client, PATH, {**HI, "stop_sequences": ["END"]})
    answer = pipeline.tokenizer.submitted()
    assert answer.submit.clamp_max_tokens  # programs ask for more than the context has room for
    answer.accept()
    answer.text("Hello", tokens=tokens)
    answer.finish(reason, stop)
    message = Message.model_validate(posted.response().json())
    assert (message.stop_reason, message.stop_sequence) == told


def test_events(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, PATH, {**HI, "max_tokens": 2})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    assert streamed.opened().headers["content-type"].startswith("text/event-stream")
    answer.send(Text([], [], [], [], [], [], [], int32([]), cached=[Cached(answer.rid, 4)]))
    answer.text("Hel")
    answer.text("lo")
    answer.finish("length", cached=4)
    events = streamed.rest()
    start = events[0]
    assert start["type"] == "message_start"
    assert events[1] == {"type": "ping"}
    for event in events:
        if event["type"] != "ping":
            EVENTS.validate_python(event)
    names = [event["type"] for event in events]
    assert [name for name in names if name != "content_block_delta"] == [
        *("message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop"),
    ]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == "Hello"
    last = events[-2]
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    # Of the prompt's five tokens, at the beginning as at the end: what was cached is counted beside the rest.
    prompt = {"input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4}
    assert start["message"]["usage"] == {**prompt, "output_tokens": 0}
    assert last["usage"] == {**prompt, "output_tokens": 2}


def test_an_error_before_any_text(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, PATH, HI)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.finish("error", message="too late", code="deadline_exceeded")
    streamed.opened()
    assert [event["type"] for event in streamed.rest()] == ["message_start", "ping", "error"]


def test_an_error_in_the_middle(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, PATH, HI)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    streamed.opened()
    answer.text("Hel")
    answer.finish("error", message="the worker died")
    events = streamed.rest()
    assert events[0]["type"] == "message_start"
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "the worker died"}}


def test_a_conversation_is_sent_back(pipeline: Pipeline, client: httpx.Client) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "weather?", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "It"},
    ]
    posted = Posted(client, PATH, {**HI, "messages": messages, "system": [{"type": "text", "text": "s", **cached}]})
    answer = pipeline.tokenizer.submitted()
    call = {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Köln"}'}}
    assert answer.submit.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "and?\nWell?"},
        {"role": "assistant", "content": "It"},
    ]
    # The last turn is the assistant's own: the answer goes on from it.
    assert answer.submit.template_kwargs == {"continue_final_message": True}
    answer.accept()
    answer.finish("stop")
    assert posted.response().status_code == 200


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "takes text only"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "messages.0.content.0: a user message holds no tool_use block",
        ),
        ({"system": 5}, "system: "),
        ({"stop_sequences": [""]}, "stop_sequences.0: "),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0: type 'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: this field is required"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: required"),
        ({"n": 2}, "n: this field is not known"),
        ({"temperature": "hot"}, "temperature: "),
    ],
)
def test_bad_input(client: httpx.Client, fields: dict[str, Any], part: str) -> None:
    response = client.post(PATH, json={**HI, **fields})
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert part in body["error"]["message"], body


def test_max_tokens_is_required(client: httpx.Client) -> None:
    error = client.post(PATH, json={"messages": HI["messages"]}).json()["error"]
    assert error["message"] == "max_tokens: this field is required"


def test_errors_have_anthropics_form(pipeline: Pipeline, client: httpx.Client) -> None:
    assert client.get(PATH).json()["error"]["type"] == "invalid_request_error"
    unknown = client.post(PATH, json={**HI, "model": "other"})
    assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "not_found_error"
    posted = Posted(client, PATH, HI)
    pipeline.tokenizer.submitted().reject(429, "queue_full", "", "too many wait", 3.0)
    refused = posted.response()
    assert refused.status_code == 429 and refused.headers["retry-after"] == "3"
    assert refused.json() == {"type": "error", "error": {"type": "rate_limit_error", "message": "too many wait"}}


def test_the_key_may_come_as_x_api_key(pipeline: Pipeline) -> None:
    guarded = pipeline.gateway(env={"QUIRE_API_KEY": "secret"})
    with guarded.client() as client:
        refused = client.post(PATH, json=HI, headers={"x-api-key": "wrong"})
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        assert client.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200
        assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        headers = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
        posted = Posted(client, PATH, HI)
        assert posted.response().status_code == 401
        assert client.post(PATH, json={}, headers=headers).status_code == 400


def test_anthropics_client_streams(pipeline: Pipeline, gateway: Gateway) -> None:
    pipeline.tokenizer.automatic(["Hel", "lo"])
    try:
        with (
            anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
            client.messages.stream(model="toy", max_tokens=2, messages=[{"role": "user", "content": "Hi"}]) as stream,
        ):
            assert "".join(stream.text_stream) == "Hello"
            message = stream.get_final_message()
    finally:
        pipeline.tokenizer.answer = None
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 2


LOOK = {"name": "look", "description": "Looks", "input_schema": {"type": "object"}}


def think_talk_and_call(pipeline: Pipeline) -> SubmitText:
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    for text, channel in (
        *(("Hm", REASONING), ("m.", REASONING), ("Let me see.", CONTENT)),
        *(("look", name_of(0)), ('{"at"', arguments_of(0)), (": 1}", arguments_of(0)), ("look", name_of(1))),
    ):
        answer.text(text, channel=channel)
    answer.finish("stop")
    return answer.submit


def test_thoughts_and_calls_are_blocks(pipeline: Pipeline, client: httpx.Client) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    posted = Posted(client, PATH, {**HI, "tools": [LOOK], "tool_choice": choice, "thinking": {"type": "adaptive"}})
    submit = think_talk_and_call(pipeline)
    assert submit.tools is not None and (submit.tools.choice, submit.tools.parallel) == ("required", False)
    [tool] = submit.tools.tools
    assert tool["function"] == {"name": "look", "description": "Looks", "parameters": {"type": "object"}}
    assert submit.template_kwargs == {"enable_thinking": True}
    message = Message.model_validate(posted.response().json())
    thought, text, look, again = message.content
    assert thought.type == "thinking" and thought.thinking == "Hmm."
    assert text.type == "text" and text.text == "Let me see."
    assert look.type == "tool_use" and (look.name, look.input) == ("look", {"at": 1})
    assert again.type == "tool_use" and again.input == {} and again.id != look.id
    assert message.stop_reason == "tool_use"


def test_an_answer_is_sent_back_as_anthropics_client_has_it(pipeline: Pipeline, client: httpx.Client) -> None:
    """Also the whole of it, with id, usage and what only some servers know."""
    posted = Posted(client, PATH, {**HI, "tools": [LOOK]})
    think_talk_and_call(pipeline)
    came = Message.model_validate(posted.response().json()).model_dump()
    said = {**came, "content": [{**block, "colour": 1} for block in came["content"]]}
    ids = [block["id"] for block in said["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": ident, "content": "rain", "foo": None} for ident in ids]
    messages = [*HI["messages"], said, {"role": "user", "content": results, "id": "x"}]
    posted = Posted(client, PATH, {**HI, "messages": messages, "tools": [{**LOOK, "colour": 1}]})
    sent = think_talk_and_call(pipeline).messages
    assert posted.response().status_code == 200 and sent is not None
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["content"] == "Let me see." and sent[1]["reasoning_content"] == "Hmm."
    assert [call["id"] for call in sent[1]["tool_calls"]] == ids


def test_their_events_make_the_same_message(pipeline: Pipeline, gateway: Gateway) -> None:
    answering = threading.Thread(target=think_talk_and_call, args=(pipeline,))
    answering.start()
    with (
        anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
        client.messages.stream(
            model="toy",
            max_tokens=9,
            messages=[{"role": "user", "content": "Hi"}],
            tools=[{"name": "look", "input_schema": {"type": "object"}}],
        ) as stream,
    ):
        events = [event.type for event in stream]
        message = stream.get_final_message()
    answering.join()
    assert events.count("content_block_start") == events.count("content_block_stop") == 4
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    _, _, look, again = message.content
    assert look.type == again.type == "tool_use"
    assert look.input == {"at": 1} and again.input == {}
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"at": ', {}),
        ('{"at": 1, "by": "tra', {"at": 1}),
        ("", {}),
        ("no JSON", {"arguments": "no JSON"}),
        ("[1]", {"arguments": "[1]"}),
    ],
)
def test_arguments_that_are_cut_or_no_object_still_make_an_input(
    pipeline: Pipeline, client: httpx.Client, arguments: str, wanted: dict[str, Any]
) -> None:
    posted = Posted(client, PATH, {**HI, "tools": [LOOK], "max_tokens": 2})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("look", channel=name_of(0))
    answer.text(arguments, channel=arguments_of(0))
    answer.finish("length")
    message = Message.model_validate(posted.response().json())
    [block] = message.content
    assert block.type == "tool_use" and block.input == wanted
    assert message.stop_reason == "max_tokens"


def test_bad_tools(client: httpx.Client) -> None:
    for fields, part in (
        ({"tools": [{**LOOK, "name": "no spaces"}]}, "tools.0.name: "),
        ({"tools": [{**LOOK, "input_schema": {"type": "string"}}]}, "tools.0.input_schema: "),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: 'x' is not among"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: only allowed when tools are given"),
    ):
        response = client.post(PATH, json={**HI, **fields})
        assert response.status_code == 400 and response.json()["error"]["message"].startswith(part), response.text


def test_an_output_format_is_what_the_output_is_held_to(pipeline: Pipeline, client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    posted = Posted(client, PATH, {**HI, "output_config": wanted})
    answer = pipeline.tokenizer.submitted()
    grammar = answer.submit.grammar
    assert grammar is not None and grammar.kind == "json" and orjson.loads(grammar.text) == schema
    assert answer.submit.template_kwargs == {"reasoning_effort": "low"}
    answer.reject(400, "invalid_schema", grammar.param, f"{grammar.param}: no such type")
    message = posted.response().json()["error"]["message"]
    assert message == "output_config.format.schema: no such type"
