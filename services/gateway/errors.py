"""Errors as clients know them: OpenAI's ``{"error": {"message", "type", "param", "code"}}``, or Anthropic's."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
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

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_body(error: RequestError) -> dict[str, Any]:
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param or None, "code": error.code or None}}


def anthropic_error_body(error: RequestError) -> dict[str, Any]:
    """The same for Anthropic's clients."""
    kind = _ANTHROPIC_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """RequestErrors raised in the block name their field as the client knows it.

    names: patterns of field paths, matched at their beginning, and what stands there instead (as in ``re.sub``).
    """
    try:
        yield
    except RequestError as error:
        path = error.param or ""
        for pattern, called in names.items():
            renamed = re.sub(rf"\A{pattern}", called, path, count=1)
            if renamed != path:
                error.param = renamed
                if error.message.startswith(path):
                    error.message = renamed + error.message.removeprefix(path)
                break
        raise


def error_response(error: RequestError, headers: Mapping[str, str], path: str) -> Response:
    """In the form that the clients of ``path`` know."""
    sent = dict(headers)
    if error.retry_after is not None:
        sent["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    body = anthropic_error_body(error) if is_anthropic(path) else error_body(error)
    return JSON(body, status_code=error.status, headers=sent)


class JSON(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)
