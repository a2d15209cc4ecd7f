"""Messages of a chat, and what a chat template is given beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo

from services.gateway.fields import shown
from services.gateway.model import Told, invalid, limits_of
from shared.errors import RequestError


class TextPart(Told):
    """Marks of what to cache are ignored with all else that a part may carry: every prompt is cached."""

    type: Literal["text"]
    text: str


class RefusalPart(Told):
    type: Literal["refusal"]
    refusal: str


_PARTS = ("text", "refusal")  # types of parts, each also the field that holds its text


def _content(value: Any) -> str | list[dict[str, str]] | None:
    """Text, or a list of text parts, of which each may be a string."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("should be a string or a list of text parts")
    return [_part(part, index) for index, part in enumerate(value)]


def _part(part: Any, index: int) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(f"part {index} should be a string or an object with a type, got {shown(part)}")
    kind = part["type"]
    if kind not in _PARTS:
        raise invalid(f"part {index} has type {shown(kind)}; only 'text' is supported")
    if not isinstance(part.get(kind), str):
        raise invalid(f"part {index} should be {{'type': '{kind}', '{kind}': string}}, got {shown(part)}")
    return {"type": "text", "text": part[kind]}


Content = Annotated[
    str | list[dict[str, str]] | None,
    PlainValidator(_content, json_schema_input_type=str | list[str | TextPart | RefusalPart] | None),
]


def text_of(content: str | list[dict[str, str]] | None) -> str:
    """Parts are joined by line feeds, as they are for most templates."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


class FunctionCall(Told):
    """The call of an assistant's message in OpenAI's older form."""

    name: str
    arguments: str


_NOT_FOR_TEMPLATES = {"annotations", "function_call", "parsed", "provider_specific_fields", "reasoning"}


class Message(Told):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # these come back with answers of OpenAI's, and say nothing here,
    audio: None = None
    parsed: Any = None  # as what clients add to answers
    provider_specific_fields: Any = None

    def plain(self) -> dict[str, Any]:
        """For the chat template, which knows newer names by the older ones: "system" and "reasoning_content"."""
        fields = self.model_dump(exclude_none=True, exclude=_NOT_FOR_TEMPLATES)
        if self.reasoning is not None:
            fields.setdefault("reasoning_content", self.reasoning)
        return {**fields, "role": "system" if self.role == "developer" else self.role, "content": self.content or ""}


def plain(messages: list[Message]) -> list[dict[str, Any]]:
    """As chat templates know them. Functions' calls and results become those of tools, joined by ids made here."""
    found, calls = [], 0
    for message in messages:
        fields = message.plain()
        if message.function_call is not None:
            calls += 1
            function = message.function_call.model_dump()
            fields["tool_calls"] = [{"id": f"call_{calls}", "type": "function", "function": function}]
        elif message.role == "function":
            fields |= {"role": "tool", "tool_call_id": f"call_{calls}"}
        found.append(fields)
    return found


def check_count(field: str, value: Any, info: ValidationInfo) -> None:
    """RequestError for more messages than the context has tokens, as each is at least one."""
    limit = limits_of(info).max_model_len
    if isinstance(value, list) and len(value) > limit:
        raise RequestError(
            f"{field}: {len(value)} messages are more than the model's context of {limit} tokens",
            code="context_length_exceeded",
            param=field,
        )


def _messages(value: Any, info: ValidationInfo) -> Any:
    check_count("messages", value, info)
    return value


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(_messages)]


def check_messages(messages: list[Message]) -> None:
    for index, message in enumerate(messages):
        needed: dict[str, Any] = {}
        if message.role == "function":  # whose content may be null
            needed["name"] = message.name
        elif message.role != "assistant":
            needed["content"] = message.content
        if message.role == "tool":
            needed["tool_call_id"] = message.tool_call_id
        for name, value in needed.items():
            if value is None:
                param = f"messages.{index}.{name}"
                text = f"{param}: required in a message of role {message.role!r}"
                raise RequestError(text, code="missing_required_parameter", param=param)
        if message.function_call is not None and message.tool_calls:
            param = f"messages.{index}.function_call"
            raise RequestError(f"{param}: contradicts tool_calls", code="invalid_value", param=param)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def style_variables(effort: str | None, verbosity: str | None) -> dict[str, Any]:
    """How an answer shall be, as the variables by which chat templates know of it; most know of none."""
    variables: dict[str, Any] = {"reasoning_effort": effort, "verbosity": verbosity}
    if effort == "none":
        variables["enable_thinking"] = False
    return {name: value for name, value in variables.items() if value is not None}


def template_variables(
    given: dict[str, Any] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    documents: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """chat_template_kwargs, and over them the variables that are fields of their own. Raises RequestError."""
    if add_generation_prompt and continue_final_message:
        message = "continue_final_message: cannot be true together with add_generation_prompt"
        raise RequestError(message, code="invalid_value", param="continue_final_message")
    fields = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "documents": documents,
    }
    return {**(given or {}), **{name: value for name, value in fields.items() if value is not None}}
