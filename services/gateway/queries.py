"""Questions beside the request path, and the futures of their answers."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from shared.errors import RequestError
from shared.link import Link
from shared.wire import Query, Reply


class Queries:
    """The unanswered questions on one link."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    async def ask(self, link: Link, what: str, args: dict[str, Any], timeout: float, cursor: int = 0) -> Reply:
        """The reply. Raises RequestError: the reply's own, or 503 when none came within ``timeout`` seconds."""
        number = next(self._numbers)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            link.send(Query(number, what, args, cursor))
            reply = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise RequestError(
                f"{link.name} did not answer the {what} query within {timeout:g} s", status=503, code="timeout"
            ) from None
        finally:
            del self._waiting[number]
        if reply.status >= 400:
            body = reply.body if isinstance(reply.body, dict) else {}
            raise RequestError(
                str(body.get("message") or f"{link.name} refused the {what} query"),
                status=reply.status if reply.status <= 599 else 500,
                code=body.get("code"),
                param=body.get("param"),
            )
        return reply

    def answer(self, reply: Reply) -> None:
        future = self._waiting.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail(self, error: RequestError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
