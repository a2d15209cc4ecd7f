"""Logging: one line per record on stderr, with the time, the process and, where there is one, the request id."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    0x0A: "\\n",
    0x0D: "\\r",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def configure(process: str, level: str) -> None:
    """Sets up the root logger of this process; ``process`` is shown in each line, as ``scheduler`` or ``worker 0``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        LineFormatter(f"%(asctime)s.%(msecs)03d %(levelname)s {process}: %(message)s", datefmt="%m-%d %H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class LineFormatter(logging.Formatter):
    """Escapes control characters, so that nothing a client sends can look like a record of its own.

    A traceback keeps its lines, each indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROLS)

    def formatException(self, ei: Any) -> str:
        return "\n".join("  " + line.translate(_CONTROLS) for line in super().formatException(ei).split("\n"))


class LimitedLog:
    """Warnings that a peer can cause at will: at most one a second, with how many there were in all."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._next = float("-inf")
        self._total = 0

    def warning(self, message: str, *args: object) -> None:
        self._total += 1
        now = self._clock()
        if now >= self._next:
            self._next = now + 1.0
            self._log.warning(message + " (%d in all)", *args, self._total)
