"""``quire complete``: goes on with texts, in the terminal or over pipes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from services.offline.terminal import Screen, Session, TerminalConfig, run
from shared.errors import RequestError

ABOUT = (
    "Goes on with each line, or with all of a piped stdin, as MODEL does without a chat template: on a server of its "
    "own (whose options it takes), or the one at --url."
)


def main(argv: Sequence[str]) -> int:
    """1 when an answer failed that nobody could see fail: with --quick or over pipes."""
    return run(TerminalConfig, argv, _complete, prog="quire complete", about=ABOUT)


def _complete(config: TerminalConfig, session: Session, screen: Screen) -> int:
    if config.quick or not screen.interactive:
        return 0 if _go_on(config.quick or sys.stdin.read().removesuffix("\n"), config, session, screen) else 1
    screen.note(f"{session.model}; Ctrl-C stops an answer, Ctrl-D ends\n")
    for line in screen.lines():
        if line:
            _go_on(line, config, session, screen)
    return 0


def _go_on(text: str, config: TerminalConfig, session: Session, screen: Screen) -> bool:
    try:
        body = {"prompt": text, **config.fields()}
        session.ask("/v1/completions", body, lambda choice: screen.write(choice["text"]))
    except RequestError as error:
        screen.complain(error.message)
        return False
    except KeyboardInterrupt:
        screen.note(" [stopped]")
    screen.write("\n")
    return True
