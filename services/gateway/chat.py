"""Shapes of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from services.gateway import logprobs
from services.gateway.calls import Delta, Request
from services.gateway.generation import Shape, finish_of
from services.gateway.schemas import ChatRequest, Limits
from shared.wire import SubmitText


class Chat(Shape[ChatRequest]):
    request_model = ChatRequest
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def submits(self, asked: ChatRequest, limits: Limits, request_id: str, tenant: str) -> list[SubmitText]:
        submit = self.common(asked, limits, request_id, tenant, "chat", add_special_tokens=False)
        messages = [message.plain() for message in asked.messages]
        return [submit(messages=messages, template_kwargs=asked.chat_template_kwargs or {})]

    def envelope(self, asked: ChatRequest, requests: list[Request]) -> dict[str, Any]:
        extra: dict[str, Any] = {"prompt_token_ids": requests[0].prompt_ids} if asked.return_token_ids else {}
        if asked.prompt_logprobs is not None:
            extra["prompt_logprobs"] = logprobs.of_prompt(requests[0].prompt_logprobs, asked.prompt_logprobs)
        return extra

    def opening(self, asked: ChatRequest, request: Request) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, asked: ChatRequest, request: Request, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.finished is None else {}
        ids = {"token_ids": delta.ids} if asked.return_token_ids else {}
        told = self._logprobs(asked, delta) if delta.logprobs else None
        return {"delta": content, "logprobs": told, **finish_of(asked, delta), **ids}

    def whole(self, asked: ChatRequest, request: Request, delta: Delta) -> dict[str, Any]:
        ids = {"token_ids": delta.ids} if asked.return_token_ids else {}
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(asked, delta), **finish_of(asked, delta), **ids}

    def _logprobs(self, asked: ChatRequest, delta: Delta) -> dict[str, Any] | None:
        if asked.output_logprobs < 0:
            return None
        as_ids = bool(asked.return_tokens_as_token_ids)
        return logprobs.of_chat(delta.logprobs, asked.output_logprobs, as_ids=as_ids)
