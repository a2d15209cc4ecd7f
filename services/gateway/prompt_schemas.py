"""What the bodies of ``/tokenize``, ``/detokenize`` and ``/internal/explain`` may hold."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from services.gateway.conversation import Messages, check_messages, plain, template_variables
from services.gateway.fields import MEDIA
from services.gateway.model import Body
from services.gateway.token_ids import TokenIds
from services.gateway.tools import MAX_TOOLS, AnyTool, use_of
from shared.errors import RequestError


class TokenizeRequest(Body):
    only_at = MEDIA

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: list[AnyTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt: give either prompt or messages", param="prompt")
        check_messages(self.messages or [])
        use_of(self.tools, None, True)
        template_variables(self.chat_template_kwargs, self.add_generation_prompt, self.continue_final_message)

    def prompt_args(self) -> dict[str, Any]:
        """The arguments of a tokenizer's ``tokenize`` query."""
        args = self.model_dump(exclude_none=True, include=set(TokenizeRequest.model_fields) - {"messages"})
        if self.messages is not None:
            args["messages"] = plain(self.messages)
        return args


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class ExplainRequest(TokenizeRequest):
    """A prompt as in ``/tokenize``, or its ``tokens``; ``tenant`` asks on behalf of another one."""

    tokens: TokenIds | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    tenant: str | None = None

    def check(self) -> None:
        if self.tokens is None:
            super().check()
        elif not (self.prompt is None and self.messages is None):
            raise RequestError("tokens: give one of prompt, messages and tokens", param="tokens")
