"""Requests of ``/v1/responses`` as chat requests: the same conversation, tools and wishes under other names."""

from __future__ import annotations

from typing import Any

from services.gateway.chat_schema import ChatRequest
from services.gateway.kinds import joined
from services.gateway.model import Limits
from services.gateway.responses.schema import (
    AllowedTools,
    FunctionCallItem,
    FunctionOutputItem,
    JsonSchemaFormat,
    NamedFunction,
    ReasoningItem,
    ResponsesRequest,
)
from services.gateway.schemas import Sampled, validate
from shared.errors import RequestError

# What a chat request's errors call a field, and its name here.
NAMES = {
    r"messages\b.*": "input",
    r"max_(completion_)?tokens\b": "max_output_tokens",
    r"tools\.(\d+)\.function\b": r"tools.\1",
    r"tool_choice\.function\b": "tool_choice",
    r"response_format(\.json_schema)?\b": "text.format",
}


def chat_request(asked: ResponsesRequest, limits: Limits) -> ChatRequest:
    """Raises RequestError, with the names of chat requests."""
    tools, choice = _tools(asked)
    body: dict[str, Any] = {
        **asked.model_dump(mode="json", by_alias=True, include=set(Sampled.model_fields), exclude_none=True),
        "messages": _messages(asked) if asked.truncation != "auto" else _newest(_messages(asked), limits.max_model_len),
        "max_completion_tokens": asked.max_output_tokens,
        "logprobs": asked.wants_logprobs or None,
        "top_logprobs": asked.top_logprobs if asked.wants_logprobs else None,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "response_format": _format(asked),
        "reasoning_effort": asked.reasoning.effort if asked.reasoning is not None else None,
        "verbosity": asked.text.verbosity if asked.text is not None else None,
        "chat_template_kwargs": asked.chat_template_kwargs,
    }
    chat = validate(ChatRequest, {name: value for name, value in body.items() if value is not None}, limits)
    chat.check()
    return chat


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    """What the assistant thought, said and called between two other items is one message of it."""
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    turn: dict[str, Any] | None = None
    for item in asked.input:
        if isinstance(item, FunctionOutputItem):
            turn = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
            continue
        if not isinstance(item, (FunctionCallItem, ReasoningItem)) and item.role != "assistant":
            turn = None
            messages.append({"role": item.role, "content": joined(item.content)})
            continue
        if turn is None:
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        if isinstance(item, ReasoningItem):
            _append(turn, "reasoning_content", item.plain)
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        else:
            _append(turn, "content", joined(item.content))
    return messages


def _newest(messages: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Without the oldest that cannot be among so many tokens, as each is at least one; system messages stay."""
    surplus, kept = len(messages) - tokens, []
    for message in messages:
        if surplus > 0 and message["role"] not in ("system", "developer"):
            surplus -= 1
        else:
            kept.append(message)
    return kept


def _append(turn: dict[str, Any], name: str, text: str) -> None:
    turn[name] = text if turn.get(name) is None else f"{turn[name]}\n{text}"


def _tools(asked: ResponsesRequest) -> tuple[list[dict[str, Any]] | None, Any]:
    """The tools that may be called, and which of them have to be."""
    tools, choice = asked.tools, asked.tool_choice
    if isinstance(choice, NamedFunction):
        return _for_chat(tools), {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedTools):
        names = {tool.name for tool in choice.tools}
        if unknown := names - {tool.name for tool in tools or []}:
            message = f"tool_choice: {sorted(unknown)[0]!r} is none of the tools"
            raise RequestError(message, code="invalid_value", param="tool_choice")
        return _for_chat([tool for tool in tools or [] if tool.name in names]), choice.mode
    return _for_chat(tools), choice


def _for_chat(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    return [tool.for_chat for tool in tools] if tools else None


def _format(asked: ResponsesRequest) -> dict[str, Any] | None:
    wanted = asked.text.format if asked.text is not None else None
    if wanted is None:
        return None
    if isinstance(wanted, JsonSchemaFormat):
        fields = wanted.model_dump(exclude_none=True, exclude={"type"}, by_alias=True)
        return {"type": wanted.type, "json_schema": fields}
    return {"type": wanted.type}
