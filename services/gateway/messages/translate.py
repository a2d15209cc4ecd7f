"""Requests of ``/v1/messages`` as chat requests: the same conversation, tools and wishes under other names."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.chat_schema import ChatRequest
from services.gateway.kinds import joined
from services.gateway.messages.schema import (
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from services.gateway.model import Limits
from services.gateway.schemas import validate
from shared.errors import RequestError

# What a chat request's errors call a field, and its name here.
NAMES = {
    r"tools\.(\d+)\.function\.parameters\b": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function\b": r"tools.\1",
    r"tool_choice\.function\b": "tool_choice",
    r"response_format(\.json_schema)?\b": "output_config.format",
    r"stop\b": "stop_sequences",
}
SAME = ("temperature", "top_p", "top_k", "max_tokens", "seed", "priority", "cache_salt")


def chat_request(asked: CountTokensRequest, limits: Limits) -> ChatRequest:
    """Raises RequestError, with the names of chat requests."""
    body: dict[str, Any] = {
        "messages": _messages(asked),
        "tools": [_tool(tool) for tool in asked.tools] if asked.tools else None,
        **_tool_choice(asked),
        "chat_template_kwargs": _options(asked),
    }
    if asked.messages[-1].role == "assistant":
        body["continue_final_message"] = True
    if asked.wanted_format is not None:
        schema = {"name": "answer", "schema": asked.wanted_format.json_schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(asked, MessagesRequest):
        body |= {name: getattr(asked, name) for name in SAME}
        body["stop"] = asked.stop_sequences
    chat = validate(ChatRequest, {name: value for name, value in body.items() if value is not None}, limits)
    chat.check()
    return chat


def _options(asked: CountTokensRequest) -> dict[str, Any]:
    """What templates may know of; a model that reasons is told so in one of these ways."""
    options: dict[str, Any] = {}
    if asked.thinking is not None:
        options["enable_thinking"] = asked.thinking.type != "disabled"
    if asked.output_config is not None and asked.output_config.effort is not None:
        options["reasoning_effort"] = asked.output_config.effort
    return {**options, **(asked.chat_template_kwargs or {})}


def _messages(asked: CountTokensRequest) -> list[dict[str, Any]]:
    """Turns of one role that follow each other are one, as Anthropic has it."""
    messages: list[dict[str, Any]] = []
    if asked.system is not None:
        messages.append({"role": "system", "content": joined(asked.system)})
    for place, message in enumerate(asked.messages):
        for one in _assistant(message, place) if message.role == "assistant" else _user(message, place):
            last = messages[-1] if messages else {"role": ""}
            if one["role"] == last["role"] != "tool":
                for name, value in one.items():
                    if name != "role":
                        last[name] = _both(last.get(name), value)
            else:
                messages.append(one)
    return messages


def _both(before: Any, after: Any) -> Any:
    """Lists one behind the other, texts joined by a line end."""
    if before is None or after is None:
        return after if before is None else before
    return before + after if isinstance(before, list) else f"{before}\n{after}"


def _assistant(message: InputMessage, place: int) -> list[dict[str, Any]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            raise _misplaced(place, index, block.type, message.role)
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts else None}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [turn]


def _user(message: InputMessage, place: int) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before the text that came with them."""
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            content = joined(block.content or [])
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        else:
            raise _misplaced(place, index, block.type, message.role)
    if texts or not results:
        results.append({"role": message.role, "content": "\n".join(texts)})
    return results


def _misplaced(message: int, block: int, kind: str, role: str) -> RequestError:
    path = f"messages.{message}.content.{block}"
    return RequestError(f"{path}: a {role} message holds no {kind} block", code="invalid_value", param=path)


def _tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _tool_choice(asked: CountTokensRequest) -> dict[str, Any]:
    choice = asked.tool_choice
    if choice is None:
        return {}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        if choice.name is None:
            message = "tool_choice.name: required when its type is 'tool'"
            raise RequestError(message, code="missing_required_parameter", param="tool_choice.name")
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}, **parallel}
    return {"tool_choice": "required" if choice.type == "any" else choice.type, **parallel}
