"""HTTP calls that run beside the test, and their server-sent events."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk, ParsedChoice


class Posted:
    """A POST in a thread, so that the test can play the pipeline meanwhile."""

    def __init__(self, client: httpx.Client, path: str, body: dict[str, Any] | bytes) -> None:
        self._response: httpx.Response | None = None
        self._error: Exception | None = None
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        self._thread = threading.Thread(target=self._run, args=(client, path, content), daemon=True)
        self._thread.start()

    def _run(self, client: httpx.Client, path: str, content: bytes) -> None:
        try:
            self._response = client.post(path, content=content)
        except httpx.HTTPError as error:
            self._error = error

    def response(self, timeout: float = 10.0) -> httpx.Response:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "no answer"
        assert self._response is not None, self._error
        return self._response


class Streamed:
    """A streamed POST in a thread: its status once headers came, and its events one by one."""

    END = object()

    def __init__(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        self._items: queue.Queue[Any] = queue.Queue()
        self._stop = threading.Event()
        args = (client, path, {**body, "stream": True})
        self._thread = threading.Thread(target=self._run, args=args, daemon=True)
        self._thread.start()

    def _run(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        try:
            with client.stream("POST", path, json=body) as response:
                self._items.put(response)
                if response.status_code != 200:
                    response.read()
                    return
                for event in parsed(response.iter_text()):
                    self._items.put(event)
                    if self._stop.is_set():
                        return
        except httpx.HTTPError as error:
            self._items.put(error)
        finally:
            self._items.put(self.END)

    def opened(self, timeout: float = 10.0) -> httpx.Response:
        response = self._items.get(timeout=timeout)
        assert isinstance(response, httpx.Response), response
        return response

    def next(self, timeout: float = 10.0) -> Any:
        item = self._items.get(timeout=timeout)
        assert item is not self.END, "the stream ended"
        return item

    def rest(self, timeout: float = 10.0) -> list[Any]:
        """All events up to the end of the body."""
        events = []
        while (item := self._items.get(timeout=timeout)) is not self.END:
            events.append(item)
        return events


def parsed(pieces: Iterator[str]) -> Iterator[Any]:
    """The events of an SSE body: each is ``data: ...`` and an empty line, a typed one with its type before that.

    Between them may be the comments that keep it alive.
    """
    pending = ""
    for piece in pieces:
        pending += piece
        while "\n\n" in pending:
            one, pending = pending.split("\n\n", 1)
            if one == KEEP_ALIVE:
                yield one
                continue
            name, data = one.split("\n") if one.startswith("event: ") else ("", one)
            assert data.startswith("data: ") and "\n" not in data, one
            event = "[DONE]" if data == "data: [DONE]" else orjson.loads(data.removeprefix("data: "))
            assert not name or name == f"event: {event['type']}"
            yield event
    assert not pending, pending


KEEP_ALIVE = ": keep-alive"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def put_together(chunks: list[dict[str, Any]]) -> ParsedChoice[None]:
    """The first choice that OpenAI's own client makes of the chunks of a streamed chat."""
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.get_final_completion().choices[0]
