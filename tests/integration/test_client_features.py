"""Clients that nobody here wrote, at work: each streams, calls tools and gets structured output.

langchain, litellm and llama-index want other versions of what they share with Quire, so they live in an environment of
their own (``make clients``), without which their tests are skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.integration.server import Server

pytestmark = pytest.mark.client

HERE = Path(__file__).parent / "clients"
CLIENTS = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
QUESTION = "What is the capital of France?"
CAPITAL = "The capital of France is Paris."
FORECAST: Any = [{"role": "user", "content": "How is the weather in Paris in the next 3 days?"}]


class Weather(BaseModel):
    """Tells the weather at a place."""

    model_config = ConfigDict(extra="forbid", strict=True)

    city: str = Field(max_length=20)
    days: int = Field(ge=0, le=9)


SCHEMA = Weather.model_json_schema()
FUNCTION: Any = {"name": "weather", "description": "Tells the weather", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client(client_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client_server: Server) -> str:
    return client_server.model


def test_openai_chat_calls_a_tool(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": FORECAST, "tools": TOOLS, "tool_choice": NAMED, "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=200)
    [call] = whole.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    Weather.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**asked, max_tokens=200) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees."}
    said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    messages = [*FORECAST, said, result]
    answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=20, temperature=0)
    assert answer.choices[0].message.content


def test_openai_chat_calls_a_function_in_the_older_form(client: openai.OpenAI, model: str) -> None:
    """What programs of before there were tools send: it is answered as the same request with tools is."""
    asked: Any = {"model": model, "temperature": 0, "max_tokens": 200}
    functions: Any = {"functions": [FUNCTION], "function_call": {"name": "weather"}}
    message = client.chat.completions.create(messages=FORECAST, **functions, **asked).choices[0].message
    assert message.function_call is not None and message.tool_calls is None
    assert message.function_call.name == "weather"
    Weather.model_validate_json(message.function_call.arguments)
    with client.chat.completions.stream(messages=FORECAST, **functions, **asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.function_call == message.function_call
    whole = client.chat.completions.create(messages=FORECAST, tools=TOOLS, tool_choice=NAMED, **asked)
    [call] = whole.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.arguments == message.function_call.arguments
    result: Any = {"role": "function", "name": "weather", "content": "Sunny, 20 degrees."}
    answer = client.chat.completions.create(messages=[*FORECAST, message, result], functions=[FUNCTION], **asked)
    assert answer.choices[0].message.content


def test_openai_responses_leave_out_what_is_too_long(client: openai.OpenAI, model: str) -> None:
    """The question and the instructions stay, however long the conversation has been."""
    said: Any = [
        turn
        for number in range(100)
        for turn in (
            {"role": "user", "content": f"Remember the number {number}."},
            {"role": "assistant", "content": f"I will remember the number {number}."},
        )
    ]
    conversation: Any = [*said, {"role": "user", "content": QUESTION}]
    asked: Any = {"model": model, "input": conversation, "instructions": "Be brief.", "temperature": 0}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    answer = client.responses.create(truncation="auto", **asked)
    assert answer.output_text == CAPITAL and answer.truncation == "auto" and answer.usage is not None
    assert 2048 - 256 - 60 < answer.usage.input_tokens <= 2048 - 256  # room for an answer is left, of an eighth


def test_what_is_kept_of_a_prompt_is_all_that_counts(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "temperature": 0, "max_tokens": 8}
    ids: Any = client.completions.create(
        prompt="One, two, three, four, five, six,", extra_body={"return_token_ids": True}, **asked
    ).choices[0]
    kept = client.completions.create(prompt=ids.prompt_token_ids[-5:], **asked)
    cut = client.completions.create(
        prompt="One, two, three, four, five, six,", extra_body={"truncate_prompt_tokens": 5}, **asked
    )
    assert cut.choices[0].text == kept.choices[0].text and cut.usage is not None and cut.usage.prompt_tokens == 5


def test_openai_chat_parses_structured_output(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=FORECAST, response_format=Weather, max_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_openai_responses_stream(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input=QUESTION, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(deltas) > 3 and "".join(deltas) == final.output_text == CAPITAL
    assert final.status == "completed" and final.usage is not None and final.usage.output_tokens == 8
    whole = client.responses.create(model=model, input=QUESTION, temperature=0)
    assert whole.output_text == CAPITAL


def test_openai_responses_call_a_tool_and_go_on(client: openai.OpenAI, model: str) -> None:
    tools: Any = [{"type": "function", **FUNCTION, "strict": True}]
    choice: Any = {"type": "function", "name": "weather"}
    asked: Any = {"model": model, "tools": tools, "temperature": 0, "max_output_tokens": 200}
    whole = client.responses.create(input=FORECAST, tool_choice=choice, **asked)
    [call] = [item for item in whole.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    with client.responses.stream(input=FORECAST, tool_choice=choice, **asked) as stream:
        names = [event.type for event in stream]
        [streamed] = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert streamed.arguments == call.arguments
    assert "response.function_call_arguments.delta" in names and "response.function_call_arguments.done" in names
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 20 degrees."}
    conversation: Any = [*FORECAST, *whole.output, result]
    assert client.responses.create(input=conversation, **{**asked, "max_output_tokens": 20}).output_text


def test_openai_responses_parse_structured_output(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.parse(
        model=model, input=FORECAST, text_format=Weather, max_output_tokens=200, temperature=0
    )
    assert isinstance(answer.output_parsed, Weather)


@pytest.fixture(scope="module")
def claude(client_server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=client_server.url, api_key="none", max_retries=0) as client:
        yield client


def greedy(model: str, max_tokens: int = 200) -> Any:
    """Newer versions of Anthropic's client have no sampling parameters."""
    return {"model": model, "max_tokens": max_tokens, "extra_body": {"temperature": 0}}


def test_anthropic_streams(claude: anthropic.Anthropic, model: str) -> None:
    question: Any = [{"role": "user", "content": QUESTION}]
    assert claude.messages.count_tokens(model=model, messages=question).input_tokens == 37
    with claude.messages.stream(messages=question, **greedy(model)) as stream:
        assert "".join(stream.text_stream) == CAPITAL
        message = stream.get_final_message()
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == 8
    assert (message.usage.cache_read_input_tokens or 0) + message.usage.input_tokens == 37


def test_anthropic_calls_a_tool_and_goes_on(claude: anthropic.Anthropic, model: str) -> None:
    tools: Any = [{"name": "weather", "description": "Tells the weather", "input_schema": SCHEMA}]
    choice: Any = {"type": "tool", "name": "weather"}
    whole = claude.messages.create(messages=FORECAST, tools=tools, tool_choice=choice, **greedy(model))
    [call] = [block for block in whole.content if block.type == "tool_use"]
    assert whole.stop_reason == "tool_use" and call.name == "weather"
    Weather.model_validate(call.input)
    with claude.messages.stream(messages=FORECAST, tools=tools, tool_choice=choice, **greedy(model)) as stream:
        [streamed] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input == call.input
    result: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 20 degrees."}]
    conversation: Any = [*FORECAST, {"role": "assistant", "content": whole.content}]
    conversation.append({"role": "user", "content": result})
    assert claude.messages.create(messages=conversation, tools=tools, **greedy(model, 20)).content


def test_anthropic_max_tokens_may_be_more_than_the_context(claude: anthropic.Anthropic, model: str) -> None:
    question: Any = [{"role": "user", "content": QUESTION}]
    assert claude.messages.create(messages=question, **greedy(model, 20_000)).stop_reason == "end_turn"


def test_anthropic_gets_structured_output(claude: anthropic.Anthropic, model: str) -> None:
    wanted: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = claude.messages.create(messages=FORECAST, output_config=wanted, **greedy(model))
    assert answer.content[0].type == "text"
    Weather.model_validate_json(answer.content[0].text)


@pytest.mark.skipif(shutil.which("npm") is None, reason="no Node.js with npm on this machine")
def test_openai_javascript(client_server: Server, model: str, node_modules: Path) -> None:
    told = run(["node", "features.mjs", f"{client_server.url}/v1", model], node_modules)
    assert told["text"] == CAPITAL
    assert told["events"][0] == "response.created" and told["events"][-1] == "response.completed"
    for name, arguments in (told["call"], told["responses_call"]):
        assert name == "weather"
        Weather.model_validate(arguments)
    Weather.model_validate(told["structured"])


@pytest.mark.skipif(not CLIENTS.exists(), reason="their environment is not there (make clients)")
@pytest.mark.parametrize("name", ["langchain", "litellm", "llama_index"])
def test_frameworks(client_server: Server, model: str, name: str) -> None:
    told = run([str(CLIENTS), str(HERE / f"{name}_client.py"), client_server.url, model], HERE)
    assert told["text"] == CAPITAL
    for called, arguments in (told["call"], told["streamed_call"]):
        assert called.lower() == "weather"
        assert isinstance(arguments["city"], str) and isinstance(arguments["days"], int)
    assert isinstance(told["structured"]["city"], str) and isinstance(told["structured"]["days"], int)
    assert told.get("responses", CAPITAL) == told.get("anthropic", CAPITAL) == CAPITAL


def run(command: list[str], folder: Path) -> Any:
    """What a client's program told: its last line, as JSON."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])
