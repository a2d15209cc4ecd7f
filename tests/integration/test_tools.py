"""Tools on the built-in model, through OpenAI's client. Its template knows none, so it is told of them in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.integration.server import Server, serve

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "description": "The time."}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    argv = ("--dtype", "float32", "--max-model-len", "2048", "--trust-request-chat-template")
    with serve(tmp_path_factory.mktemp("tools"), *argv) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, server: Server, messages: Any = QUESTION, **fields: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 200, "tools": TOOLS, **fields}
    return client.chat.completions.create(model=server.model, messages=messages, **options)


def test_a_named_function_is_called_with_arguments_that_fit(client: openai.OpenAI, server: Server) -> None:
    choice = ask(client, server, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "stop" and choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_a_required_call_streamed_is_the_whole_one(client: openai.OpenAI, server: Server) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(client, server, **fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    [call] = whole.message.tool_calls
    assert call.function.name in ("get_weather", "get_time")
    with client.chat.completions.stream(
        model=server.model, messages=QUESTION, temperature=0, max_tokens=200, tools=TOOLS, **fields
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") > 1 or call.function.name == "get_time"
    assert final.finish_reason == "tool_calls" and final.message.tool_calls is not None
    assert [one.function.arguments for one in final.message.tool_calls] == [call.function.arguments]


def test_a_result_is_fed_back_and_answered(client: openai.OpenAI, server: Server) -> None:
    called = ask(client, server, tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Sunny, 21 degrees celsius."}
    answer = ask(client, server, [*QUESTION, called, result], tool_choice="none").choices[0]
    assert answer.finish_reason in ("stop", "length") and answer.message.content and not answer.message.tool_calls


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_demanded_call_cut_anywhere_is_no_content(client: openai.OpenAI, server: Server, choice: Any) -> None:
    """Whole and streamed: nothing before the call's name is whole, then the arguments as far as they came."""
    fields: Any = {"tool_choice": choice, "parallel_tool_calls": False}
    [full] = ask(client, server, **fields).choices[0].message.tool_calls
    seen = set()
    for tokens in (1, 2, 4, 7, 10, 13, 16, 20):
        whole = ask(client, server, max_tokens=tokens, **fields).choices[0]
        called = whole.message.tool_calls or []
        assert whole.finish_reason == "length" and not whole.message.content
        assert [one.function.name for one in called] in ([], [full.function.name])
        assert all(full.function.arguments.startswith(one.function.arguments) for one in called)
        state = ChatCompletionStreamState()
        for chunk in ask(client, server, max_tokens=tokens, stream=True, **fields):
            assert not chunk.choices[0].delta.content
            state.handle_chunk(chunk)
        streamed = state.current_completion_snapshot.choices[0]
        assert streamed.finish_reason == "length"
        calls = [(one.function.name, one.function.arguments) for one in streamed.message.tool_calls or []]
        assert calls == [(one.function.name, one.function.arguments) for one in called]
        seen.add(called[0].function.arguments if called else None)
    assert None in seen and len(seen) > 2


def test_several_answers(client: openai.OpenAI, server: Server) -> None:
    choices = ask(client, server, tool_choice=NAMED, n=3, temperature=1, seed=7).choices
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3
    for choice in choices:
        jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), WEATHER)


def test_a_schema_that_cannot_be_is_refused(client: openai.OpenAI, server: Server) -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 5}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, server, tools=[broken], tool_choice="required")
    assert caught.value.param == "tools.0.function.parameters"
    assert ask(client, server, tool_choice=NAMED).choices[0].message.tool_calls


def test_a_template_with_the_request(client: openai.OpenAI, server: Server) -> None:
    with server.client() as http:
        body = {
            "messages": QUESTION,
            "chat_template": "{{ messages[0].content }}{{ x }}",
            "chat_template_kwargs": {"x": "!"},
        }
        tokens = http.post("/tokenize", json=body).json()["tokens"]
        plain = http.post("/tokenize", json={"prompt": "What is the weather in Paris?!"}).json()["tokens"]
        assert tokens == plain
        loop = "{% for a in range(99999) %}"
        hostile = {**body, "chat_template": f"{loop}{loop}{{% endfor %}}{{% endfor %}}"}
        refused = http.post("/v1/chat/completions", json=hostile)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "chat_template_error"


def test_a_bad_schema_is_named(client: openai.OpenAI, server: Server) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "strin"}}}
    bad = {"type": "function", "function": {"name": "bad", "parameters": parameters}}
    told = r'tools.2.function.parameters: "strin" is no type of JSON Schema \(at /properties/a\)'
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        ask(client, server, tools=[*TOOLS, bad], tool_choice="required", stream=True)
    assert caught.value.param == "tools.2.function.parameters"
