"""Request bodies: read up to a limit, parsed as JSON without letting a hostile one stall the event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from starlette.requests import Request

from services.gateway.calls import ClientGone
from services.gateway.fields import MAX_DEPTH, nests_too_deeply
from shared.errors import RequestError

MIN_VALUES = 1 << 17  # JSON values a body may always hold
PAUSE_LIMIT = 60.0  # seconds a client may pause in the middle of its body
BODY_TIMEOUT = 300.0  # seconds a whole body may take


async def read_json(request: Request, max_bytes: int, max_model_len: int) -> dict[str, Any]:
    """The JSON object in the body. Raises RequestError: 413 as soon as it is too long, 400 when it is not an object."""
    return parse_object(await _read(request, max_bytes), max(MIN_VALUES, 4 * max_model_len))


def parse_object(raw: bytes, max_values: int) -> dict[str, Any]:
    """Parses strictly: UTF-8 without lone surrogates, no NaN or Infinity, fields of at most MAX_DEPTH levels.

    A long string costs next to nothing to parse, millions of small values cost seconds of a loop that all streams
    share, so their number is limited beforehand.
    """
    if _values_exceed(raw, max_values):
        raise RequestError(f"the body holds more than the limit of {max_values} JSON values", code="too_many_values")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body is not a JSON object but a {type(value).__name__}", code="invalid_json")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        for name, inner in value.items():
            if nests_too_deeply(inner):
                name = name[:100]
                message = f"{name}: lists and objects nest deeper than the limit of {MAX_DEPTH} levels"
                raise RequestError(message, code="invalid_value", param=name)
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    too_long = RequestError(
        f"the request body is over the limit of {max_bytes} bytes (--max-body-bytes)",
        status=413,
        code="body_too_large",
    )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_long
    body = bytearray()
    end = time.monotonic() + BODY_TIMEOUT
    more = True
    while more:
        left = end - time.monotonic()
        try:
            message = await asyncio.wait_for(request.receive(), min(PAUSE_LIMIT, left))
        except TimeoutError:
            late = f"was not whole within {BODY_TIMEOUT:g} s" if left < PAUSE_LIMIT else f"paused for {PAUSE_LIMIT:g} s"
            raise RequestError(f"the request body {late}", status=408, code="timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > max_bytes:
            raise too_long
    return bytes(body)


def _values_exceed(raw: bytes, limit: int) -> bool:
    """Whether ``raw``, if it is JSON, holds more than ``limit`` values, counted without parsing.

    Commas and opening brackets are counted, so a list or object in a list counts as two.
    """
    if _separators(raw) <= limit:
        return False
    # Separators inside strings do not count. Without escapes, every second piece between quotes is outside of strings.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * limit:  # a value and its key are at most four quotes
        return True
    return _separators(b"".join(plain.split(b'"')[::2])) > limit


def _separators(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")
