"""Tool calls and reasoning as OpenAI's clients read them, whole and streamed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from shared.channels import CONTENT, REASONING, arguments_of, name_of
from tests.services.gateway.background import CHAT, Posted, Streamed, put_together
from tests.services.gateway.pipeline import Answer, Pipeline

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "g", "description": "of no arguments", "strict": True}}
BODY = {**CHAT, "tools": [TOOL, OTHER]}
ANSWER = [
    (REASONING, "Hm"),
    (REASONING, "m."),
    (CONTENT, "Let me"),
    (CONTENT, " see."),
    (name_of(0), "f"),
    (arguments_of(0), '{"a":'),
    (arguments_of(0), " 1}"),
    (name_of(1), "g"),
    (arguments_of(1), "{}"),
]


def play(answer: Answer) -> None:
    """The pieces of ``ANSWER``, in as many messages, and its end."""
    answer.accept()
    for channel, text in ANSWER:
        answer.text(text, channel=channel)
    answer.finish("stop", reasoning=2)


@pytest.mark.parametrize("count", [None, 0, 3])
def test_usage_counts_the_tokens_of_reasoning_where_a_parser_looks_for_it(
    pipeline: Pipeline, client: httpx.Client, count: int | None
) -> None:
    details = None if count is None else {"reasoning_tokens": count}
    posted = Posted(client, "/v1/chat/completions", CHAT)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("yes", tokens=4)
    answer.finish("stop", reasoning=count)
    usage = posted.response().json()["usage"]
    assert ("completion_tokens_details" in usage) is (count is not None)
    assert usage.get("completion_tokens_details") == details and usage["completion_tokens"] == 4
    streamed = Streamed(client, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("yes", tokens=4)
    answer.finish("stop", reasoning=count)
    streamed.opened()
    assert [chunk["usage"] for chunk in streamed.rest() if chunk != "[DONE]"][-1] == usage


def test_what_reaches_the_tokenizer(pipeline: Pipeline, client: httpx.Client) -> None:
    named = {"type": "function", "function": {"name": "g"}}
    cases: list[tuple[dict[str, Any], tuple[str, str, bool]]] = [
        ({}, ("auto", "", True)),
        ({"tool_choice": None, "parallel_tool_calls": False}, ("auto", "", False)),
        ({"tool_choice": "none"}, ("none", "", True)),
        ({"tool_choice": "required", "parallel_tool_calls": True}, ("required", "", True)),
        ({"tool_choice": named}, ("function", "g", True)),
    ]
    for fields, (choice, function, parallel) in cases:
        posted = Posted(client, "/v1/chat/completions", {**BODY, **fields})
        answer = pipeline.tokenizer.submitted()
        answer.reject(400, "", "", "enough")
        posted.response()
        use = answer.submit.tools
        assert use is not None and (use.choice, use.function, use.parallel) == (choice, function, parallel)
        assert use.tools == [TOOL, OTHER]
    for fields in ({}, {"tools": []}, {"tools": None, "tool_choice": "none"}):
        posted = Posted(client, "/v1/chat/completions", {**CHAT, **fields})
        answer = pipeline.tokenizer.submitted()
        answer.reject(400, "", "", "enough")
        posted.response()
        assert answer.submit.tools is None


def test_a_whole_answer(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/v1/chat/completions", BODY)
    play(pipeline.tokenizer.submitted())
    choice = posted.response().json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Let me see.", "Hmm.", "Hmm.")
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": '{"a": 1}'} and first["type"] == "function"
    assert second["function"] == {"name": "g", "arguments": "{}"}
    assert first["id"].startswith("call_") and second["id"].startswith("call_") and first["id"] != second["id"]


def test_a_stream_that_openais_own_client_puts_together(pipeline: Pipeline, client: httpx.Client) -> None:
    streamed = Streamed(client, "/v1/chat/completions", BODY)
    play(pipeline.tokenizer.submitted())
    streamed.opened()
    *chunks, done = streamed.rest()
    assert done == "[DONE]"
    choice = put_together(chunks)
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    calls = choice.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert "".join(chunk["choices"][0]["delta"].get("reasoning_content", "") for chunk in chunks) == "Hmm."

    entries = [entry for chunk in chunks for entry in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert all(len(chunk["choices"][0]["delta"].get("tool_calls", [])) <= 1 for chunk in chunks)
    opening = entries[0]
    assert opening == {
        "index": 0, "id": opening["id"], "type": "function", "function": {"name": "f", "arguments": ""}
    }  # fmt: skip
    further = [entry for entry in entries if entry["index"] == 0][1:]
    assert all(entry.keys() == {"index", "function"} and entry["function"].keys() == {"arguments"} for entry in further)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons.count(None) == len(reasons) - 1 and reasons[-1] == "tool_calls"


@pytest.mark.parametrize(("arguments", "reason"), [('{"a": "x"}', "tool_calls"), ('{"a": "', "stop")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_within_a_call_asks_for_no_tools(
    pipeline: Pipeline, client: httpx.Client, arguments: str, reason: str, stream: bool
) -> None:
    body = {**BODY, "stop_token_ids": [5]}
    opened = (Streamed if stream else Posted)(client, "/v1/chat/completions", body)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("f", channel=name_of(0))
    answer.text(arguments[:4], channel=arguments_of(0))
    answer.text(arguments[4:], channel=arguments_of(0))
    answer.finish("stop", stop_reason="5")
    if isinstance(opened, Streamed):
        opened.opened()
        choice = opened.rest()[-2]["choices"][0]
    else:
        choice = opened.response().json()["choices"][0]
    assert choice["finish_reason"] == reason


def test_an_answer_that_only_calls_has_null_content(pipeline: Pipeline, client: httpx.Client) -> None:
    posted = Posted(client, "/v1/chat/completions", BODY)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("f", channel=name_of(0))
    answer.text("{}", channel=arguments_of(0))
    answer.finish("stop")
    message = posted.response().json()["choices"][0]["message"]
    assert message["content"] is None and "reasoning_content" not in message


def test_finish_reasons(pipeline: Pipeline, client: httpx.Client) -> None:
    """A call that max_tokens or a stop cut off cannot be made; a named function ends with ``stop``, as OpenAI
    says it.
    """
    named = {"type": "function", "function": {"name": "f"}}
    for fields, reason, stopped_by, told in (
        ({}, "length", "", "length"),
        ({}, "stop", "", "tool_calls"),
        ({"stop_token_ids": [7]}, "stop", "7", "stop"),
        ({"stop": '"b'}, "stop", '"b', "stop"),
        ({"tool_choice": "required"}, "stop", "", "tool_calls"),
        ({"tool_choice": named}, "stop", "", "stop"),
    ):
        posted = Posted(client, "/v1/chat/completions", {**BODY, **fields})
        answer = pipeline.tokenizer.submitted()
        answer.accept()
        answer.text("f", channel=name_of(0))
        answer.text('{"a', channel=arguments_of(0))
        answer.finish(reason, stopped_by)
        choice = posted.response().json()["choices"][0]
        assert choice["finish_reason"] == told, (fields, reason)
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a'


def test_reasoning_is_left_out_where_it_is_not_wanted(pipeline: Pipeline, client: httpx.Client) -> None:
    body = {**CHAT, "include_reasoning": False}
    posted = Posted(client, "/v1/chat/completions", body)
    play(pipeline.tokenizer.submitted())
    message = posted.response().json()["choices"][0]["message"]
    assert message["content"] == "Let me see." and not {"reasoning", "reasoning_content"} & message.keys()
    streamed = Streamed(client, "/v1/chat/completions", body)
    play(pipeline.tokenizer.submitted())
    streamed.opened()
    *chunks, _ = streamed.rest()
    assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks)


def test_lost_and_repeated_pieces_of_calls(pipeline: Pipeline, client: httpx.Client) -> None:
    """Offsets run over all channels: what was lost is asked for, what comes twice is dropped, no call opens twice."""
    posted = Posted(client, "/v1/chat/completions", BODY)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    answer.text("see", channel=CONTENT)
    answer.text("ct", offset=5, channel=arguments_of(0))
    answer.text("f", offset=3, channel=name_of(0))
    answer.text("{", offset=4, channel=arguments_of(0))
    answer.text("f", offset=3, channel=name_of(0))
    answer.text('{"a": 1}', offset=4, channel=arguments_of(0))
    answer.finish("stop")
    message = posted.response().json()["choices"][0]["message"]
    assert message["content"] == "see"
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]


def test_what_templates_are_given(pipeline: Pipeline, client: httpx.Client) -> None:
    """Fields of their own go over chat_template_kwargs; an answer's message can be sent back as it came."""
    came = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    body = {
        "messages": [*CHAT["messages"], {**came, "reasoning": "Hm.", "tool_calls": []}],
        "chat_template": "{{ x }}",
        "chat_template_kwargs": {"x": 1, "add_generation_prompt": True},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "documents": [{"text": "y"}],
    }
    posted = Posted(client, "/v1/chat/completions", body)
    answer = pipeline.tokenizer.submitted()
    answer.reject(400, "", "", "enough")
    posted.response()
    assert answer.submit.chat_template == "{{ x }}"
    variables = {"x": 1, "add_generation_prompt": False, "continue_final_message": True, "documents": [{"text": "y"}]}
    assert answer.submit.template_kwargs == variables
    last = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": []}
    assert answer.submit.messages == [*CHAT["messages"], last]
