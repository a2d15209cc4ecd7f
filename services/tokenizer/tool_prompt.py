"""Tools for chat templates that know none: told to the model in words, and calls and results written into the turns."""

from __future__ import annotations

import json
from typing import Any

from services.tokenizer.messages import text_of
from services.tokenizer.parsers.output import OutputFormat
from shared.wire import ToolUse


def with_tools(messages: list[dict[str, Any]], use: ToolUse | None, format: OutputFormat) -> list[dict[str, Any]]:
    """``messages`` with every call and result as text, and with what the model has to know of the tools in front."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        turn = _as_text(message, format)
        if message["role"] == "tool" and turns and turns[-1].get("of_tools"):
            turns[-1]["content"] += "\n" + turn["content"]
        else:
            turns.append(turn)
    plain = [{key: value for key, value in turn.items() if key != "of_tools"} for turn in turns]
    if use is None or not use.tools:
        return plain
    told = _instructions(use, format)
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{text_of(plain[0].get('content', ''))}\n\n{told}".strip()}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _as_text(message: dict[str, Any], format: OutputFormat) -> dict[str, Any]:
    content = text_of(message.get("content", ""))
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>", "of_tools": True}
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [format.written(one.get("name") or "", _json(one.get("arguments"))) for one in functions]
    return {"role": message["role"], "content": "\n".join([content, *calls] if content else calls)}


def _instructions(use: ToolUse, format: OutputFormat) -> str:
    tools = "\n".join(_json(tool) for tool in use.tools)
    call = format.written("the function's name", '{"the argument\'s name": "its value"}')
    return (
        f"You may call these functions, described by one JSON object a line:\n<tools>\n{tools}\n</tools>\n"
        f"To call one, answer with nothing but\n{call}\n"
        f"The result comes back inside <tool_response> and </tool_response>."
    )


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
