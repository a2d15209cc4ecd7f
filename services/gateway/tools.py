"""The functions a chat's model may call, as OpenAI's API describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from services.gateway.fields import shown
from services.gateway.kinds import by_type
from services.gateway.model import Model, Told, invalid
from shared.errors import RequestError
from shared.wire import ToolUse

MAX_TOOLS = 128
MODES = ("none", "auto", "required")
NO_CUSTOM = "calls have arguments in JSON; give a function with one string parameter"


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    kind = value.get("type", "object")
    if kind != "object":
        raise invalid(f"should be a JSON schema of type 'object', its type is {shown(kind)}")
    return value


class Function(Told):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_schema)] | None = None
    strict: bool | None = None


class Tool(Told):
    type: Literal["function"]
    function: Function


AnyTool = Annotated[Tool, by_type({"function": Tool}, {"custom": NO_CUSTOM})]


class FunctionName(Model):
    name: str


class NamedTool(Model):
    """A tool_choice that names the function to call."""

    type: Literal["function"]
    function: FunctionName


class AllowedList(Model):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, fail_fast=True)


class ChatAllowedTools(Model):
    """A tool_choice that names those of the tools that may be called; the model is not shown the others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


Choice = Literal["none", "auto", "required"] | NamedTool | ChatAllowedTools | None


def check_choice(value: Any) -> str | NamedTool | ChatAllowedTools | None:
    if value is None or (isinstance(value, str) and value in MODES):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        if value.keys() == {"type", "function"} and isinstance(function, dict) and function.keys() == {"name"}:
            return NamedTool.model_validate(value)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return ChatAllowedTools.model_validate(value)
    named = "{'type': 'function', 'function': {'name': string}}"
    raise invalid(f"should be 'none', 'auto', 'required' or {named}, got {shown(value)}")


FunctionChoice = Literal["none", "auto"] | FunctionName | None


def check_function_call(value: Any) -> str | FunctionName | None:
    """OpenAI's older form of tool_choice."""
    if value is None or (isinstance(value, str) and value in ("none", "auto")):
        return value
    if isinstance(value, dict) and value.keys() == {"name"} and isinstance(value["name"], str):
        return FunctionName(name=value["name"])
    raise invalid(f"should be 'none', 'auto' or {{'name': string}}, got {shown(value)}")


def use_of(
    tools: list[Tool] | None, choice: str | NamedTool | ChatAllowedTools | None, parallel: bool
) -> ToolUse | None:
    """What a tokenizer needs to know of the tools; None when there are none. Raises RequestError for what cannot be."""
    if not tools:
        if choice not in (None, "none"):
            raise RequestError("tool_choice: only allowed when tools are given", param="tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            param = f"tools.{index}.function.name"
            raise RequestError(f"{param}: {name!r} is the name of another tool too", param=param)
    if isinstance(choice, ChatAllowedTools):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        for index, name in enumerate(allowed):
            if name not in names:
                param = f"tool_choice.allowed_tools.tools.{index}.function.name"
                raise RequestError(f"{param}: {shown(name)} is not among the tools", param=param)
        tools = [tool for tool in tools if tool.function.name in allowed]
        choice = choice.allowed_tools.mode
    plain = [tool.model_dump(exclude_none=True) for tool in tools]
    if not isinstance(choice, NamedTool):
        return ToolUse(plain, choice or "auto", "", parallel)
    if choice.function.name not in names:
        raise RequestError(
            f"tool_choice.function.name: {shown(choice.function.name)} is not among the tools",
            param="tool_choice.function.name",
        )
    return ToolUse(plain, "function", choice.function.name, parallel)
