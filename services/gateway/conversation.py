"""Messages of a chat, and what a chat template is given beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo

from services.gateway.fields import shown
from services.gateway.model import Model, invalid, limits_of
from shared.errors import RequestError


class TextPart(Model):
    type: Literal["text"]
    text: str


def _content(value: Any) -> str | list[dict[str, str]] | None:
    """Text, or a list of text parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("should be a string or a list of text parts")
    for index, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(f"part {index} should be an object with a type, got {shown(part)}")
        if part["type"] != "text":
            raise invalid(f"part {index} has type {shown(part['type'])}; only 'text' is supported")
        if not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
            raise invalid(f"part {index} should be {{'type': 'text', 'text': string}}, got {shown(part)}")
    return value


class Message(Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[dict[str, str]] | None,
        PlainValidator(_content, json_schema_input_type=str | list[TextPart] | None),
    ] = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # these three come back with answers of OpenAI's, and say nothing here
    audio: None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        """For the chat template, which knows newer names by the older ones: "system" and "reasoning_content"."""
        fields = self.model_dump(exclude_none=True, exclude={"annotations", "reasoning"})
        if self.reasoning is not None:
            fields.setdefault("reasoning_content", self.reasoning)
        return {**fields, "role": "system" if self.role == "developer" else self.role, "content": self.content or ""}


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
        needed = {"content": message.content} if message.role != "assistant" else {}
        if message.role == "tool":
            needed["tool_call_id"] = message.tool_call_id
        for name, value in needed.items():
            if value is None:
                param = f"messages.{index}.{name}"
                text = f"{param}: required in a message of role {message.role!r}"
                raise RequestError(text, code="missing_required_parameter", param=param)


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
