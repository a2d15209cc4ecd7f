"""Request bodies: the limit on JSON values counts what a parser would make, without parsing; and limits on time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from services.gateway import body
from services.gateway.body import parse_object
from services.gateway.fields import MAX_DEPTH
from shared.errors import RequestError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(alphabet='ab,[{"\\é\n'),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='a,"\\['), inner, max_size=5),
    max_leaves=30,
)


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def count(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count, inner))


@given(st.dictionaries(st.text(alphabet='a,"\\['), VALUES, max_size=5), st.booleans())
def test_what_holds_half_as_many_values_as_the_limit_is_never_refused(body: dict[str, Any], ascii_only: bool) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only).encode()
    assert parse_object(raw, 2 * count(body)) == body


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": [%s]}' % b",".join([b"1"] * 1000),
        b'{"a": [%s]}' % b",".join([b"[]"] * 1000),
        b'{"a": [%s]}' % b",".join([b'"\\\\"'] * 1000),
        b"{%s}" % b",".join(b'"k%d":""' % number for number in range(1000)),
    ],
    ids=["numbers", "lists", "strings", "fields"],
)
def test_many_values_are_refused(raw: bytes) -> None:
    assert count(parse_object(raw, 3000)) >= 1001
    with pytest.raises(RequestError, match="limit of 900 JSON values"):
        parse_object(raw, 900)


def test_separators_inside_a_long_string_do_not_count() -> None:
    text = 'a,[{"\\' * 5000
    assert parse_object(json.dumps({"prompt": text}).encode(), 50) == {"prompt": text}


@pytest.mark.parametrize(
    ("limit", "pause", "message"),
    [(0.2, 60.0, "the request body was not whole within 0.2 s"), (300.0, 0.01, "the request body paused for 0.01 s")],
)
def test_a_body_that_comes_too_slowly_is_refused(
    monkeypatch: pytest.MonkeyPatch, limit: float, pause: float, message: str
) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT", limit)
    monkeypatch.setattr(body, "PAUSE_LIMIT", pause)

    async def receive() -> Message:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b"{", "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(RequestError, match=message) as caught:
        asyncio.run(body.read_json(request, 1 << 20, 100))
    assert (caught.value.status, caught.value.code) == (408, "timeout")


def test_levels_are_counted_and_the_field_named() -> None:
    body = {"flat": [[]] * 300, "tools": nested(MAX_DEPTH)}
    assert parse_object(json.dumps(body).encode(), 1000) == body
    for deep in (nested(MAX_DEPTH + 1), [[1], nested(MAX_DEPTH)], nested(900)):
        with pytest.raises(RequestError, match=r"^tools: .* deeper than the limit of 200 levels") as raised:
            parse_object(json.dumps({"flat": 1, "tools": deep}).encode(), 5000)
        assert (raised.value.status, raised.value.code, raised.value.param) == (400, "invalid_value", "tools")
