"""The HTTP API: routes and what they pass through."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.body import read_json
from services.gateway.chat import Chat
from services.gateway.completions import Completions
from services.gateway.config import GatewayConfig
from services.gateway.description import described
from services.gateway.engine import Engine
from services.gateway.errors import JSON
from services.gateway.generation import Generation
from services.gateway.messages.api import MessageCounts, Messages
from services.gateway.middleware import ApiKeys, Errors, RequestContext
from services.gateway.models import Models
from services.gateway.prompt_schemas import DetokenizeRequest, ExplainRequest, TokenizeRequest
from services.gateway.prompts import Prompts
from services.gateway.refused import refused
from services.gateway.responses.api import Responses
from services.gateway.schemas import validate
from shared.errors import RequestError
from shared.metrics import render

log = logging.getLogger(__name__)

QUERY_TIMEOUT = 5.0  # seconds the scheduler may take to answer about its memory
METRICS_TIMEOUT = 1.0  # seconds the scheduler may take to give the other processes' numbers


def make_app(config: GatewayConfig, engine: Engine) -> ASGIApp:
    models = Models(config.served_model_name, lambda: engine.model_name)
    router = Router(routes(config, engine, models), redirect_slashes=False)

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = router  # so that 404 and 405 are raised, and answered like every other error
        await router(scope, receive, send)

    app: ASGIApp = ApiKeys(routed, config.api_key, config.admin_api_key, trust_header=config.trust_tenant_header)
    app = Errors(app)
    app = RequestContext(app, engine.metrics, config.access_log)
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )


def routes(config: GatewayConfig, engine: Engine, models: Models) -> list[Route]:
    endpoints = Endpoints(config, engine, models)
    force_usage = config.enable_force_include_usage
    chat, completions = Chat(force_usage), Completions(force_usage)
    parts = (engine, models, config)
    return [
        Route("/v1/chat/completions", Generation(chat, *parts), methods=["POST"]),
        Route("/v1/chat/completions/render", Prompts(chat, *parts).render, methods=["POST"]),
        Route("/v1/completions", Generation(completions, *parts), methods=["POST"]),
        Route("/v1/completions/render", Prompts(completions, *parts).render_all, methods=["POST"]),
        Route("/v1/responses", Generation(Responses(), *parts), methods=["POST"]),
        Route("/v1/responses/input_tokens", Prompts(Responses(), *parts).count_input, methods=["POST"]),
        Route("/v1/messages", Generation(Messages(), *parts), methods=["POST"]),
        Route("/v1/messages/count_tokens", Prompts(MessageCounts(), *parts).count, methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/health", endpoints.health),
        Route("/ping", endpoints.health),
        Route("/ready", endpoints.ready),
        Route("/version", endpoints.version),
        Route("/metrics", endpoints.metrics),
        Route("/internal/blocks", endpoints.blocks),
        Route("/internal/status", endpoints.status),
        Route("/internal/explain", endpoints.explain, methods=["POST"]),
        *([] if config.disable_fastapi_docs else described()),
        *refused(),
    ]


class Endpoints:
    """Everything beside the completions."""

    def __init__(self, config: GatewayConfig, engine: Engine, models: Models) -> None:
        self._config, self._engine, self._models = config, engine, models

    async def models(self, request: Request) -> Response:
        limit = self._engine.max_model_len
        return JSON({"object": "list", "data": [self._models.card(name, limit) for name in self._models.names]})

    async def model(self, request: Request) -> Response:
        name = self._models.resolve(request.path_params["name"])
        return JSON(self._models.card(name, self._engine.max_model_len))

    async def tokenize(self, request: Request) -> Response:
        limits = self._engine.limits
        body = await read_json(request, self._config.max_body_bytes, limits.max_model_len)
        self._models.resolve(body.pop("model", None))
        asked = validate(TokenizeRequest, body, limits)
        asked.check()
        reply = await self._ask("tokenize", asked.prompt_args())
        tokens = reply["tokens"]
        return JSON(
            {
                "count": len(tokens),
                "max_model_len": limits.max_model_len,
                "tokens": tokens,
                "token_strs": reply.get("token_strs"),
            }
        )

    async def detokenize(self, request: Request) -> Response:
        limits = self._engine.limits
        body = await read_json(request, self._config.max_body_bytes, limits.max_model_len)
        self._models.resolve(body.pop("model", None))
        asked = validate(DetokenizeRequest, body, limits)
        return JSON({"prompt": (await self._ask("detokenize", {"tokens": asked.tokens}))["prompt"]})

    async def blocks(self, request: Request) -> Response:
        """A page of the block ledger; ``next_cursor`` is the next one's ``cursor``, null on the last."""
        return await self._page("ledger", request)

    async def status(self, request: Request) -> Response:
        """The scheduler's own view: load, why requests wait, what preemptions cost; its clients, paged."""
        return await self._page("status", request)

    async def _page(self, what: str, request: Request) -> Response:
        text = request.query_params.get("cursor", "0")
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise RequestError(f"cursor: {text[:32]!r} is not a number that next_cursor gave", param="cursor")
        reply = await self._engine.ask_scheduler(what, QUERY_TIMEOUT, cursor=int(text))
        return JSON({**reply.body, "next_cursor": reply.next_cursor or None})

    async def explain(self, request: Request) -> Response:
        """What of a prompt is in the prefix cache, and why not more."""
        limits = self._engine.limits
        body = await read_json(request, self._config.max_body_bytes, limits.max_model_len)
        self._models.resolve(body.pop("model", None))
        asked = validate(ExplainRequest, body, limits)
        asked.check()
        tokens = asked.tokens
        if tokens is None:
            tokens = (await self._ask("tokenize", asked.prompt_args()))["tokens"]
        tenant = request.scope["state"]["tenant"] if asked.tenant is None else asked.tenant
        args = {"tokens": tokens, "cache_salt": asked.cache_salt or "", "tenant": tenant}
        return JSON((await self._engine.ask_scheduler("explain", QUERY_TIMEOUT, args)).body)

    async def health(self, request: Request) -> Response:
        """Whether the server lives: 200 from the first moment on, 503 once its scheduler is lost."""
        return _state(self._engine.unhealthy)

    async def ready(self, request: Request) -> Response:
        """Whether a request sent now would be served."""
        return _state(self._engine.unready)

    async def version(self, request: Request) -> Response:
        return JSON({"version": version("quire-serving")})

    async def metrics(self, request: Request) -> Response:
        """All processes' numbers, this one's being fresh; this one's alone when the scheduler does not answer."""
        others: list[Any] = []
        try:
            others = (await self._engine.ask_scheduler("metrics", METRICS_TIMEOUT)).body
        except RequestError as error:
            log.warning("metrics of the other processes are missing: %s", error.message)
        labels = {"model_name": self._models.shown, "engine": "0"}
        page = render([self._engine.metrics.registry.snapshot(), *others], labels)
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _ask(self, what: str, args: dict[str, Any]) -> dict[str, Any]:
        reply = await self._engine.ask_tokenizer(what, args, self._config.accept_timeout)
        if not isinstance(reply, dict):
            raise RequestError(f"the tokenizer's answer to {what} is no map", status=500, code="internal_error")
        return reply


def _state(problem: str) -> Response:
    if problem:
        return JSON({"status": "unavailable", "reason": problem}, status_code=503, headers={"Retry-After": "1"})
    return JSON({"status": "ok"})
