"""Shapes of ``/v1/completions``."""

from __future__ import annotations

from typing import Any

from services.gateway.calls import Delta, Request
from services.gateway.generation import Shape, finish_of
from services.gateway.schemas import CompletionRequest, Limits
from shared.codec import int32
from shared.wire import SubmitText


class Completions(Shape[CompletionRequest]):
    request_model = CompletionRequest
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def submits(self, asked: CompletionRequest, limits: Limits, request_id: str, tenant: str) -> list[SubmitText]:
        submit = self.common(asked, limits, request_id, tenant, "completions", add_special_tokens=True)
        return [
            submit(prompt=prompt) if isinstance(prompt, str) else submit(prompt_ids=int32(prompt))
            for prompt in asked.prompt
        ]

    def envelope(self, asked: CompletionRequest, requests: list[Request]) -> dict[str, Any]:
        return {}

    def opening(self, asked: CompletionRequest, request: Request) -> dict[str, Any] | None:
        if not asked.return_token_ids:
            return None
        ids = {"prompt_token_ids": request.prompt_ids, "token_ids": []}
        return {"text": "", "logprobs": None, "finish_reason": None, "stop_reason": None, **ids}

    def piece(self, asked: CompletionRequest, delta: Delta) -> dict[str, Any]:
        ids = {"token_ids": delta.ids} if asked.return_token_ids else {}
        return {"text": delta.text, "logprobs": None, **finish_of(asked, delta), **ids}

    def whole(self, asked: CompletionRequest, request: Request, delta: Delta) -> dict[str, Any]:
        prompt = {"prompt_token_ids": request.prompt_ids} if asked.return_token_ids else {}
        return {**self.piece(asked, delta), **prompt}
