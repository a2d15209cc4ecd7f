"""Conversations to prompts: what of a chat the template is given, and what is done for templates that know no tools."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.tokenizer.config import RESERVED_VARIABLES, ChatSettings
from services.tokenizer.messages import normalize, parts_of, text_of
from services.tokenizer.parsers.output import OutputFormat
from services.tokenizer.template import ChatTemplate
from services.tokenizer.tool_prompt import with_tools
from shared.errors import RequestError
from shared.wire import ToolUse

ID_LENGTH = 9  # of a call's id, in letters and digits, as Mistral's templates demand it


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat to be rendered. variables: the template's, as the client gave them. template: its own, if not empty."""

    messages: list[Any]
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolUse | None = None
    template: str = ""


def continued(chat: Conversation) -> str | None:
    """The text of the final message, where the answer goes on with it."""
    if not chat.variables.get("continue_final_message"):
        return None
    return text_of(normalize(chat.messages[-1:])[0].get("content", ""))


def render(template: ChatTemplate, conversation: Conversation, format: OutputFormat, settings: ChatSettings) -> str:
    """The prompt. Raises RequestError for messages and variables that are wrong, and for what the template refuses."""
    for name in RESERVED_VARIABLES:
        if name in conversation.variables:
            raise RequestError(f"{name} cannot be a template variable", param=f"chat_template_kwargs.{name}")
    as_parts = template.takes_parts if settings.content == "auto" else settings.content == "openai"
    messages = normalize(conversation.messages)
    goes_on = bool(conversation.variables.get("continue_final_message"))
    variables = {"add_generation_prompt": not goes_on, **settings.variables, **conversation.variables}
    use = conversation.tools if conversation.tools is not None and conversation.tools.choice != "none" else None
    if use is not None and use.choice == "auto" and not settings.auto_tools:
        message = (
            "tool_choice: 'auto' is not allowed by this server, which was started with --no-enable-auto-tool-choice"
        )
        raise RequestError(message, code="unsupported_value", param="tool_choice")
    if not template.knows_tools:
        messages = with_tools(messages, use, format)
    elif use is not None:
        variables["tools"] = use.tools
    if format.tools == "mistral":
        messages = [_with_short_ids(message) for message in messages]
    form = parts_of if as_parts else text_of
    messages = [{**one, "content": form(one["content"])} if "content" in one else one for one in messages]
    return template.render(messages, variables)


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Calls' ids in the one form that Mistral's templates take, whoever made them."""
    result = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        result["tool_call_id"] = _short(message["tool_call_id"])
    if "tool_calls" in message:
        calls = message["tool_calls"]
        result["tool_calls"] = [{**call, "id": _short(call["id"])} if call.get("id") else call for call in calls]
    return result


def _short(id: str) -> str:
    if len(id) == ID_LENGTH and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode(errors="replace")).hexdigest()[:ID_LENGTH]
