"""Endpoints that tell a request's prompts instead of answering it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.config import GatewayConfig
from services.gateway.engine import Engine
from services.gateway.errors import JSON, renaming
from services.gateway.generation import Intake, take
from services.gateway.models import Models
from services.gateway.schemas import Asked
from shared.wire import SubmitText, encode

Q = TypeVar("Q", bound=Asked)


class Prompts(Generic[Q]):
    """The tokenizer takes the very submissions that would be generated from, so all its checks are made."""

    def __init__(self, api: Intake[Q], engine: Engine, models: Models, config: GatewayConfig) -> None:
        self._api, self._engine, self._models, self._config = api, engine, models, config

    async def render(self, request: Request) -> Response:
        """vLLM's ``/render`` of a request with one prompt."""
        [told] = await self._rendered(request)
        return JSON(told)

    async def render_all(self, request: Request) -> Response:
        """The same for a list of prompts."""
        return JSON(await self._rendered(request))

    async def count(self, request: Request) -> Response:
        """Anthropic's ``count_tokens``."""
        return JSON({"input_tokens": await self._counted(request)})

    async def count_input(self, request: Request) -> Response:
        """OpenAI's ``input_tokens`` of responses."""
        return JSON({"object": "response.input_tokens", "input_tokens": await self._counted(request)})

    async def _counted(self, request: Request) -> int:
        asked, _, [submit] = await take(request, self._api, self._engine, self._models, self._config)
        return len((await self._ask(asked, submit))["tokens"])

    async def _rendered(self, request: Request) -> list[dict[str, Any]]:
        asked, model, submits = await take(request, self._api, self._engine, self._models, self._config)
        prompts = await asyncio.gather(*(self._ask(asked, submit) for submit in submits))
        return [
            {
                "request_id": submit.request_id,
                "model": model,
                "prompt": prompt["prompt"],
                "token_ids": prompt["tokens"],
                "sampling_params": {**asdict(submit.sampling), "max_tokens": prompt["max_tokens"]},
                "features": None,
                "stream": bool(asked.stream),
                "cache_salt": submit.cache_salt or None,
                "priority": submit.priority,
            }
            for submit, prompt in zip(submits, prompts, strict=True)
        ]

    async def _ask(self, asked: Q, submit: SubmitText) -> dict[str, Any]:
        args = {"submit": encode(submit)}
        with renaming(self._api.names(asked)):
            reply: dict[str, Any] = await self._engine.ask_tokenizer("render", args, self._config.accept_timeout)
        return reply
