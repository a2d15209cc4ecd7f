"""Endpoints of OpenAI's and vLLM's servers for what this one does not do: their clients are told so, and why."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

from starlette.requests import Request
from starlette.routing import Route

from shared.errors import RequestError

TEXT_ONLY = "this server generates text from text"
STORED = "this server stores nothing"
ADAPTERS = "this server has no LoRA adapters"

REFUSED = {
    "/v1/embeddings": f"embeddings are not supported: {TEXT_ONLY}",
    **dict.fromkeys(("/pooling", "/classify"), f"pooling is not supported: {TEXT_ONLY}"),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), f"no scores: {TEXT_ONLY}"),
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"), f"no images: {TEXT_ONLY}"),
    **dict.fromkeys(
        ("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"), f"no audio: {TEXT_ONLY}"
    ),
    "/v1/moderations": f"no moderation: {TEXT_ONLY}",
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), ADAPTERS),
    **dict.fromkeys(("/v1/files", "/v1/batches"), f"{STORED}; batches are run by `quire run-batch`"),
    **dict.fromkeys(("/v1/responses/{id}", "/v1/responses/{id}/{what}"), STORED),
}


def refused() -> list[Route]:
    return [Route(path, _answer(why), methods=["GET", "POST", "DELETE"]) for path, why in REFUSED.items()]


def _answer(why: str) -> Callable[[Request], Awaitable[NoReturn]]:
    async def refuse(request: Request) -> NoReturn:
        raise RequestError(f"{request.method} {request.url.path[:200]}: {why}", status=404, code="not_supported")

    return refuse
