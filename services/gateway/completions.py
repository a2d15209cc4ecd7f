"""Shapes of ``/v1/completions``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.gateway import logprobs
from services.gateway.calls import Delta, Request
from services.gateway.generation import Shape, finish_of
from services.gateway.model import Limits
from services.gateway.schemas import CompletionRequest
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

    def pieces(self, asked: CompletionRequest, request: Request, delta: Delta) -> list[dict[str, Any]]:
        return [self._choice(asked, request, delta)]

    def _choice(self, asked: CompletionRequest, request: Request, delta: Delta) -> dict[str, Any]:
        if not asked.wants_output and delta.finished is not None:
            delta = replace(delta, finished=replace(delta.finished, reason="length", stop_reason=""))
        if not asked.wants_output:
            delta = replace(delta, parts=[], ids=[], logprobs=[])
        text = request.prompt + delta.text if asked.echo and delta.first else delta.text
        ids = {"token_ids": delta.ids} if asked.return_token_ids else {}
        return {"text": text, "logprobs": self._logprobs(asked, request, delta), **finish_of(asked, delta), **ids}

    def _logprobs(self, asked: CompletionRequest, request: Request, delta: Delta) -> dict[str, Any] | None:
        top, as_ids = asked.output_logprobs, bool(asked.return_tokens_as_token_ids)
        if top < 0:
            return None
        echoed = request.prompt_logprobs if asked.echo and delta.first else []
        shift = len(request.prompt) if asked.echo else 0
        prompt = logprobs.of_completion(echoed, top, 0, as_ids=as_ids)
        output = logprobs.of_completion(delta.logprobs, top, shift, as_ids=as_ids)
        return {name: prompt[name] + output[name] for name in prompt}

    def whole(self, asked: CompletionRequest, request: Request, delta: Delta) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids} if asked.return_token_ids else {}
        if asked.prompt_logprobs is not None:
            prompt["prompt_logprobs"] = logprobs.of_prompt(request.prompt_logprobs, asked.prompt_logprobs)
        return {**self._choice(asked, request, delta), **prompt}
