"""What the bodies of ``/v1/responses`` may hold.

Only what this server can do is taken: text, function tools, and nothing that would have to be stored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo

from services.gateway.conversation import Effort, Verbosity, check_count
from services.gateway.fields import STORED, TEXT_ONLY, VLLM, OnlyAt, shown
from services.gateway.kinds import by_type, pick
from services.gateway.model import Model, Off, Told, invalid
from services.gateway.schemas import LogprobCount, Sampled
from services.gateway.tools import NO_CUSTOM
from shared.errors import RequestError

HOSTED = "this server runs no tools itself; give functions, and run their calls"

Status = Literal["in_progress", "completed", "incomplete"] | None


class ResponsePart(Told):
    """A part of a message. What an answer's parts carry beside their text has no effect when sent back."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None

    @property
    def plain(self) -> str:
        return self.text


class RefusalPart(Told):
    type: Literal["refusal"]
    refusal: str

    @property
    def plain(self) -> str:
        return self.refusal


Part = Annotated[
    ResponsePart | RefusalPart,
    by_type(
        {"input_text": ResponsePart, "output_text": ResponsePart, "text": ResponsePart, "refusal": RefusalPart},
        {"input_image": TEXT_ONLY, "input_file": TEXT_ONLY, "input_audio": TEXT_ONLY},
    ),
]


def _text_or_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Content = Annotated[
    list[Part], Field(fail_fast=True), BeforeValidator(_text_or_parts, json_schema_input_type=str | list[Part])
]


class MessageItem(Told):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status = None
    phase: str | None = None


class FunctionCallItem(Told):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status = None
    parsed_arguments: Any = None
    namespace: None = None
    caller: Any = None
    async_: bool | None = Field(None, alias="async")


class FunctionOutputItem(Told):
    """What such a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status = None
    name: str | None = None


class ReasoningText(Told):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Told):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(Told):
    """What an earlier answer thought; encrypted_content is nothing that this server made, and has no effect."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryText] = Field([], fail_fast=True)
    content: list[ReasoningText] | None = Field(None, fail_fast=True)
    encrypted_content: str | None = None
    status: Status = None

    @property
    def plain(self) -> str:
        return "\n".join(part.text for part in self.content or [])


Item = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem,
    by_type(
        {
            "message": MessageItem,
            "function_call": FunctionCallItem,
            "function_call_output": FunctionOutputItem,
            "reasoning": ReasoningItem,
        },
        {"item_reference": STORED},
        default="message",
    ),
]


def _items(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if info.data.get("truncation") != "auto":
        check_count("input", value, info)
    return value


class FunctionTool(Told):
    """output_schema has no effect: what a function returns is the client's affair."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Off = None
    async_: Off = Field(None, alias="async")

    @property
    def told(self) -> dict[str, Any]:
        """As answers tell of it."""
        always = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        return {**always, **self.model_dump(exclude_none=True, by_alias=True)}

    @property
    def for_chat(self) -> dict[str, Any]:
        function = {"name", "description", "parameters", "strict"}
        return {"type": "function", "function": self.model_dump(exclude_none=True, include=function)}


Tool = Annotated[
    FunctionTool,
    by_type(
        {"function": FunctionTool},
        {"custom": NO_CUSTOM}
        | dict.fromkeys(
            (
                *("web_search", "web_search_preview", "file_search", "computer_use_preview", "computer", "tool_search"),
                *("code_interpreter", "image_generation", "local_shell", "shell", "apply_patch", "mcp"),
            ),
            HOSTED,
        ),
    ),
]


class NamedFunction(Model):
    type: Literal["function"]
    name: str


class AllowedTools(Model):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, fail_fast=True)


def _tool_choice(value: Any, info: ValidationInfo) -> Any:
    if value is None or value in ("none", "auto", "required"):
        return value
    if isinstance(value, str):
        raise invalid(f"should be none, auto, required or an object, got {shown(value)}")
    return pick(value, {"function": NamedFunction, "allowed_tools": AllowedTools}, {}, "", info)


ToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None


class PlainFormat(Model):
    type: Literal["text"]


class JsonObjectFormat(Model):
    type: Literal["json_object"]


class JsonSchemaFormat(Model):
    type: Literal["json_schema"]
    name: str
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


Format = Annotated[
    PlainFormat | JsonObjectFormat | JsonSchemaFormat,
    by_type({"text": PlainFormat, "json_object": JsonObjectFormat, "json_schema": JsonSchemaFormat}, {}),
]


class TextConfig(Model):
    format: Format | None = None
    verbosity: Verbosity | None = None


class Reasoning(Model):
    """effort goes to the chat template; summaries are not made."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None  # what a template shows of it is its affair
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Model):
    include_obfuscation: bool | None = None


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]

WITHOUT_EFFECT: dict[str, type] = {"client_metadata": dict, "personality": str, "session_id": str}
ONLY_AT = {
    **VLLM,
    "access_programs": OnlyAt("this server has none"),
    "background": OnlyAt("this server answers while the client waits", (False,)),
    "background_options": OnlyAt("this server answers while the client waits"),
    "context_management": OnlyAt("conversations are not compacted; see truncation", ([],)),
    "conversation": OnlyAt(STORED),
    "enable_response_messages": OnlyAt("/v1/chat/completions/render tells the prompt", (False,)),
    "image": OnlyAt(TEXT_ONLY),
    "moderation": OnlyAt("this server has no moderation model"),
    "previous_input_messages": OnlyAt("they are of a format that no model here has", ([],)),
    "previous_response_id": OnlyAt(STORED),
    "prompt": OnlyAt("this server stores no prompt templates"),
}


class ResponsesRequest(Sampled):
    without_effect = WITHOUT_EFFECT
    only_at = ONLY_AT

    truncation: Literal["auto", "disabled"] | None = None  # before ``input``, which may be any long with it
    input: Annotated[
        list[Item],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_items, json_schema_input_type=str | list[Item]),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, ge=1)
    tools: list[Tool] | None = Field(None, fail_fast=True)
    tool_choice: Annotated[ToolChoice, PlainValidator(_tool_choice, json_schema_input_type=ToolChoice)] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Included] | None = None
    top_logprobs: LogprobCount = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or [])

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only allowed when stream is true", param="stream_options")
