"""Errors as OpenAI clients know them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

from shared.errors import RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "client_closed_request",
}


def error_body(error: RequestError) -> dict[str, Any]:
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param or None, "code": error.code or None}}


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    sent = dict(headers or {})
    if error.retry_after is not None:
        sent["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return JSON(error_body(error), status_code=error.status, headers=sent)


class JSON(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)
