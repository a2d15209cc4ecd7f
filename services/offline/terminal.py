"""What ``quire chat`` and ``quire complete`` share: their options, streams from the server, lines from the user."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from services.offline.client import Address, Client
from services.offline.options import ServerChoice, parse, url_option
from services.offline.server import ServerError
from shared.config import option
from shared.errors import RequestError

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class TerminalConfig:
    url: str = url_option()
    quick: str = option("", "answer this and end", flags=("-q",))
    max_tokens: int | None = option(None, "tokens of an answer at most", minimum=1)
    temperature: float | None = option(None, "0: the likeliest always; default: the model's own", minimum=0, maximum=2)
    top_p: float | None = option(None, "share of likely tokens to choose from; default: the model's own")
    seed: int | None = option(None, "makes answers repeat")

    def fields(self) -> dict[str, Any]:
        """Of every request."""
        given = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
        return {name: value for name, value in given.items() if value is not None}


C = TypeVar("C", bound=TerminalConfig)


class Session:
    """A connection to a server, as a context manager around all that is asked of it."""

    def __init__(self, address: Address) -> None:
        self._client = Client(address, 1)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Session:
        self._runner.run(self._client.__aenter__())
        try:
            answer = self._runner.run(self._client.get("/v1/models"))
            if answer.status != 200:
                raise answer.failure
        except BaseException:
            self.__exit__()
            raise
        self.model = str(answer.body["data"][0]["id"])
        return self

    def __exit__(self, *exception: object) -> None:
        self._runner.run(self._client.__aexit__())
        self._runner.close()

    def ask(self, path: str, body: Mapping[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
        """Streams an answer, showing each choice that comes. An interrupt cancels the request.

        Raises RequestError and ServerError as ``Client.events``.
        """
        self._runner.run(self._ask(path, {"model": self.model, **body}, show))

    async def _ask(self, path: str, body: Mapping[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
        async with aclosing(self._client.events(path, body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    show(choice)
                await asyncio.sleep(0)  # events that came at once have no other place where an interrupt is seen


class Screen:
    """stdin and stdout: a terminal with line editing and history, or pipes."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if self.interactive:
            import readline  # noqa: F401  (input() then edits lines and knows earlier ones)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        # As in arguments: what is no text is found where it is sent, and costs only the question that it is in.
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]

    def lines(self) -> Iterator[str]:
        """What the user types, until the end of input. Ctrl-C only throws away the line."""
        while True:
            try:
                yield input("> " if self.interactive else "")
            except KeyboardInterrupt:
                print()
            except EOFError:
                if self.interactive:
                    print()
                return

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Something that is not part of an answer: dim in a terminal, otherwise not at all."""
        if self.interactive:
            self.write(f"{DIM}{text}{PLAIN}")

    def complain(self, message: str) -> None:
        sys.stdout.flush()
        print(f"error: {message}", file=sys.stderr)


def run(cls: type[C], argv: Sequence[str], use: Callable[[C, Session, Screen], int], *, prog: str, about: str) -> int:
    """A command: parses its options and calls ``use`` while there is a server. Returns the exit code."""
    config, choice = parse(cls, argv, prog=prog, about=about)
    screen = Screen()
    if not choice.url:
        screen.note("starting the model ...\n")
    try:
        return _use(config, choice, screen, use)
    except (ServerError, RequestError) as error:
        screen.complain(str(error))
        return 1


def _use(config: C, choice: ServerChoice, screen: Screen, use: Callable[[C, Session, Screen], int]) -> int:
    with choice.address() as address, Session(address) as session:
        return use(config, session, screen)
