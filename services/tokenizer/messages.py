"""OpenAI chat messages as templates expect them: dicts whose content is text, or text in parts."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from shared.errors import RequestError


def normalize(messages: Any) -> list[dict[str, Any]]:
    """Checked copies of ``messages``: nulls left out, tool arguments parsed where they are JSON.

    Raises RequestError naming the message and field that is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty array", param="messages")
    return [_message(message, f"messages.{i}") for i, message in enumerate(messages)]


def text_of(content: str | list[dict[str, str]]) -> str:
    """Parts are joined by line feeds."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def characters(messages: Any) -> int:
    """Characters of all contents; whatever is no message has none."""
    listed = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in listed if isinstance(message, dict)]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return sum(len(text) for text in texts if isinstance(text, str))


def parts_of(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object, not {_name(message)}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a non-empty string, not {role!r}", param=f"{where}.role")
    result = {key: value for key, value in message.items() if value is not None}
    if "content" in result:
        result["content"] = _content(result["content"], f"{where}.content")
    elif role != "assistant":
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{where}.tool_calls")
    return result


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or an array of parts, not {_name(content)}", param=where)
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None:
            raise RequestError(f"{where}.{i} must be an object with a type", param=f"{where}.{i}")
        if kind != "text":
            raise RequestError(
                f"{where}.{i}.type is {kind!r}; this model takes only 'text' parts", param=f"{where}.{i}.type"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.{i}.text must be a string", param=f"{where}.{i}.text")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """OpenAI sends a call's arguments as JSON text; templates print them as objects.

    What a model wrote and is no JSON stays text: the conversation has to go on.
    """
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be an array, not {_name(calls)}", param=where)
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RequestError(f"{where}.{i}.function must be an object", param=f"{where}.{i}.function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments) if arguments else {}
        for field, value in (("id", call.get("id")), ("function.name", function.get("name"))):
            if not isinstance(value, str | None):
                raise RequestError(f"{where}.{i}.{field} must be a string", param=f"{where}.{i}.{field}")
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _name(value: Any) -> str:
    return {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
