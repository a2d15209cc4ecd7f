"""OpenAI chat messages as templates expect them: dicts whose content is text."""

from __future__ import annotations

import json
from typing import Any

from shared.errors import RequestError


def normalize(messages: Any) -> list[dict[str, Any]]:
    """Checked copies of ``messages``: text parts joined by line feeds, nulls left out, tool arguments parsed.

    Raises RequestError naming the message and field that is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty array", param="messages")
    return [_message(message, f"messages.{i}") for i, message in enumerate(messages)]


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


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or an array of parts, not {_name(content)}", param=where)
    texts = []
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
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """OpenAI sends a call's arguments as JSON text; templates print them as objects."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be an array, not {_name(calls)}", param=where)
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RequestError(f"{where}.{i}.function must be an object", param=f"{where}.{i}.function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError) as error:
                name = f"{where}.{i}.function.arguments"
                raise RequestError(f"{name} is not valid JSON: {error}", param=name) from error
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _name(value: Any) -> str:
    return {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
