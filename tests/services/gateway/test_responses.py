"""``/v1/responses``: bodies and events are validated by the types of OpenAI's own client."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest
from openai.types.responses import Response, ResponseStreamEvent, ToolChoiceFunction
from pydantic import TypeAdapter

from shared.channels import CONTENT, REASONING, arguments_of, name_of
from shared.wire import SubmitText
from tests.services.gateway.background import Posted, Streamed
from tests.services.gateway.pipeline import MAX_MODEL_LEN, Pipeline

PATH = "/v1/responses"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def test_a_whole_answer(pipeline: Pipeline, client: httpx.Client) -> None:
    body = {"input": "Hi", "instructions": "Be kind.", "max_output_tokens": 7, "temperature": 0.5, "store": True}
    posted = Posted(client, PATH, {**body, "metadata": {"a": "b"}, "user": "me"})
    answer = pipeline.tokenizer.submitted()
    assert answer.submit.endpoint == "chat"
    assert answer.submit.messages == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert answer.submit.sampling.max_tokens == 7 and answer.submit.sampling.temperature == 0.5
    answer.accept()
    answer.text("Hello")
    answer.text(" there")
    answer.finish("stop", cached=3)
    told = posted.response()
    assert told.status_code == 200
    response = Response.model_validate(told.json())
    assert response.output_text == "Hello there" and response.status == "completed"
    assert response.id.startswith("resp_") and response.model == "toy" and response.instructions == "Be kind."
    assert response.metadata == {"a": "b"} and response.user == "me" and response.max_output_tokens == 7
    assert told.json()["store"] is False  # nothing is
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (5, 2, 7)
    assert usage.input_tokens_details.cached_tokens == 3


def test_events(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, PATH, {"input": "Hi"})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    assert streamed.opened().headers["content-type"].startswith("text/event-stream")
    created = streamed.next()
    assert created["type"] == "response.created" and created["response"]["status"] == "in_progress"
    answer.text("Hel")
    answer.text("lo")
    answer.finish("length")
    events = [created, *streamed.rest()]
    assert "[DONE]" not in events  # the last event says it
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event)
    names = [event["type"].removeprefix("response.") for event in events]
    assert [name for name in names if name != "output_text.delta"] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert "".join(event["delta"] for event in events if event["type"].endswith("output_text.delta")) == "Hello"
    last = events[-1]["response"]
    assert last["incomplete_details"] == {"reason": "max_output_tokens"} and last["usage"]["output_tokens"] == 2
    assert last["output"] == [events[-2]["item"]]
    assert last["output"][0]["content"][0]["text"] == "Hello" and last["output"][0]["status"] == "incomplete"


def test_an_empty_answer_has_an_empty_message(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, PATH, {"input": "Hi"})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.finish("stop")
    response = Response.model_validate(posted.response().json())
    assert response.output_text == "" and [item.type for item in response.output] == ["message"]


def test_an_error_in_the_middle(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, PATH, {"input": "Hi"})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    streamed.opened()
    answer.text("Hel")
    answer.finish("error", message="the worker died")
    events = streamed.rest()
    failed = EVENTS.validate_python(events[-1])
    assert failed.type == "response.failed" and failed.response.error.message == "the worker died"
    assert failed.response.status == "failed" and failed.response.output[0].status == "incomplete"


def test_a_conversation_is_sent_back(pipeline: Pipeline, client: httpx.Client) -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call", "call_id": "call_2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    posted = Posted(client, PATH, {"input": items})
    answer = pipeline.tokenizer.submitted()
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]
    assert answer.submit.messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
        {"role": "tool", "content": "sun", "tool_call_id": "call_2"},
    ]
    answer.accept()
    answer.finish("stop")
    assert posted.response().status_code == 200


def test_of_a_conversation_without_end_what_cannot_fit_never_leaves_the_gateway(
    pipeline: Pipeline, client: httpx.Client
) -> None:
    items = [{"role": "developer", "content": "Be kind."}, *({"role": "user", "content": str(n)} for n in range(2000))]
    posted = Posted(client, PATH, {"input": items, "truncation": "auto", "instructions": "Be brief."})
    answer = pipeline.tokenizer.submitted()
    answer.reject(400, "", "", "enough")
    assert posted.response().status_code == 400
    messages = answer.submit.messages
    assert messages is not None and len(messages) == MAX_MODEL_LEN
    assert [one["content"] for one in messages[:2]] == ["Be brief.", "Be kind."]
    assert [one["content"] for one in messages[2:]] == [str(n) for n in range(2002 - MAX_MODEL_LEN, 2000)]


def test_logprobs(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, PATH, {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2})
    answer = pipeline.tokenizer.submitted()
    assert answer.submit.sampling.logprobs == 2
    answer.accept()
    answer.finish("stop")
    assert posted.response().json()["top_logprobs"] == 2


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": 5}, "input", "list, got 5"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "got 'robot'"),
        ({"input": [{"role": "user"}]}, "input.0.content", "required"),
        ({"input": [{"role": "user", "content": "x", "id": 5, "colour": 1}]}, "input.0.id", "string, got 5"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "type 'input_image' is not supported: this server takes text only",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "stores nothing"),
        ({"input": [{"type": "nonsense"}]}, "input.0", "type 'nonsense' is not supported; supported: message"),
        ({"input": ["x"]}, "input.0", "should be an object with a type, got 'x'"),
        ({"input": [{"role": "user", "content": "x"}] * (MAX_MODEL_LEN + 1)}, "input", f"{MAX_MODEL_LEN} tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "'resp_1' is not supported: this server stores"),
        ({"conversation": "conv_1"}, "conversation", "stores nothing"),
        ({"background": True}, "background", "True is not supported"),
        ({"prompt": {"id": "x"}}, "prompt", "no prompt templates"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"include": ["everything"]}, "include.0", "got 'everything'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "runs no tools itself"),
        ({"tool_choice": "sometimes"}, "tool_choice", "none, auto, required or an object, got 'sometimes'"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "type 'file_search' is not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "type 'xml' is not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
        ({"messages": []}, "messages", "not known"),
        ({"max_tokens": 5}, "max_tokens", "not known"),
        ({"stream_options": {}}, "stream_options", "only allowed when stream is true"),
        ({"model": "other"}, "model", "does not exist here"),
    ],
)
def test_bad_input(client: httpx.Client, fields: dict[str, Any], param: str, part: str) -> None:
    response = client.post(PATH, json={"input": "Hi", **fields})
    assert response.status_code in (400, 404)
    error = response.json()["error"]
    assert error["param"] == param and part in error["message"], error


def test_a_refusal_names_the_field_as_it_is_called_here(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, PATH, {"input": "Hi"})
    answer = pipeline.tokenizer.submitted()
    answer.reject(400, "context_length_exceeded", "messages", "your messages resulted in 600 tokens")
    error = posted.response().json()["error"]
    assert error["param"] == "input" and error["code"] == "context_length_exceeded"


LOOK = {"type": "function", "name": "look", "description": "Looks", "parameters": {"type": "object"}, "strict": True}
TALK = {"type": "function", "name": "talk", "parameters": {"type": "object"}}


def think_talk_and_call(pipeline: Pipeline, reason: str = "stop") -> SubmitText:
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    for text, channel in (
        *(("Hm", REASONING), ("m.", REASONING), ("Let me", CONTENT), (" see.", CONTENT)),
        *(("look", name_of(0)), ('{"at"', arguments_of(0)), (": 1}", arguments_of(0))),
        *(("talk", name_of(1)), ("{}", arguments_of(1))),
    ):
        answer.text(text, channel=channel)
    answer.finish(reason, reasoning=2)
    return answer.submit


@pytest.mark.parametrize(("arguments", "status"), [('{"at": "x"}', "completed"), ('{"at": "', "incomplete")])
def test_a_call_that_a_stop_string_cuts_is_incomplete(
    pipeline: Pipeline, client: httpx.Client, arguments: str, status: str
) -> None:
    posted = Posted(client, PATH, {"input": "Hi", "tools": [LOOK], "stop": ["Paris"]})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("look", channel=name_of(0))
    answer.text(arguments, channel=arguments_of(0))
    answer.finish("stop", stop_reason="Paris")
    [item] = Response.model_validate(posted.response().json()).output
    assert item.type == "function_call" and (item.arguments, item.status) == (arguments, status)


def test_reasoning_and_calls_are_items(pipeline: Pipeline, client: httpx.Client) -> None:
    body = {"input": "Hi", "tools": [LOOK, TALK], "tool_choice": {"type": "function", "name": "look"}}
    posted = Posted(client, PATH, body)
    submit = think_talk_and_call(pipeline)
    assert submit.tools is not None and (submit.tools.choice, submit.tools.function) == ("function", "look")
    assert [tool["function"]["name"] for tool in submit.tools.tools] == ["look", "talk"]
    response = Response.model_validate(posted.response().json())
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, message, look, talk = response.output
    assert thought.type == "reasoning" and thought.content is not None and thought.content[0].text == "Hmm."
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens == 2
    assert message.type == "message" and response.output_text == "Let me see."
    assert look.type == "function_call" and (look.name, look.arguments) == ("look", '{"at": 1}')
    assert talk.type == "function_call" and (talk.name, talk.arguments) == ("talk", "{}")
    assert look.call_id != talk.call_id
    assert response.tools[0].model_dump(exclude_none=True) == LOOK
    assert response.tool_choice == ToolChoiceFunction(type="function", name="look")


def test_an_answer_is_sent_back_as_openais_client_has_it(pipeline: Pipeline, client: httpx.Client) -> None:
    """Also with what only some clients and servers know."""
    posted = Posted(client, PATH, {"input": "Hi", "tools": [LOOK, TALK]})
    think_talk_and_call(pipeline)
    response = Response.model_validate(posted.response().json())
    items = [{**item.model_dump(), "colour": {"of": "others"}} for item in response.output]
    assert "async_" in items[-1]
    ids = [item["call_id"] for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": ident, "output": "rain", "foo": None} for ident in ids]
    tools = [{**tool.model_dump(), "colour": 1} for tool in response.tools]
    posted = Posted(client, PATH, {"input": [{"role": "user", "content": "Hi"}, *items, *results], "tools": tools})
    submit = think_talk_and_call(pipeline)
    assert posted.response().status_code == 200
    arguments = [("look", '{"at": 1}'), ("talk", "{}")]
    calls = [
        {"id": ident, "type": "function", "function": {"name": name, "arguments": text}}
        for ident, (name, text) in zip(ids, arguments, strict=True)
    ]
    assert submit.messages == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hmm.", "tool_calls": calls},
        *({"role": "tool", "content": "rain", "tool_call_id": ident} for ident in ids),
    ]
    assert submit.tools is not None and [tool["function"]["name"] for tool in submit.tools.tools] == ["look", "talk"]


def test_their_events(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, PATH, {"input": "Hi", "tools": [LOOK, TALK]})
    think_talk_and_call(pipeline)
    streamed.opened()
    events = [EVENTS.validate_python(event) for event in streamed.rest()]
    names = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(names[2:])) == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done", "output_text.delta", "output_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    final = events[-1].response.output
    assert [item.id for item in added] == [item.id for item in done] == [item.id for item in final]
    assert {item.status for item in added} == {"in_progress"} and done == final
    for index, item in enumerate(final):
        deltas = "".join(
            event.delta for event in events if getattr(event, "item_id", "") == item.id and event.type.endswith("delta")
        )
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
        places = {event.output_index for event in events if getattr(event, "item_id", "") == item.id}
        assert places == {index}


def test_some_of_the_tools_may_be_allowed(pipeline: Pipeline, client: httpx.Client) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "talk"}]}
    posted = Posted(client, PATH, {"input": "Hi", "tools": [LOOK, TALK], "tool_choice": choice})
    submit = think_talk_and_call(pipeline)
    assert submit.tools is not None and submit.tools.choice == "required"
    assert [tool["function"]["name"] for tool in submit.tools.tools] == ["talk"]
    assert posted.response().json()["tool_choice"] == choice


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**LOOK, "name": "no spaces"}]}, "tools.0.name"),
        ({"tools": [{**LOOK, "parameters": {"type": "string"}}]}, "tools.0.parameters"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_bad_tools(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = client.post(PATH, json={"input": "Hi", **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and error["message"].startswith(param)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_the_format_is_what_the_output_is_held_to(pipeline: Pipeline, client: httpx.Client) -> None:
    wanted = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True, "description": None}
    posted = Posted(client, PATH, {"input": "Hi", "text": {"format": wanted}})
    answer = pipeline.tokenizer.submitted()
    grammar = answer.submit.grammar
    assert grammar is not None and grammar.kind == "json" and orjson.loads(grammar.text) == SCHEMA
    answer.accept()
    answer.finish("stop")
    assert posted.response().json()["text"]["format"] == wanted
    posted = Posted(client, PATH, {"input": "Hi", "text": {"format": {"type": "json_object"}}})
    answer = pipeline.tokenizer.submitted()
    assert answer.submit.grammar is not None and orjson.loads(answer.submit.grammar.text) == {"type": "object"}
    answer.reject(400, "invalid_schema", answer.submit.grammar.param, f"{answer.submit.grammar.param}: no such thing")
    assert posted.response().json()["error"]["message"] == "text.format: no such thing"


def test_a_schema_that_cannot_be_is_named_as_it_was_sent(pipeline: Pipeline, client: httpx.Client) -> None:
    wanted = {"type": "json_schema", "name": "x", "schema": {"type": "never"}}
    posted = Posted(client, PATH, {"input": "Hi", "text": {"format": wanted}})
    answer = pipeline.tokenizer.submitted()
    assert answer.submit.grammar is not None
    answer.reject(400, "invalid_schema", answer.submit.grammar.param, f"{answer.submit.grammar.param}: no such type")
    error = posted.response().json()["error"]
    assert error["param"] == "text.format.schema" and error["message"] == "text.format.schema: no such type"
