"""What every request passes through, as plain ASGI: request id, access log, errors, API keys."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.calls import ClientGone
from services.gateway.errors import error_response
from services.gateway.fields import NAME
from services.gateway.metrics import GatewayMetrics
from shared.errors import RequestError

log = logging.getLogger(__name__)
access = logging.getLogger("quire.access")

GONE = 499  # for log and metrics only: there is nobody to send it to
ADMIN_PATHS = "/internal/"
OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics", "/version", "/openapi.json", "/docs"})


class RequestContext:
    """Gives each request its id and counts and logs the answer.

    The id is the client's X-Request-Id if it is a sane one, else the ``request_id`` of the body, if it has one
    (``generation.take`` puts that in), else one made here. It is a name only: any number of requests may have the same.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, access_log: bool) -> None:
        self._app, self._metrics, self._access_log = app, metrics, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.monotonic()
        offered = Headers(scope=scope).get("x-request-id", "")
        named = NAME.fullmatch(offered) is not None
        state: dict[str, Any] = {"request_id": offered if named else uuid.uuid4().hex, "named": named, "tenant": ""}
        scope["state"] = state
        status = GONE

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            self._metrics.responses.inc(labels=(str(status),))
            if self._access_log:
                took = time.monotonic() - begin
                path = quote(scope["path"], safe="/:@!$&'()*+,;=~")  # escaped again: it may hold line ends and worse
                access.info("%s %s %d %.3fs request_id=%s", scope["method"], path, status, took, state["request_id"])


class Errors:
    """Turns what the inner app raises before its answer began into an error answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        headers: dict[str, str] = {}
        try:
            await self._app(scope, receive, sending)
            return
        except ClientGone:
            return
        except RequestError as caught:
            error = caught
            if error.status == 401:
                headers["WWW-Authenticate"] = "Bearer"
        except HTTPException as caught:
            headers.update(caught.headers or {})
            error = RequestError(
                f"{scope['method']} {scope['path'][:200]}: {caught.detail}", status=caught.status_code, code="not_found"
            )
            if error.status == 405:
                error.code = "method_not_allowed"
        except Exception:
            log.exception("request_id=%s failed", scope["state"]["request_id"])
            error = RequestError("internal error; the log has the details", status=500, code="internal_error")
        if started:
            raise error  # the server closes the connection: half an answer must not look like a whole one
        await error_response(error, headers, scope["path"])(scope, receive, send)


class ApiKeys:
    """Lets only holders of a key in, except to the paths that say nothing about anybody's requests.

    A tenant is the holder of a key, by the first 16 hex digits of its SHA-256. With ``trust_header`` the X-Tenant
    header of a proxy that knows its users better names the tenant instead. Paths below /internal/, which say something
    about everybody's requests, want one of ``admin_keys`` where there are any.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], admin_keys: Sequence[str] = (), *, trust_header: bool = False
    ) -> None:
        self._app, self._trust_header = app, trust_header
        self._digests, self._admin_digests = _digests(keys), _digests(admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if self._admin_digests and scope["path"].startswith(ADMIN_PATHS):
            _holder(headers, self._admin_digests, "admin API key")
        elif self._digests and scope["path"] not in OPEN_PATHS:
            scope["state"]["tenant"] = _holder(headers, self._digests, "API key")[:16]
        if self._trust_header and (name := headers.get("x-tenant")) is not None:
            if not NAME.fullmatch(name):
                raise RequestError("X-Tenant: 1 to 128 visible ASCII characters are allowed", code="invalid_value")
            scope["state"]["tenant"] = name
        await self._app(scope, receive, send)


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _holder(headers: Headers, digests: list[bytes], what: str) -> str:
    """SHA-256 of the key presented, in hex. All keys are compared, each in constant time, so timing tells nothing.

    Anthropic's clients send theirs as x-api-key. Raises RequestError 401 when it is none of those with ``digests``.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    given = hashlib.sha256(key.strip().encode("latin-1")).digest()
    matches = [hmac.compare_digest(given, digest) for digest in digests]
    if not any(matches):
        raise RequestError(
            f"missing or wrong {what}; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            status=401,
            code="invalid_api_key",
        )
    return given.hex()
