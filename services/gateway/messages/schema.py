"""What the bodies of ``/v1/messages`` and of its ``count_tokens`` may hold: Anthropic's API, as far as it is text.

cache_control and citations may stand wherever clients put them, and have no effect: every prompt is cached.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from services.gateway.conversation import check_count
from services.gateway.fields import STORED, TEXT_ONLY, VLLM, OnlyAt
from services.gateway.kinds import by_type
from services.gateway.model import Model, Off, Told
from services.gateway.schemas import MAX_STOPS, Asked, StopString

HOSTED = "this server runs no tools itself; give tools with an input_schema, and run their calls"


class Block(Told):
    cache_control: dict[str, Any] | None = None
    citations: Any = None


class TextBlock(Block):
    type: Literal["text"]
    text: str

    @property
    def plain(self) -> str:
        return self.text


_NOT_TEXT = dict.fromkeys(("image", "document", "search_result", "container_upload"), TEXT_ONLY)


def _text_or_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[
    list[Annotated[TextBlock, by_type({"text": TextBlock}, _NOT_TEXT)]],
    Field(fail_fast=True),
    BeforeValidator(_text_or_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolUseBlock(Block):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: str | None = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    toolset_name: str | None = None


class ThinkingBlock(Block):
    """What an earlier answer thought; the signature has no effect."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block):
    """Never made here, and has no effect."""

    type: Literal["redacted_thinking"]
    data: str


_BLOCKS = {
    "text": TextBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
}
AnyBlock = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock, by_type(_BLOCKS, _NOT_TEXT)
]


class InputMessage(Told):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[AnyBlock],
        Field(fail_fast=True),
        BeforeValidator(_text_or_blocks, json_schema_input_type=str | list[AnyBlock]),
    ]


class CustomTool(Told):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Off = None


class ToolChoice(Model):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Model):
    """Switches reasoning on or off in chat templates that know of it; the budget is the model's own affair."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None


class OutputFormat(Model):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Model):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ClearThinking(Model):
    """What a template shows of earlier reasoning is its affair, so this has no effect."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


NOT_CUT = "conversations are taken as they are sent"


class ContextManagement(Model):
    edits: (
        list[
            Annotated[
                ClearThinking,
                by_type(
                    {"clear_thinking_20251015": ClearThinking},
                    {"clear_tool_uses_20250919": NOT_CUT, "compact_20260112": NOT_CUT},
                ),
            ]
        ]
        | None
    ) = Field(None, fail_fast=True)


WITHOUT_EFFECT: dict[str, type] = {
    "inference_geo": str,
    "metadata": dict,
    "service_tier": str,
    "session_id": str,
    "user_profile_id": str,
    "workspace_id": str,
}
ONLY_AT = {
    **VLLM,
    "billing_policy": OnlyAt("nothing is billed"),
    "compaction": OnlyAt(NOT_CUT),
    "container": OnlyAt(HOSTED),
    "diagnostics": OnlyAt("/internal/explain tells why a prompt is cached or not"),
    "fallback_credit_token": OnlyAt("this server has one model"),
    "fallbacks": OnlyAt("this server has one model", ([],)),
    "mcp_servers": OnlyAt(HOSTED, ([],)),
    "speed": OnlyAt("this server has one speed", ("standard",)),
    "thread": OnlyAt(STORED),
}


def _messages(value: Any, info: ValidationInfo) -> Any:
    check_count("messages", value, info)
    return value


class CountTokensRequest(Asked):
    """What makes the prompt."""

    without_effect = WITHOUT_EFFECT
    only_at = ONLY_AT

    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True), BeforeValidator(_messages)]
    system: Texts | None = None
    tools: list[Annotated[CustomTool, by_type({"custom": CustomTool}, {}, default="custom")]] | None = Field(
        None, fail_fast=True
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older name
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_format(self) -> OutputFormat | None:
        return self.output_format if self.output_config is None else self.output_config.format or self.output_format


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[StopString] | None = Field(None, max_length=MAX_STOPS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
